"""Compiles beforehand all that requests of a kind can need, several executables at once, and runs each of them once."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from atlas_jax.decode.k_policy import FixedK, KPolicy
from atlas_jax.decode.live import Live, Request
from atlas_jax.decode.protocol import Drafter
from atlas_jax.decode.request import SamplingParams

if TYPE_CHECKING:
    from atlas_jax.decode.loop import Loop

Drafts = int | Literal["auto"] | KPolicy
Job = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class WarmUp:
    """What came of it: how many executables are ready, and the seconds that compiling and running them took (0: not run)."""

    executables: int
    compile_s: float
    run_s: float

    def __str__(self) -> str:
        ran = f", ran each in {self.run_s:.1f} s" if self.run_s else ""
        return f"compiled {self.executables} executables in {self.compile_s:.1f} s{ran}"


def buckets(slots: int) -> tuple[int, ...]:
    """Numbers of sequences that dispatches of up to `slots` sequences are compiled for."""
    return tuple(1 << i for i in range((slots - 1).bit_length() + 1))


def dispatches(
    loop: Loop, drafter: Drafter, drafts: Drafts, n_top: int | None, buckets: Sequence[int], guided: bool = False
) -> list[Job]:
    """What compiles the dispatches of such requests, widest first: they take longest."""
    shapes, compile = loop.shapes(drafter), loop.compile_dispatch
    wanted = [(rows, bucket) for rows in loop.rows(drafts) for bucket in buckets]
    return [functools.partial(compile, drafter, k, n_top, bucket, shapes, guided) for k, bucket in reversed(wanted)]


def begin(
    jobs: Sequence[Job], progress: Callable[[str], None] | None = None
) -> list[concurrent.futures.Future[object]]:
    """Starts jobs, the first ones first, in as many threads as there are cores: XLA compiles without Python's lock."""
    pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1, "atlas-jax-compile")
    futures = [pool.submit(job) for job in jobs]
    pool.shutdown(wait=False)
    counted, lock = itertools.count(1), threading.Lock()

    def tell(_: object) -> None:
        with lock:
            if progress:
                progress(f"{next(counted)} of {len(jobs)} executables are ready")

    for future in futures:
        future.add_done_callback(tell)
    return futures


def finish(futures: Sequence[concurrent.futures.Future[object]], limit_s: float | None = None) -> bool:
    """Waits for jobs that were begun. Returns whether all are done; False if some were not after `limit_s` seconds.

    Raises:
        Exception: what the first job to fail raised. Those that have not begun by then never do.
    """
    done, waiting = concurrent.futures.wait(futures, limit_s, concurrent.futures.FIRST_EXCEPTION)
    if error := next((error for f in done if (error := f.exception())), None):
        for future in waiting:
            future.cancel()
        raise error
    return not waiting


def compile_all(jobs: Sequence[Job], progress: Callable[[str], None] | None = None) -> float:
    """Runs jobs, several at once. Returns the seconds. Raises what the first job to fail raised."""
    began = time.perf_counter()
    finish(begin(jobs, progress))
    return time.perf_counter() - began


def warm_up(loop: Loop, drafter: Drafter, drafts: Drafts, n_tops: Sequence[int | None] = (None,)) -> WarmUp:
    """Makes all ready that requests with this drafter need, for every number of sequences up to `slots`.

    The first run of an executable loads its code and, on a GPU, captures its graph; so each is run, with random prompts, if the
    prefix cache has served nobody yet; it is empty afterwards.
    """
    sizes = buckets(loop.run.slots)
    jobs = [job for n_top in n_tops for job in dispatches(loop, drafter, drafts, n_top, sizes)] + loop.preparations()
    before = len(loop.executables)
    seconds = compile_all(jobs, loop.executables.progress)
    began = time.perf_counter()
    if unused := loop.cache.stats().requests == 0 and loop.free_slots == loop.run.slots:
        for n_top in n_tops:
            _run(loop, drafter, drafts, n_top)
        loop.cache.reset(figures=True)
    return WarmUp(len(loop.executables) - before, seconds, time.perf_counter() - began if unused else 0.0)


def _run(loop: Loop, drafter: Drafter, drafts: Drafts, n_top: int | None) -> None:
    rng = np.random.default_rng(0)
    answer = 2  # tokens: the prompt's last one is not prefilled, and a stop takes one back
    most = loop.run.max_length - answer

    def prompt(prefilled: int) -> np.ndarray:
        return rng.integers(0, loop.config.vocab_size, min(prefilled + 1, most)).astype(np.int32)

    def ask(prompts: Sequence[np.ndarray], rows: int, stop: tuple[str, ...] = ()) -> None:
        logged = n_top is not None
        params = SamplingParams(max_tokens=answer, ignore_eos=True, logprobs=logged, top_logprobs=n_top or 0, stop=stop)
        requests = [Request(ids, params) for ids in prompts]
        lives: list[Live] = []
        for _ in loop.decode(requests, drafter, FixedK((rows,)), n_top, lambda index, ids: 1, lives):
            pass
        loop.acceptance(lives[0])

    rows = loop.rows(drafts)
    for size in loop.chunks.sizes:
        ask([prompt(size)], rows[0])
    ask([prompt(1)], rows[0], stop=("\n",))
    long = prompt(loop.cache.budget.interval)  # as long as a snapshot needs; the second time it is restored
    for _ in range(2):
        ask([long], rows[0])
    for count in dict.fromkeys(min(bucket, loop.run.slots) for bucket in buckets(loop.run.slots)):
        for k in rows:
            ask([prompt(1) for _ in range(count)], k)
