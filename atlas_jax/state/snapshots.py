"""Settling, and whole-sequence copies: snapshot, restore, fork."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from atlas_jax.shapes import Array, Bool, Float, Int
from atlas_jax.state.slots import put, take
from atlas_jax.state.target import TargetState
from pallas_kernels.gated_delta import Journal, fold
from pallas_kernels.paged_attention import Pages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Snapshot:
    """One sequence, settled, valid at exactly `length` tokens. Two equal histories give equal bits in every leaf:
    KV rows at and past `length` are zero."""

    kv: Pages  # of the slot alone, in order
    h: Float[Array, "Lg Hv Dk Dv"]
    conv: Float[Array, "Lg past C"]
    hidden: Float[Array, " D"]
    length: Int[Array, ""]
    ok: Bool[Array, ""]


def shift_window(
    conv: Float[Array, "past C"], inputs: Float[Array, "M C"], n: Int[Array, ""]
) -> Float[Array, "past C"]:
    """The convolution's window after the first `n` of `inputs`."""
    return jax.lax.dynamic_slice_in_dim(jnp.concatenate([conv, inputs]), n, conv.shape[0])


def folded(
    state: TargetState, slots: Int[Array, " B"]
) -> tuple[Float[Array, "Lg B Hv Dk Dv"], Float[Array, "Lg B past C"]]:
    """`h` and `conv` of `slots` after their committed journal rows. All layers at once: to the fold they are just more heads."""
    pending, h = state.pending[slots], jnp.moveaxis(take(state.h, slots), 0, 1)
    heads = lambda x: jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1, *x.shape[4:])  # noqa: E731
    journal = Journal(*(heads(take(x, slots)) for x in (state.journal_k, state.journal_u, state.journal_decay)))
    h = fold(h.reshape(h.shape[0], -1, *h.shape[3:]), journal, pending).reshape(h.shape)
    shift = jax.vmap(jax.vmap(shift_window), in_axes=(0, 0, None))
    conv = shift(take(state.conv, slots), take(state.journal_conv, slots), pending)
    return jnp.moveaxis(h, 0, 1), conv


def settle(state: TargetState, slots: Int[Array, " B"]) -> TargetState:
    """Folds the committed journal rows of `slots` into h and conv: base moves to the committed length, pending to 0."""
    return settle_with(state, slots, *folded(state, slots))


def settle_with(state: TargetState, slots: Int[Array, " B"], h: Array, conv: Array) -> TargetState:
    """`settle`, given what `folded` returned."""
    return dataclasses.replace(
        state,
        h=put(state.h, slots, h),
        conv=put(state.conv, slots, conv),
        base=state.base.at[slots].add(state.pending[slots]),
        pending=state.pending.at[slots].set(0),
        rows=state.rows.at[slots].set(0),
    )


def snapshot(state: TargetState, slot: Int[Array, ""]) -> Snapshot:
    """A copy of one sequence. `state` itself is not settled: taking a snapshot changes nothing."""
    settled = settle(state, slot[None])
    length = settled.base[slot]
    kv = Pages(*(x[:, settled.page_table[slot]] for x in settled.pages))
    position = jnp.arange(kv.values.shape[1])[:, None] * kv.page_size + jnp.arange(kv.page_size)
    live = (position < length)[None, :, None, :, None]
    return Snapshot(
        kv=Pages(jnp.where(jnp.swapaxes(live, 3, 4), kv.keys, 0), jnp.where(live, kv.values, 0)),
        h=settled.h[:, slot],
        conv=settled.conv[:, slot],
        hidden=settled.hidden[slot],
        length=length,
        ok=settled.ok[slot],
    )


def restore(state: TargetState, slot: Int[Array, ""], saved: Snapshot) -> TargetState:
    """Makes `slot` the sequence of a snapshot taken from a state of the same shape."""
    return dataclasses.replace(
        state,
        pages=Pages(*(x.at[:, state.page_table[slot]].set(y) for x, y in zip(state.pages, saved.kv, strict=True))),
        h=state.h.at[:, slot].set(saved.h),
        conv=state.conv.at[:, slot].set(saved.conv),
        rows=state.rows.at[slot].set(0),
        base=state.base.at[slot].set(saved.length),
        pending=state.pending.at[slot].set(0),
        hidden=state.hidden.at[slot].set(saved.hidden),
        ok=state.ok.at[slot].set(saved.ok),
    )


def fork(state: TargetState, source: Int[Array, ""], target: Int[Array, ""]) -> TargetState:
    """Copies the sequence of slot `source` into slot `target`; the two go on independently."""
    return restore(state, target, snapshot(state, source))
