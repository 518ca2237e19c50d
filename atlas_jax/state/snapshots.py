"""Settling, and whole-sequence copies: snapshot, restore, fork."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from atlas_jax.shapes import Array, Bool, Float, Int
from atlas_jax.state.slots import put, take
from atlas_jax.state.target import TargetState
from pallas_kernels.gated_delta import Journal, fold, window
from pallas_kernels.paged_attention import Pages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Snapshot:
    """One sequence, settled, valid at exactly `length` tokens. Two equal histories give equal bits in every leaf:
    KV rows at and past `length` are zero."""

    kv: Pages  # of the slot alone, in order
    h: Float[Array, "Lg Hv Dv Dk"]
    conv: Float[Array, "Lg past C"]
    hidden: Float[Array, " D"]
    length: Int[Array, ""]
    ok: Bool[Array, ""]


def folded(state: TargetState, slots: Int[Array, " B"]) -> Float[Array, "Lg B Hv Dv Dk"]:
    """`h` of `slots` after their committed journal rows. All layers at once: to the fold they are just more heads."""
    h = jnp.moveaxis(take(state.h, slots), 0, 1)
    heads = lambda x: jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1, *x.shape[4:])  # noqa: E731
    journal = Journal(*(heads(take(x, slots)) for x in (state.journal_k, state.journal_u, state.journal_decay)))
    h = fold(h.reshape(h.shape[0], -1, *h.shape[3:]), journal, state.base[slots], state.pending[slots]).reshape(h.shape)
    return jnp.moveaxis(h, 0, 1)


def fold_in_place(state: TargetState, slots: Int[Array, " B"]) -> Float[Array, "Lg S Hv Dv Dk"]:
    """`h` in which `slots` have taken in their committed journal rows, one slot after the other."""

    def one(b: Array, h: Array) -> Array:
        return put(h, slots[b][None], folded(dataclasses.replace(state, h=h), slots[b][None]))

    return jax.lax.fori_loop(0, slots.shape[0], one, state.h)


def settle(state: TargetState, slots: Int[Array, " B"]) -> TargetState:
    """Folds the committed journal rows of `slots` into h: base moves to the committed length, pending to 0."""
    length = state.length[slots]
    state = dataclasses.replace(state, h=put(state.h, slots, folded(state, slots)))
    return state.put(slots, base=length, pending=0, rows=0)


def settled_leaves(state: TargetState, slot: Int[Array, ""]) -> dict[str, Array]:
    """All that a settled sequence carries beside its KV rows, without what its rings hold of other positions."""
    reach = state.conv.shape[2] - 2 * state.max_rows
    return {
        "h": state.h[:, slot],
        "conv": window(state.conv, slot[None], state.base[slot][None], reach)[:, 0],
        "hidden": state.hidden[slot],
    }


def put_settled(
    state: TargetState, slot: Int[Array, ""], leaves: dict[str, Array], length: Int[Array, ""]
) -> TargetState:
    """Gives a slot what `settled_leaves` took of a sequence of `length` tokens; the counts are the caller's."""
    position = length + jnp.arange(-leaves["conv"].shape[1], 0)
    return dataclasses.replace(
        state,
        h=state.h.at[:, slot].set(leaves["h"]),
        conv=state.conv.at[:, slot, position % state.conv.shape[2]].set(leaves["conv"]),
        hidden=state.hidden.at[slot].set(leaves["hidden"]),
    )


def snapshot(state: TargetState, slot: Int[Array, ""]) -> Snapshot:
    """A copy of one sequence. `state` itself is not settled: taking a snapshot changes nothing."""
    settled = settle(state, slot[None])
    length = settled.base[slot]
    kv = Pages(*(x[:, settled.page_table[slot]] for x in settled.pages))
    position = jnp.arange(kv.keys.shape[1])[:, None] * kv.page_size + jnp.arange(kv.page_size)
    return Snapshot(
        kv=kv.where(position < length, 0.0), length=length, ok=settled.ok[slot], **settled_leaves(settled, slot)
    )


def restore(state: TargetState, slot: Int[Array, ""], saved: Snapshot) -> TargetState:
    """Makes `slot` the sequence of a snapshot taken from a state of the same shape."""
    leaves = {"h": saved.h, "conv": saved.conv, "hidden": saved.hidden}
    pages = Pages(*(x.at[:, state.page_table[slot]].set(y) for x, y in zip(state.pages, saved.kv, strict=True)))
    state = dataclasses.replace(put_settled(state, slot, leaves, saved.length), pages=pages)
    return state.put(slot, rows=0, base=saved.length, pending=0, ok=saved.ok)


def fork(state: TargetState, source: Int[Array, ""], target: Int[Array, ""]) -> TargetState:
    """Copies the sequence of slot `source` into slot `target`; the two go on independently."""
    return restore(state, target, snapshot(state, source))
