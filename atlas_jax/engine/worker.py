"""The engine's thread: admits, computes prompts chunk by chunk, runs rounds, hands out what they emitted."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable
from typing import Any

import jax
import numpy as np

from atlas_jax.completion import Completion, Delta
from atlas_jax.decode.group import Group
from atlas_jax.decode.guided import GuidedGroup
from atlas_jax.decode.k_policy import KPolicy, WidestK
from atlas_jax.decode.live import Live, Request
from atlas_jax.engine.api import (
    Cancelled,
    DeadlineExceeded,
    EngineConfig,
    EngineError,
    Score,
    StepFailed,
)
from atlas_jax.engine.figures import Figures
from atlas_jax.engine.queue import Job, WaitingQueue, next_prompt
from atlas_jax.engine.ticket import Ticket
from atlas_jax.engine.warm_up import Compiled, Kind, buckets
from atlas_jax.errors import AtlasError, StateError
from atlas_jax.runtime import Runtime

log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class Scoring:
    """Tokens whose log-probabilities somebody waits for."""

    tokens: np.ndarray
    n_top: int
    future: concurrent.futures.Future[Score]
    chunks: Generator[Any, None, None] | None = None
    parts: list[Any] = dataclasses.field(default_factory=list)


class Worker:
    """All but `submit`, `score`, `cancelled`, `stop` and `idle`, which are used under `changed`, is the thread's own."""

    def __init__(
        self, runtime: Runtime, config: EngineConfig, waiting: WaitingQueue, changed: threading.Condition
    ) -> None:
        self.runtime, self.config, self.waiting, self.changed = runtime, config, waiting, changed
        self.loop = runtime.loop
        self.buckets = buckets(config, runtime.run.slots)
        self.compiled = Compiled(self.loop, self.buckets, changed)
        self.figures = Figures(time.perf_counter())
        self.cancelled: set[Ticket] = set()
        self.stop = False
        self.jobs: dict[Job, None] = {}  # those that have a slot, the first admitted first
        self._scores: list[Scoring] = []
        self._scoring: Scoring | None = None
        self._groups: dict[Any, Group] = {}
        self._turn = 0
        self._blocked = False  # the next one needs more pages than are free

    def warm_up(self) -> None:
        """Compiles what requests with the default drafter need."""
        config = self.config
        self.compiled.warm_up(*self.runtime.drafting(config.defaults), config.warm_up, config.warm_up_s)

    # ---- called by others, under `changed` -------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        self.waiting.add(job)

    def score(self, scoring: Scoring) -> None:
        self._scores.append(scoring)

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.jobs or self._scores or self._scoring)

    # ---- the thread ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(self._awake, self._patience())
                if self.stop:
                    break
            try:
                self._turn += 1
                self._end_due()
                self._admit()
                self._compute_prompt()
                self._score()
                self._rounds()
            except Exception as error:
                log.exception("a turn of the engine failed")
                self._failed(error, [*self.jobs])
            if self.idle:
                with self.changed:
                    self.changed.notify_all()
        self._close()

    def _awake(self) -> bool:
        """Whether there is something to do now."""
        if self.stop or self.cancelled or self.jobs or self._scores or self._scoring:
            return True
        now = time.perf_counter()
        return any(self._compiled(job) or (job.deadline or now + 1) <= now for job in self.waiting)

    def _patience(self) -> float | None:
        """Seconds until the next deadline of those that wait."""
        deadlines = [job.deadline for job in self.waiting if job.deadline is not None]
        return max(0.0, min(deadlines) - time.perf_counter()) if deadlines else None

    def _end_due(self) -> None:
        """Ends those that were cancelled or whose time is over."""
        with self.changed:
            cancelled, self.cancelled = self.cancelled, set()
        now = time.perf_counter()
        for job in [*self.waiting, *self.jobs]:
            if job.ticket in cancelled:
                self._end(job, "cancelled", Cancelled, f"request {job.request.id} was cancelled")
            elif job.deadline is not None and job.deadline <= now:
                told = f"request {job.request.id} was not complete after {job.request.deadline_s} s"
                self._end(job, "deadline", DeadlineExceeded, told)

    def _admit(self) -> None:
        """Gives a free slot to the one that is next, if its prompt need not wait for longer ones, and to those whose
        prompts go along with it."""
        opened = False
        for job in self.waiting.ranked(time.perf_counter()) if len(self.waiting) else ():
            if not self.loop.free_slots or self._blocked:
                return
            if not self._compiled(job):
                continue
            prompt, computing = job.request.prompt, [*self._computing()]
            waits = opened or any(prompt.size >= live.left for live in computing)
            if waits and computing and not self.loop.joins(prompt, computing):
                return
            self._open(job)
            opened = True

    def _computing(self) -> dict[Live, Job]:
        """Those whose prompts are not computed yet, the first admitted first."""
        return {job.live: job for job in self.jobs if job.live and not job.live.started}

    def _compiled(self, job: Job) -> bool:
        return self.compiled.ready(_kind(job))

    def _open(self, job: Job) -> None:
        request = job.request
        auto = request.drafts == "auto"
        key = request.drafter, auto, job.guide is not None
        with self.changed:
            self.waiting.remove(job)
            self.jobs[job] = None
        try:
            if error := self.compiled.error(_kind(job)):
                raise error
            cut = lambda _, token_ids: job.answer.cut(token_ids)  # noqa: E731
            drafts = request.drafts if isinstance(request.drafts, int) else None
            wanted = Request(request.prompt, request.params, request.script, request.history, drafts=drafts)
            job.live = self.loop.admit(wanted, request.drafter, cut)
        except StateError:  # it waits until another one gives its pages back
            with self.changed:
                del self.jobs[job]
                self.waiting.add(job)
            self._blocked = True
            return
        except Exception as error:
            self._failed(error, [job])
            return
        job.live.guide = job.guide
        job.admitted = time.perf_counter()
        if key not in self._groups:
            kind = GuidedGroup if job.guide else Group
            self._groups[key] = kind(self.loop, request.drafter, self._policy(job, key), self.buckets)
        job.group = self._groups[key]
        reuse = job.live.sequence.reuse
        self.figures.prompt_tokens += reuse.prompt
        self.figures.restored_tokens += reuse.restored

    def _policy(self, job: Job, key: Any) -> Callable[[int], KPolicy]:
        """How the group chooses its rows that `job` is the first of."""
        drafter, drafts, context = job.request.drafter, job.request.drafts, int(job.request.prompt.size)
        if drafts == "auto":
            return lambda batch: self.loop.policy(drafter, drafts, context, batch)
        rows = lambda: self.compiled.rows(_kind(job)._replace(logged=self._groups[key].logged))  # noqa: E731
        return lambda batch: WidestK(rows, lambda: self._groups[key].widest)

    def _compute_prompt(self) -> None:
        """One dispatch: a chunk of one prompt, and of others what fits beside it."""
        computing = self._computing()
        if not computing:
            return
        first = next_prompt(computing.values(), self._turn).live
        lives = self.loop.together(sorted(computing, key=lambda live: live is not first))
        try:
            if not any(group.lives for group in self._groups.values()):  # nobody else keeps the host from running ahead
                jax.block_until_ready(self.loop.state.requests.words)
            for live in self.loop.prefill(lives):
                computing[live].group.join(live)
        except Exception as error:
            self._failed(error, [computing[live] for live in lives])

    def _score(self) -> None:
        """One chunk of one score."""
        if self._scoring is None:
            with self.changed:
                if not self._scores or not self.loop.free_slots:
                    return
                self._scoring = self._scores.pop(0)
        scoring = self._scoring
        try:
            if scoring.chunks is None:
                scoring.chunks = self.loop.score(scoring.tokens, self.compiled.n_top(scoring.n_top > 0) or 0)
            if not scoring.future.cancelled():
                scoring.parts.append(next(scoring.chunks))
                return
            scoring.chunks.close()
        except StopIteration:
            if scoring.future.set_running_or_notify_cancel():
                scoring.future.set_result(_joined(scoring))
        except StateError:  # too few pages are free
            scoring.chunks = None
            with self.changed:
                self._scores.insert(0, scoring)
        except Exception as error:
            scoring.future.set_exception(StepFailed(f"the step failed: {error}"))
            self._failed(error, [])
        self._scoring, self._blocked = None, False

    def _rounds(self) -> None:
        """A dispatch of every group."""
        busy = bool(self._computing()) or self._scoring is not None
        most = 1 if busy else None
        for key, group in [*self._groups.items()]:
            if group.lives:
                try:
                    steps = group.step(self.compiled.n_top(group.logged), self.config.dispatch_ms / 1e3, most)
                except Exception as error:
                    self._failed(error, [job for job in self.jobs if job.group is group])
                    continue
                jobs = {job.live: job for job in self.jobs}
                for live, step in steps:
                    self._emit(jobs[live], step)
            if not any(job.group is group for job in self.jobs):
                del self._groups[key]
        self.figures.dispatches = self.loop.dispatches

    def _emit(self, job: Job, step: Any) -> None:
        """Hands out what a dispatch emitted of a request."""
        if job.guide and job.guide.error:
            self._end(job, "error", StepFailed, f"request {job.request.id}: its grammar: {job.guide.error}")
            return
        text = job.answer.add(step)
        self.figures.emit(time.perf_counter(), len(step.token_ids))
        if step.finish_reason == "error":
            told = f"request {job.request.id}: the model's numbers were not finite"
            self._end(job, "error", StepFailed, told)
            return
        delta = Delta(step.token_ids, text, step.finish_reason, None, *job.answer.logged(step))
        if step.finish_reason:
            delta = dataclasses.replace(delta, completion=self._complete(job))
            self._release(job, step.finish_reason)
        job.ticket.push(delta)

    def _complete(self, job: Job) -> Completion | None:
        """The answer so far with its figures, which are added to the logs; None where there is none, or the state is gone."""
        live = job.live
        if live is None or not self.loop.live:
            return None
        acceptance = self.loop.acceptance(live)
        warm = live.sequence.reuse.restored > 0
        for each in (self.runtime.acceptance, self.figures.acceptance):
            each.add(acceptance, warm=warm)
        waited = job.until(time.perf_counter())
        fingerprints = self.loop.fingerprints(live)
        return job.answer.complete(acceptance, live.sequence.reuse, job.submitted, 0.0, waited, fingerprints)

    def _end(self, job: Job, reason: str, kind: type[EngineError], told: str) -> None:
        """Ends a request before its answer is complete."""
        job.answer.finish_reason = reason
        completion = self._complete(job)
        self._release(job, reason)
        job.ticket.fail(kind(told, completion))

    def _release(self, job: Job, reason: str) -> None:
        """Slot, pages and place in the queue come back."""
        if job.live is not None:
            if job.group is not None:
                job.group.leave(job.live)
            if reason == "error":
                job.live.finish_reason = "error"
            self.loop.release(job.live)
        with self.changed:
            self.waiting.remove(job)
            self.jobs.pop(job, None)
        self._blocked = False
        self.figures.finished[reason] += 1

    def _failed(self, error: Exception, jobs: Iterable[Job]) -> None:
        """Ends requests whose step failed: these, and all others as well if the state is gone."""
        lost = self.loop.doubt(error)
        if not isinstance(error, AtlasError):
            log.error("a step failed%s", ", and the state is gone" if lost else "", exc_info=error)
        doomed = [*self.jobs] if lost else [*jobs]
        for job in doomed:
            self._end(job, "error", StepFailed, f"request {job.request.id}: the step failed: {error}")
        if lost and self._scoring and self._scoring.chunks:
            self._scoring.chunks.close()
            self._scoring.future.set_exception(StepFailed(f"the step failed: {error}"))
            self._scoring = None

    def _close(self) -> None:
        for job in [*self.waiting, *self.jobs]:
            self._end(job, "cancelled", Cancelled, f"request {job.request.id}: the engine was closed")
        for scoring in [*self._scores, *([self._scoring] if self._scoring else [])]:
            if scoring.chunks:
                scoring.chunks.close()
            scoring.future.cancel()
        self._scores, self._scoring = [], None
        self.compiled.close()
        with self.changed:
            self.changed.notify_all()


def _kind(job: Job) -> Kind:
    request = job.request
    return Kind(request.drafter, request.drafts, request.params.logprobs, job.guide is not None)


def _joined(scoring: Scoring) -> Score:
    logprobs, values, ids = (np.concatenate(x)[: scoring.tokens.size - 1] for x in zip(*scoring.parts, strict=True))
    top = None
    if scoring.n_top:
        n = scoring.n_top
        pairs = zip(ids[:, :n].tolist(), values[:, :n].tolist(), strict=True)
        top = [[*zip(i, v, strict=True)] for i, v in pairs]
    return Score(scoring.tokens.tolist(), logprobs.tolist(), top)
