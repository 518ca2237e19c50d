"""What the engine compiles: beforehand for the default drafter, beside the running requests for what else is asked for."""

from __future__ import annotations

import concurrent.futures
import threading
from typing import Any, Literal

from atlas_jax.decode.drafters import NoDrafter
from atlas_jax.decode.loop import Loop
from atlas_jax.decode.protocol import Drafter
from atlas_jax.decode.request import MAX_TOP_LOGPROBS
from atlas_jax.engine.api import EngineConfig
from atlas_jax.errors import ConfigError

Drafts = int | Literal["auto"]


def buckets(config: EngineConfig, slots: int) -> tuple[int, ...]:
    """Numbers of sequences that dispatches are compiled for, the last of them no less than `slots`."""
    if config.buckets is None:
        return tuple(1 << i for i in range((slots - 1).bit_length() + 1))
    chosen = tuple(sorted(set(config.buckets)))
    if not chosen or chosen[-1] < slots:
        raise ConfigError(f"buckets {chosen} leave no room for {slots} slots; the largest must be {slots} or more")
    return chosen


class Compiled:
    """Which kinds of dispatches are compiled, for every number of sequences. A kind that is not is compiled in another thread
    when it is first asked for: its request waits for that, nobody else does."""

    def __init__(self, loop: Loop, buckets: tuple[int, ...], changed: threading.Condition) -> None:
        self.loop, self.buckets, self.changed = loop, buckets, changed
        self._jobs: dict[Any, concurrent.futures.Future[None]] = {}
        self._shapes = loop.shapes(NoDrafter())
        self._threads = concurrent.futures.ThreadPoolExecutor(1, "atlas-jax-compile")

    def warm_up(self, drafter: Drafter, drafts: Drafts) -> None:
        """Compiles, at once, all that requests with this drafter need which do not ask for log-probabilities."""
        self.loop.prepare()
        self._compile(self._wanted(drafter, drafts, False))
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        done.set_result(None)
        self._jobs[drafter, drafts, False] = done

    def ready(self, drafter: Drafter, drafts: Drafts, logged: bool) -> bool:
        """Whether it is compiled (or cannot be: see `error`). If not, somebody is at it from now on."""
        key = drafter, drafts, logged
        if key not in self._jobs:
            try:
                wanted = self._wanted(*key)
            except Exception as error:
                self._jobs[key] = failed = concurrent.futures.Future()
                failed.set_exception(error)
                return True
            self._jobs[key] = self._threads.submit(self._compile, wanted)
            self._jobs[key].add_done_callback(self._tell)
        return self._jobs[key].done()

    def error(self, drafter: Drafter, drafts: Drafts, logged: bool) -> BaseException | None:
        """Why it could not be compiled. It is tried again when next asked for."""
        job = self._jobs[drafter, drafts, logged]
        error = job.exception()
        if error:
            del self._jobs[drafter, drafts, logged]
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

    def _wanted(self, drafter: Drafter, drafts: Drafts, logged: bool) -> list[Any]:
        """Arguments of `Loop.compile_dispatch`."""
        shapes = self.loop.shapes(drafter)
        rows = self.loop.policy(drafter, drafts, 1, 1).rows
        return [(drafter, k, self.n_top(logged), bucket, shapes) for bucket in self.buckets for k in rows]

    def _compile(self, wanted: list[Any]) -> None:
        for args in wanted:
            self.loop.compile_dispatch(*args)

    def _tell(self, _: Any) -> None:
        with self.changed:
            self.changed.notify_all()
