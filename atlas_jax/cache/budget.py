"""Bytes to counts: how many pages and snapshots a run configuration pays for."""

from __future__ import annotations

import dataclasses
import math

import jax

from atlas_jax.config import ModelConfig, RunConfig
from atlas_jax.state import init
from atlas_jax.state.pool import init_pool

DEFAULT_BYTES = 1 << 30  # of pages and of snapshots, at most, where nothing is asked for
DEFAULT_SEQUENCES = 3  # longest sequences a slot whose pages are kept, where nothing is asked for


@dataclasses.dataclass(frozen=True)
class Budget:
    """What the prefix cache may keep.

    Attributes:
        spare_pages: pages of the pool beyond those that the slots can fill.
        snapshots, host_snapshots: rows of the device's pool and of the host tier.
        interval: tokens from one snapshot to the next.
        page_bytes, snapshot_bytes: what one of each weighs.
    """

    spare_pages: int
    snapshots: int
    host_snapshots: int
    interval: int
    page_bytes: int
    snapshot_bytes: int


def budget(config: ModelConfig, run: RunConfig) -> Budget:
    """From `RunConfig`'s bytes; where those are None, a default that fits the model and the slots."""
    weigh = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    shapes = jax.eval_shape(lambda: (init(config, run).pages, init_pool(config, run, 1)))
    live = run.live_pages
    page, snapshot = weigh(shapes[0]) // (live + 1), weigh(shapes[1])
    interval = run.snapshot_interval or 2 * math.lcm(run.page_size, run.prefill_chunk)
    if not run.prefix_cache:
        return Budget(0, 0, 0, interval, page, snapshot)
    pages = DEFAULT_BYTES if run.page_cache_bytes is None else run.page_cache_bytes
    spare = pages // page
    if run.page_cache_bytes is None:
        spare = min(spare, DEFAULT_SEQUENCES * live)
    rows = (DEFAULT_BYTES if run.snapshot_bytes is None else run.snapshot_bytes) // snapshot
    most = (live + spare) * run.page_size // math.lcm(run.page_size, math.gcd(run.prefill_chunk, interval))
    return Budget(spare, min(rows, most), run.host_snapshot_bytes // snapshot, interval, page, snapshot)
