"""How a verify runs the linear-attention layers: as one kernel each, or in plain operations. Either way nothing past the committed
boundary is folded into the recurrent state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from atlas_jax.models.gated_delta_net import GatedDeltaNet, Projected, Rows
from atlas_jax.shapes import Array, Int
from atlas_jax.state.slots import put_ring
from atlas_jax.state.snapshots import fold_in_place
from atlas_jax.state.target import TargetState, leaves
from pallas_kernels import gated_delta
from pallas_kernels.rows import by_sequence


class Mixing(NamedTuple):
    """What runs the layers one after another."""

    begin: Any  # what they carry
    layer: Callable[[Any, Any, int], tuple[Array, Any]]  # (projections, carried, layer) -> (mixed rows, carried)
    end: Callable[[Any], dict[str, Array]]  # carried -> the state's new leaves


def fused(
    block: GatedDeltaNet,
    state: TargetState,
    slots: Int[Array, " B"],
    start: Int[Array, " B"],
    n_rows: Int[Array, " B"],
    K: int,
    rows: Callable[..., Any],
) -> Mixing:
    """One kernel a layer, in place; it takes rows as they are projected."""
    base, pending, weights = state.base[slots], state.pending[slots], block.mixer()

    def layer(p: Rows, recurrent: gated_delta.Recurrent, i: int):
        return gated_delta.step(weights, recurrent, i, slots, base, pending, n_rows, p.projected, K)

    return Mixing(state.recurrent, layer, leaves)


def in_parts(
    block: GatedDeltaNet,
    state: TargetState,
    slots: Int[Array, " B"],
    start: Int[Array, " B"],
    n_rows: Int[Array, " B"],
    K: int,
    rows: Callable[..., Any],
) -> Mixing:
    """Plain operations; what is folded, and what goes into the rings, for all layers at once. `rows` runs functions of rows.

    The recurrent state, by far the largest of what is read, is folded in place and read a sequence at a time: gathered for all
    sequences, it would be copied some three times more.
    """
    B, width = slots.shape[0], block.config.linear_conv_kernel_dim
    split = lambda x: x.reshape(B, K, *x.shape[1:])  # noqa: E731
    flat = lambda x: x.reshape(B * K, *x.shape[2:])  # noqa: E731
    h = fold_in_place(state, slots)
    past = gated_delta.window(state.conv, slots, start, width - 1)

    def layer(p: Projected, journal: tuple[tuple[Array, ...], ...], i: int):
        mixed, decay = split(p.mixed), split(p.decay)
        inputs = gated_delta.sliding(jnp.concatenate([past[i], mixed], axis=1), K, width)
        q, k, v = (split(x) for x in rows(lambda w: block.convolve(w, i), flat(inputs)))

        def one(slot, *rest):
            of_slot = jax.lax.dynamic_slice(h, (i, slot, 0, 0, 0), (1, 1, *h.shape[2:]))[0]
            q, k, v, decay, beta, n_rows = (x[None] for x in rest)
            return jax.tree.map(lambda y: y[0], gated_delta.verify(of_slot, q, k, v, decay, beta, n_rows))

        out, u = by_sequence(one, slots, q, k, v, decay, split(p.beta), n_rows)
        return flat(out), (*journal, (k, u, decay, mixed))

    def end(journal: tuple[tuple[Array, ...], ...]) -> dict[str, Array]:
        names = ("journal_k", "journal_u", "journal_decay", "conv")
        put_all = lambda name, x: put_ring(getattr(state, name), slots, start, jnp.stack(x))  # noqa: E731
        rings = {name: put_all(name, x) for name, x in zip(names, zip(*journal, strict=True), strict=True)}
        return {"h": h, **rings}

    return Mixing((), layer, end)
