"""What the engine compiles: beforehand for the default drafter, beside the running requests for what else is asked for."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from atlas_jax.decode.drafters import NoDrafter
from atlas_jax.decode.loop import Loop
from atlas_jax.decode.protocol import Drafter
from atlas_jax.decode.request import MAX_TOP_LOGPROBS
from atlas_jax.decode.warm_up import Job, begin, dispatches, finish
from atlas_jax.decode.warm_up import buckets as up_to
from atlas_jax.engine.api import EngineConfig, EngineStopping
from atlas_jax.errors import ConfigError

Drafts = int | Literal["auto"]
log = logging.getLogger(__name__)


def buckets(config: EngineConfig, slots: int) -> tuple[int, ...]:
    """Numbers of sequences that dispatches are compiled for, the last of them no less than `slots`."""
    if config.buckets is None:
        return up_to(slots)
    chosen = tuple(sorted(set(config.buckets)))
    if not chosen or chosen[-1] < slots:
        raise ConfigError(f"buckets {chosen} leave no room for {slots} slots; the largest must be {slots} or more")
    return chosen


class Kind(NamedTuple):
    """What the executables of a request's dispatches depend on."""

    drafter: Drafter
    drafts: Drafts
    logged: bool = False
    guided: bool = False

    def __str__(self) -> str:
        parts = [f"drafter {self.drafter.name}, drafts {self.drafts}"]
        parts += ["log-probabilities"] if self.logged else []
        return ", ".join([*parts, "a format"] if self.guided else parts)


class Compiled:
    """Which kinds of dispatches are compiled, for every number of sequences. A kind that is not is compiled in another thread
    when it is first asked for: its request waits for that, nobody else does."""

    def __init__(self, loop: Loop, buckets: tuple[int, ...], changed: threading.Condition) -> None:
        self.loop, self.buckets, self.changed = loop, buckets, changed
        self._jobs: dict[Kind, concurrent.futures.Future[None]] = {}
        self._shapes = loop.shapes(NoDrafter())
        self._threads = concurrent.futures.ThreadPoolExecutor(1, "atlas-jax-compile")
        self._begun: list[concurrent.futures.Future[object]] = []
        self._scores: set[bool] = set()
        self.late = 0  # kinds that were compiled when they were first asked for

    def warm_up(self, drafter: Drafter, drafts: Drafts, wanted: Collection[str], limit_s: float | int | None) -> None:
        """Compiles, several executables at once, what requests with this drafter need of what is `wanted` (see
        `config.WARM_UPS`). What is not ready after `limit_s` seconds is compiled beside the requests, which wait for it if they
        need it."""
        options = dict(answers=(False, False), logprobs=(True, False), grammars=(False, True))
        kinds = [Kind(drafter, drafts, *flags) for name, flags in options.items() if name in wanted]
        if {"logprobs", "grammars"} <= {*wanted}:
            kinds.append(Kind(drafter, drafts, True, True))
        jobs, parts = list[Job](), dict[Kind, slice]()
        for i, kind in enumerate(kinds):
            begin_at = len(jobs)
            jobs += self._wanted(kind)
            parts[kind] = slice(begin_at, len(jobs))
            jobs += self.loop.preparations() if i == 0 else []  # every request needs them
        if "scores" in wanted:
            jobs += [functools.partial(self._compile_score, top) for top in (False, True)]
        progress = self.loop.executables.progress
        self._begun = begin(jobs, progress)
        for kind, part in parts.items():
            self._jobs[kind] = _all(self._begun[part])
            self._jobs[kind].add_done_callback(self._tell)
        if not finish(self._begun, limit_s) and progress:
            left = sum(not future.done() for future in self._begun)
            progress(
                f"{left} of {len(jobs)} executables are still to be compiled, beside the requests; the others are ready"
            )

    def ready(self, kind: Kind) -> bool:
        """Whether it is compiled (or cannot be: see `error`), or one with more drafts is, which serves it as well. If not, somebody
        is at it from now on."""
        if isinstance(kind.drafts, int):
            if max(self.rows(kind), default=0) > kind.drafts:
                return True
            if any(not job.done() and max(self.loop.rows(k.drafts)) > kind.drafts for k, job in self._alike(kind)):
                return False
        if kind not in self._jobs:
            try:
                wanted = self._wanted(kind)
            except Exception as error:
                self._jobs[kind] = failed = concurrent.futures.Future()
                failed.set_exception(error)
                return True
            self._jobs[kind] = self._threads.submit(self._compile, kind, wanted)
            self._jobs[kind].add_done_callback(self._tell)
        return self._jobs[kind].done()

    def rows(self, kind: Kind) -> tuple[int, ...]:
        """Ascending, the numbers of rows that dispatches of such requests are compiled for, whatever number of drafts they ask
        for."""
        made: list[Drafts] = [k.drafts for k, job in self._alike(kind) if job.done() and not job.exception()]
        return tuple(sorted({rows for drafts in made for rows in self.loop.rows(drafts)}))

    def _alike(self, kind: Kind) -> list[tuple[Kind, concurrent.futures.Future[None]]]:
        return [(k, job) for k, job in self._jobs.items() if k._replace(drafts=kind.drafts) == kind]

    def error(self, kind: Kind) -> BaseException | None:
        """Why it could not be compiled. It is tried again when next asked for."""
        error = self._jobs[kind].exception() if kind in self._jobs and self._jobs[kind].done() else None
        if error:
            del self._jobs[kind]
        return error

    def prepare_score(self, top: bool) -> None:
        """Compiles what a score needs, in the caller's thread."""
        with contextlib.nullcontext() if top in self._scores else self._told("scores"):
            self._compile_score(top)

    def _compile_score(self, top: bool) -> None:
        self.loop.compile_score(self.n_top(top) or 0, self._shapes)
        self._scores.add(top)

    @staticmethod
    def n_top(logged: bool) -> int | None:
        """One executable for all numbers of likeliest tokens."""
        return MAX_TOP_LOGPROBS if logged else None

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for future in self._begun:
            future.cancel()

    def _wanted(self, kind: Kind) -> list[Job]:
        n_top = self.n_top(kind.logged)
        return dispatches(self.loop, kind.drafter, kind.drafts, n_top, self.buckets, guided=kind.guided)

    def _compile(self, kind: Kind, wanted: list[Job]) -> None:
        with self._told(str(kind)):
            for job in wanted:
                job()

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Says in the log what requests wait for, and how long they did."""
        self.late += 1
        began = time.perf_counter()
        log.info("compiling for the first request of its kind (%s), which waits for it", what)
        yield
        log.info("compiled in %.1f s: %s", time.perf_counter() - began, what)

    def _tell(self, _: Any) -> None:
        with self.changed:
            self.changed.notify_all()


def _all(futures: Sequence[concurrent.futures.Future[object]]) -> concurrent.futures.Future[None]:
    """Done once all are, or one has failed."""
    out: concurrent.futures.Future[None] = concurrent.futures.Future()
    left, lock = [len(futures)], threading.Lock()

    def count(future: concurrent.futures.Future[object]) -> None:
        with lock:
            left[0] -= 1
            if out.done():
                return
            if future.cancelled():
                out.set_exception(EngineStopping("the engine was closed while it compiled"))
            elif error := future.exception():
                out.set_exception(error)
            elif not left[0]:
                out.set_result(None)

    for future in futures:
        future.add_done_callback(count)
    return out
