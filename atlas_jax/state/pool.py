"""Snapshots of settled sequences kept on the device: rows of arrays that are stacked as the slots are.

A snapshot holds everything of a sequence but its KV rows, which stay where they are, in pages. It is copied from a slot and back on
the device; no row goes through the host, unless it is moved there to make room (`read`, `write`).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from atlas_jax.config import ModelConfig, RunConfig
from atlas_jax.shapes import Array, Bool, Int, UInt32
from atlas_jax.state.snapshots import put_settled, settled_leaves
from atlas_jax.state.target import TargetState, init

# Which axis counts the rows in each of `settled_leaves`, stacked. A model with more state adds its leaves in both places.
SETTLED = {"h": 1, "conv": 1, "hidden": 0}


class Saved(NamedTuple):
    """One row by itself."""

    leaves: dict[str, Any]
    length: Int[Array, ""]
    checksum: UInt32[Array, ""]


class Health(NamedTuple):
    """What a row is found to be: valid at `length` tokens, if its numbers are finite and the bits those that were saved."""

    length: Int[Array, ""]
    finite: Bool[Array, ""]
    intact: Bool[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SnapshotPool:
    """`leaves` are those of `SETTLED`, with rows where the state has slots."""

    leaves: dict[str, Any]
    length: Int[Array, " rows"]  # -1 where nothing, or nothing that could be trusted, was saved
    checksum: UInt32[Array, " rows"]

    @property
    def rows(self) -> int:
        return self.length.shape[0]


def init_pool(config: ModelConfig, run: RunConfig, rows: int) -> SnapshotPool:
    """Room for `rows` snapshots."""
    one = dataclasses.replace(run, slots=1)
    shapes = jax.eval_shape(lambda: settled_leaves(init(config, one), jnp.int32(1)))

    def leaf(axis: int, x: Any) -> Array:
        return jnp.zeros((*x.shape[:axis], rows, *x.shape[axis:]), x.dtype)

    leaves = {name: jax.tree.map(lambda x, a=axis: leaf(a, x), shapes[name]) for name, axis in SETTLED.items()}
    return SnapshotPool(leaves, jnp.full(rows, -1, jnp.int32), jnp.zeros(rows, jnp.uint32))


def save(state: TargetState, pool: SnapshotPool, slot: Int[Array, ""], row: Int[Array, ""]) -> SnapshotPool:
    """Copies a slot into a row. The label is what the slot has committed, not what the caller believes; a slot that is not
    settled, or whose numbers cannot be trusted, leaves a row that no check will pass."""
    leaves = settled_leaves(state, slot)
    valid = state.ok[slot] & (state.pending[slot] == 0)
    return write(pool, row, Saved(leaves, jnp.where(valid, state.base[slot], -1), checksum(leaves)))


def load(state: TargetState, pool: SnapshotPool, slot: Int[Array, ""], row: Int[Array, ""]) -> TargetState:
    """Makes a slot whose pages are mapped the settled sequence of a row."""
    saved = read(pool, row)
    state = put_settled(state, slot, saved.leaves, saved.length)
    return state.put(slot, rows=0, base=saved.length, pending=0, ok=True)


def check(pool: SnapshotPool, row: Int[Array, ""]) -> Health:
    """Reads a row once and says what it is."""
    saved = read(pool, row)
    floats = [x for x in jax.tree.leaves(saved.leaves) if jnp.issubdtype(x.dtype, jnp.floating)]
    finite = jnp.stack([jnp.isfinite(x).all() for x in floats]).all()
    return Health(saved.length, finite, checksum(saved.leaves) == saved.checksum)


def read(pool: SnapshotPool, row: Int[Array, ""]) -> Saved:
    """A row by itself."""
    return Saved(_take(pool.leaves, row), pool.length[row], pool.checksum[row])


def write(pool: SnapshotPool, row: Int[Array, ""], saved: Saved) -> SnapshotPool:
    """Puts back what `read` returned."""
    return SnapshotPool(
        _put(pool.leaves, row, saved.leaves),
        pool.length.at[row].set(saved.length),
        pool.checksum.at[row].set(saved.checksum),
    )


def checksum(leaves: Any) -> UInt32[Array, ""]:
    """Of the bits: their sum as integers, each leaf's times an odd number of its own, so that none can stand for another."""
    total = jnp.uint32(0)
    for i, leaf in enumerate(jax.tree.leaves(leaves)):
        bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")).astype(jnp.uint32)
        total += jnp.uint32(2 * i + 1) * jnp.sum(bits, dtype=jnp.uint32)
    return total


def finite_pages(state: TargetState, slot: Int[Array, ""]) -> Bool[Array, " pages"]:
    """Which of a slot's pages hold nothing but finite numbers, in the order of its row of the page table."""
    finite = lambda page: jnp.stack([jnp.isfinite(x[:, page]).all() for x in state.pages]).all()  # noqa: E731
    return jax.lax.map(finite, state.page_table[slot])  # one by one: a long sequence's pages are no small copy


def _take(leaves: dict[str, Any], at: Array) -> dict[str, Any]:
    one = lambda axis: lambda x: jax.lax.dynamic_index_in_dim(x, at, axis, keepdims=False)  # noqa: E731
    return {name: jax.tree.map(one(axis), leaves[name]) for name, axis in SETTLED.items()}


def _put(leaves: dict[str, Any], at: Array, new: dict[str, Any]) -> dict[str, Any]:
    one = lambda axis: lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, at, axis)  # noqa: E731
    return {name: jax.tree.map(one(axis), leaves[name], new[name]) for name, axis in SETTLED.items()}
