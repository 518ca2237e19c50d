"""`Engine`: what callers talk to. Any thread may call it; a thread of its own does the work (`worker`)."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
import time
import uuid
from typing import Any

import numpy as np

from atlas_jax.completion import Answer
from atlas_jax.decode.drafters import NoDrafter
from atlas_jax.decode.request import MAX_TOP_LOGPROBS
from atlas_jax.engine.api import (
    MAX_DEADLINE_S,
    EngineConfig,
    EngineFull,
    EngineStats,
    EngineStopping,
    GenerationRequest,
    InFlight,
    Score,
)
from atlas_jax.engine.figures import Figures
from atlas_jax.engine.grammar import Grammars
from atlas_jax.engine.queue import Job, WaitingQueue
from atlas_jax.engine.ticket import Ticket
from atlas_jax.engine.worker import Scoring, Worker
from atlas_jax.errors import RequestError
from atlas_jax.runtime import Runtime

MAX_PRIORITY = 1000
OPTIONS = ("priority", "deadline_s", "id", "grammar")  # of a request, beside those of `Runtime.generate`


class Engine:
    """Runs any number of requests on one runtime, as many at once as it has slots.

    Policy. A request that has a slot keeps it to its end. Free slots go to the request with the highest priority, to which
    waiting adds (`WaitingQueue`). Between two rounds of the running requests at most one chunk of one prompt is computed, the
    shortest prompt's and the oldest's by turns. Running requests with one drafter share their dispatches, also those that
    ask for log-probabilities or for other fixed numbers of drafts; their bits do not depend on each other, so who shares with
    whom changes the speed alone.
    """

    def __init__(self, runtime: Runtime, config: EngineConfig | None = None) -> None:
        self.runtime, self.config = runtime, config or EngineConfig()
        self._grammars = Grammars(runtime)
        self._changed = threading.Condition()
        self._worker: Worker | None = None
        self._thread: threading.Thread | None = None
        self._state = "stopped"
        self._began = 0.0
        self._submitted = self._refused = 0

    # ---- life ------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """As in `EngineStats`."""
        return self._state

    def start(self) -> None:
        """Compiles what requests with the runtime's defaults need (its `progress` is told) and starts the engine's thread. The
        runtime is the engine's until `close`.

        Raises:
            RequestError: a call of the runtime is going on, or another engine has it.
            ConfigError: buckets that do not fit the runtime's slots.
        """
        with self._changed:
            if self._state != "stopped":
                return
            self.runtime.lend("an engine")
            self._state = "starting"
        try:
            waiting = WaitingQueue(self.config.max_waiting, self.config.ageing_s)
            worker = Worker(self.runtime, self.config, waiting, self._changed)
            worker.warm_up()
        except BaseException:
            self.runtime.take_back()
            self._state = "stopped"
            raise
        with self._changed:
            self._worker, self._state, self._began = worker, "running", time.perf_counter()
            self._thread = threading.Thread(target=worker.run, name="atlas-jax-engine", daemon=True)
            self._thread.start()

    def drain(self, timeout: float | int | None = None) -> bool:
        """Takes no more requests and waits until those it has are done; False if some were not after `timeout` seconds."""
        with self._changed:
            worker = self._worker
            if worker is None:
                return True
            self._state = "draining"
            return self._changed.wait_for(lambda: worker.idle, timeout)

    def close(self) -> None:
        """Ends what still runs or waits (Cancelled), and the thread; the runtime can be used directly again."""
        with self._changed:
            worker, thread = self._worker, self._thread
            if worker is None or thread is None:
                return
            self._state = "draining"
            worker.stop = True
            self._changed.notify_all()
        thread.join()
        with self._changed:
            if self._worker is worker:
                self._worker = self._thread = None
                self._state = "stopped"
                self.runtime.take_back()

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- requests --------------------------------------------------------------------------------------------------

    def request(self, prompt: Any, **options: Any) -> GenerationRequest:
        """Encodes and checks a prompt and its options, in the caller's time.

        Args:
            prompt, **options: those of `Runtime.generate`, and `priority`, `deadline_s`, `id`, `grammar`.

        Raises:
            RequestError: naming the option and what is allowed.
        """
        ours = {name: options.pop(name) for name in OPTIONS if options.get(name) is not None}
        _check_times(ours.get("priority", 0), ours.get("deadline_s"))
        defaults = self.config.defaults
        if isinstance(options.get("drafter"), NoDrafter) or options.get("drafter") == NoDrafter.name:
            defaults.pop("drafts", None)  # a number that was meant for the drafter of those that do not say
        request, drafter, drafts = self.runtime.request(prompt, defaults | options)
        return GenerationRequest(
            prompt=request.prompt,
            params=request.params,
            drafter=drafter,
            drafts=drafts,
            history=request.history,
            script=request.script,
            **ours,
        )

    def submit(self, request: GenerationRequest) -> Ticket:
        """Puts a request into the queue.

        Raises:
            RequestError: it cannot work.
            EngineFull, EngineStopping: it is not taken now.
        """
        self._check(request)
        guide = self._grammars.guide(request.grammar) if request.grammar else None
        id = request.id or uuid.uuid4().hex
        answer = Answer(self.runtime.tokenizer, request.params)
        ticket = Ticket(id, self._cancel)
        job = Job(dataclasses.replace(request, id=id), ticket, answer, time.perf_counter(), guide=guide)
        with self._changed:
            self._running(id).submit(job)
            self._submitted += 1
            self._changed.notify_all()
        return ticket

    def score(self, token_ids: Any, top_logprobs: int = 0, timeout: float | int | None = None) -> Score:
        """Log-probabilities of given tokens, two at least: computed as a prompt is, between the rounds of the running requests.

        Args:
            token_ids: a prompt as `Runtime.encode` takes it.
            top_logprobs: how many of the likeliest tokens to give besides.

        Raises:
            RequestError, EngineFull, EngineStopping: as `submit` does.
            StepFailed: the step failed.
            TimeoutError: it took longer than `timeout` seconds, and is given up.
        """
        tokens = self.runtime.fit(self.runtime.encode(token_ids), 0)
        if tokens.size < 2:
            raise RequestError("a score needs at least two tokens: the first has nothing before it")
        if not isinstance(top_logprobs, int) or not 0 <= top_logprobs <= MAX_TOP_LOGPROBS:
            raise RequestError(
                f"top_logprobs must be an integer in 0 … {MAX_TOP_LOGPROBS}, got {top_logprobs!r}", "top_logprobs"
            )
        scoring = Scoring(tokens, top_logprobs, concurrent.futures.Future())
        with self._changed:
            worker = self._running("a score")
        worker.compiled.prepare_score(bool(top_logprobs))
        with self._changed:
            self._running("a score").score(scoring)
            self._changed.notify_all()
        try:
            return scoring.future.result(timeout)
        except concurrent.futures.TimeoutError:
            scoring.future.cancel()
            raise TimeoutError(f"the score of {tokens.size} tokens is not there after {timeout} s") from None

    def stats(self) -> EngineStats:
        """A reading of all figures."""
        with self._changed:
            worker, state = self._worker, self._state
            cache, now = self.runtime.cache_stats(), time.perf_counter()
            jobs = [*worker.jobs] if worker else []
            figures = worker.figures if worker else None
            return EngineStats(
                state=state,
                running=len(jobs),
                waiting=len(worker.waiting) if worker else 0,
                slots=self.runtime.run.slots,
                max_waiting=self.config.max_waiting,
                submitted=self._submitted,
                refused=self._refused,
                uptime_s=now - self._began if worker else 0.0,
                in_flight=[_line(job, now) for job in jobs],
                pages=cache.pages,
                pages_free=cache.pages_free,
                cache=cache,
                compiled_late=worker.compiled.late if worker else 0,
                **(figures or Figures(now)).reading(now),
            )

    # ---- pieces ----------------------------------------------------------------------------------------------------

    def _running(self, what: str) -> Worker:
        if self._worker is None or self._state != "running":
            self._refused += 1
            raise EngineStopping(f"the engine is {self._state} and does not take {what}")
        if self._worker.waiting.full:
            self._refused += 1
            raise EngineFull(
                f"{len(self._worker.waiting)} of {self.config.max_waiting} places in the queue are taken, and all "
                f"{self.runtime.run.slots} slots; try again later"
            )
        return self._worker

    def _cancel(self, ticket: Ticket) -> None:
        with self._changed:
            if self._worker:
                self._worker.cancelled.add(ticket)
                self._changed.notify_all()

    def _check(self, request: GenerationRequest) -> None:
        request.params.validate(self.runtime.config.vocab_size)
        self.runtime.fit(np.asarray(request.prompt), request.params.max_tokens)
        _check_times(request.priority, request.deadline_s)
        if request.grammar is not None and request.params.ignore_eos:
            raise RequestError("ignore_eos does not go with a grammar, which says where the answer ends", "ignore_eos")


def _check_times(priority: Any, deadline_s: Any) -> None:
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
        raise RequestError(
            f"priority must be an integer in -{MAX_PRIORITY} … {MAX_PRIORITY}, got {priority!r}", "priority"
        )
    number = isinstance(deadline_s, (int, float)) and not isinstance(deadline_s, bool)
    if deadline_s is not None and not (number and 0 < deadline_s <= MAX_DEADLINE_S):
        raise RequestError(
            f"deadline_s must be None or a number above 0, up to {MAX_DEADLINE_S}, got {deadline_s!r}", "deadline_s"
        )


def _line(job: Job, now: float) -> InFlight:
    params = job.request.params
    return InFlight(
        id=job.request.id,
        prompt_tokens=int(job.request.prompt.size),
        tokens=len(job.answer.token_ids),
        max_tokens=params.max_tokens,
        drafter=job.request.drafter.name,
        age_s=now - job.submitted,
    )
