"""Ragged batches: the rows of S sequences in one array [T, …], one sequence after another.

A sequence's rows lie together and begin with a block of BLOCK rows, so that no block belongs to two: sequence s has the rows
begin[s] * BLOCK … begin[s] * BLOCK + n_rows[s] - 1. What no sequence has is padding. Sequences without rows may begin anywhere in
it; those with rows must not overlap. Both numbers are known at run time only.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

BLOCK = 64  # rows; also a chunk of the gated delta rule


class Rows(NamedTuple):
    """Whose each of T rows is, and the how manieth: `owner` is a sequence, also (any) for padding."""

    owner: Int[Array, " T"]
    number: Int[Array, " T"]
    live: Bool[Array, " T"]


def blocks(rows: int) -> int:
    """Blocks that so many rows take."""
    return -(-rows // BLOCK)


def rows_of(begin: Int[Array, " S"], n_rows: Int[Array, " S"], T: int) -> Rows:
    """The rows of a ragged batch."""
    block = jnp.arange(blocks(T))[:, None]
    inside = (block >= begin) & (block < begin + (n_rows + BLOCK - 1) // BLOCK)
    owner = jnp.repeat(jnp.argmax(inside, axis=1).astype(jnp.int32), BLOCK)[:T]
    number = jnp.arange(T, dtype=jnp.int32) - begin[owner] * BLOCK
    return Rows(owner, number, (number >= 0) & (number < n_rows[owner]))
