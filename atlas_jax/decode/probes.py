"""What `config.Probes` asks for: the hiddens that the drafter's layer is fed, changed (shift) or checked (fingerprints).

Both keep something for every position of every page, as the drafter's own keys and values do, so that it is shared and
carried over turns with them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax.config import ModelConfig, RunConfig
from atlas_jax.models import HybridModel, call
from atlas_jax.models.hybrid import FED
from atlas_jax.shapes import Array, Float, Int, UInt32
from atlas_jax.state import TargetState
from pallas_kernels.ragged import rows_of


class Fingerprints(NamedTuple):
    """Of one request: hiddens that the target produced, those that the drafter's layer was fed, and how many of these were not,
    bit for bit, what the target had produced at that position."""

    produced: int
    fed: int
    differed: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ProbeState:
    """Leaves are None where their probe is off."""

    hidden: Float[Array, "P page D"] | None  # the target's hiddens, by page
    prints: UInt32[Array, "P page"] | None  # their fingerprints; 0 where nothing was produced
    counts: Int[Array, "S fingerprints"]  # `Fingerprints` of each slot's request
    shift: int = dataclasses.field(metadata=dict(static=True))


def init_probes(config: ModelConfig, run: RunConfig, target: TargetState) -> ProbeState | None:
    """What the probes of `run` keep; None without any."""
    if not run.probes:
        return None
    pages = (target.pages.values.shape[1], target.pages.page_size)
    hidden = jnp.zeros((*pages, config.hidden_size), target.hidden.dtype) if run.probes.shift else None
    prints = jnp.zeros(pages, jnp.uint32) if run.probes.fingerprints else None
    counts = jnp.zeros((target.base.shape[0], len(Fingerprints._fields)), jnp.int32)
    return ProbeState(hidden, prints, counts, run.probes.shift)


def fingerprint(hidden: Float[Array, "*rows D"]) -> UInt32[Array, "*rows"]:
    """A hash of the bits of each row, never 0. Integers: the order of the additions does not matter."""
    x = jax.lax.bitcast_convert_type(hidden, jnp.dtype(f"uint{8 * hidden.dtype.itemsize}")).astype(jnp.uint32)
    x += np.random.default_rng(0).integers(1 << 32, size=hidden.shape[-1], dtype=np.uint32)  # a place counts too
    for shift, factor in (
        (16, 0x85EBCA6B),
        (13, 0xC2B2AE35),
    ):  # MurmurHash3's finaliser, by A. Appleby: every bit moves all
        x = (x ^ (x >> shift)) * np.uint32(factor)
    return (x ^ (x >> 16)).sum(-1, dtype=jnp.uint32) | 1


def _places(target: TargetState, slots: Array, positions: Array, live: Array) -> tuple[Array, Array]:
    """Page and row of positions [B, K]; those that are not live go to the sentinel page."""
    size = target.pages.page_size
    page = jnp.take_along_axis(target.page_table[slots], jnp.where(live, positions, 0) // size, axis=1)
    return jnp.where(live, page, 0), jnp.where(live, positions, 0) % size


def produced(
    probe: ProbeState,
    target: TargetState,
    slots: Int[Array, " B"],
    start: Int[Array, " B"],
    hidden: Float[Array, "B K D"],
    n: Int[Array, " B"],
) -> ProbeState:
    """Notes the first n committed hiddens of each sequence, from position `start` on."""
    live = jnp.arange(hidden.shape[1]) < n[:, None]
    at = _places(target, slots, start[:, None] + jnp.arange(hidden.shape[1]), live)
    return dataclasses.replace(
        probe,
        hidden=None if probe.hidden is None else probe.hidden.at[at].set(hidden),
        prints=None if probe.prints is None else probe.prints.at[at].set(fingerprint(hidden)),
        counts=probe.counts.at[slots, 0].add(n),
    )


def fed(
    probe: ProbeState,
    target: TargetState,
    slots: Int[Array, " B"],
    start: Int[Array, " B"],
    hidden: Float[Array, "B K D"],
    n: Int[Array, " B"],
) -> ProbeState:
    """Checks the hiddens that the first n rows of the drafter's layer were fed, from position `start` on: each must be the one
    that the target produced one position before. At position 0 there is none, and nobody reads that row."""
    if probe.prints is None:
        return probe
    before = start[:, None] + jnp.arange(hidden.shape[1]) - 1
    live = (jnp.arange(hidden.shape[1]) < n[:, None]) & (before >= 0)
    differs = live & (probe.prints[_places(target, slots, before, live)] != fingerprint(hidden))
    counts = probe.counts.at[slots, 1].add(live.sum(1)).at[slots, 2].add(differs.sum(1))
    return dataclasses.replace(probe, counts=counts)


def earlier(
    probe: ProbeState, target: TargetState, slots: Int[Array, " B"], start: Int[Array, " B"], count: int
) -> Float[Array, "B count D"]:
    """The hiddens at positions `start` … start + count - 1; zero before position 0."""
    assert probe.hidden is not None
    positions = start[:, None] + jnp.arange(count)
    rows = probe.hidden[_places(target, slots, positions, positions >= 0)]
    return jnp.where((positions >= 0)[..., None], rows, 0)


def feed(
    model: HybridModel,
    params: Any,
    probe: ProbeState | None,
    target: TargetState,
    slots: Int[Array, " B"],
    tokens: Int[Array, "B K"],
    hidden: Float[Array, "B K D"],
    start: Int[Array, " B"],
    n: Int[Array, " B"],
) -> tuple[Array, TargetState, ProbeState | None]:
    """The model's `feed` under the probes."""
    if probe is None:
        return *call(model, params, target, slots, tokens, hidden, start, n, method="feed"), None
    if probe.shift:
        hidden = earlier(probe, target, slots, start - 1 - probe.shift, hidden.shape[1])
    args = (target, slots, tokens, hidden, start, n)
    (out, target), seen = call(model, params, *args, method="feed", mutable=[FED])
    return out, target, fed(probe, target, slots, start, seen[FED]["hidden"][0], n)


def prefill(
    model: HybridModel,
    params: Any,
    probe: ProbeState | None,
    target: TargetState,
    slots: Int[Array, " S"],
    tokens: Int[Array, " T"],
    begin: Int[Array, " S"],
    n: Int[Array, " S"],
    *,
    feed_drafter: bool,
) -> tuple[TargetState, ProbeState | None]:
    """The model's `prefill` under the probes."""
    args = (slots, tokens, begin, n)
    if probe is None:
        return call(model, params, target, *args, method="prefill", feed_drafter=feed_drafter)[2], None
    start = target.base[slots]
    before = earlier(probe, target, slots, start - 1 - probe.shift, probe.shift) if probe.shift else None
    options = dict(earlier=before, feed_drafter=feed_drafter, mutable=[FED])
    (_, hidden, target), seen = call(model, params, target, *args, method="prefill", **options)
    rows = rows_of(begin, target.base[slots] - start, tokens.shape[0])  # none of a chunk that was refused
    # To the probes, each row is a sequence of its own.
    each = (target, slots[rows.owner], start[rows.owner] + rows.number)
    live = rows.live.astype(jnp.int32)
    probe = produced(probe, *each, hidden[:, None], live)
    if not feed_drafter:
        return target, probe
    return target, fed(probe, *each, seen[FED]["hidden"][0][:, None], live)
