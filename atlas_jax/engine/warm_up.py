"""What the engine compiles: beforehand for the default drafter, beside the running requests for what else is asked for."""

from __future__ import annotations

import concurrent.futures
import threading
from typing import Any, Literal, NamedTuple

from atlas_jax.decode.drafters import NoDrafter
from atlas_jax.decode.loop import Loop
from atlas_jax.decode.protocol import Drafter
from atlas_jax.decode.request import MAX_TOP_LOGPROBS
from atlas_jax.decode.warm_up import Job, compile_all, dispatches
from atlas_jax.decode.warm_up import buckets as up_to
from atlas_jax.engine.api import EngineConfig
from atlas_jax.errors import ConfigError

Drafts = int | Literal["auto"]


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


class Compiled:
    """Which kinds of dispatches are compiled, for every number of sequences. A kind that is not is compiled in another thread
    when it is first asked for: its request waits for that, nobody else does."""

    def __init__(self, loop: Loop, buckets: tuple[int, ...], changed: threading.Condition) -> None:
        self.loop, self.buckets, self.changed = loop, buckets, changed
        self._jobs: dict[Kind, concurrent.futures.Future[None]] = {}
        self._shapes = loop.shapes(NoDrafter())
        self._threads = concurrent.futures.ThreadPoolExecutor(1, "atlas-jax-compile")

    def warm_up(self, drafter: Drafter, drafts: Drafts) -> None:
        """Compiles, at once, all that requests with this drafter need which ask for neither log-probabilities nor a grammar."""
        kind = Kind(drafter, drafts)
        compile_all([*self._wanted(kind), *self.loop.preparations()], self.loop.executables.progress)
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        done.set_result(None)
        self._jobs[kind] = done

    def ready(self, kind: Kind) -> bool:
        """Whether it is compiled (or cannot be: see `error`). If not, somebody is at it from now on."""
        if kind not in self._jobs:
            try:
                wanted = self._wanted(kind)
            except Exception as error:
                self._jobs[kind] = failed = concurrent.futures.Future()
                failed.set_exception(error)
                return True
            self._jobs[kind] = self._threads.submit(self._compile, wanted)
            self._jobs[kind].add_done_callback(self._tell)
        return self._jobs[kind].done()

    def error(self, kind: Kind) -> BaseException | None:
        """Why it could not be compiled. It is tried again when next asked for."""
        error = self._jobs[kind].exception()
        if error:
            del self._jobs[kind]
        return error

    def prepare_score(self, top: bool) -> None:
        """Compiles what a score needs, in the caller's thread."""
        self.loop.compile_score(self.n_top(top) or 0, self._shapes)

    @staticmethod
    def n_top(logged: bool) -> int | None:
        """One executable for all numbers of likeliest tokens."""
        return MAX_TOP_LOGPROBS if logged else None

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _wanted(self, kind: Kind) -> list[Job]:
        n_top = self.n_top(kind.logged)
        return dispatches(self.loop, kind.drafter, kind.drafts, n_top, self.buckets, guided=kind.guided)

    def _compile(self, wanted: list[Job]) -> None:
        for job in wanted:
            job()

    def _tell(self, _: Any) -> None:
        with self.changed:
            self.changed.notify_all()
