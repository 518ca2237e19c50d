"""A program's part of a state in registers, and what is done to it: the update of a row, and what a row reads.

Of `columns` value columns with Dk keys each, a program holds arrays [Q, P, L, W], one for each j < Dk / (L W): key (j L + l) W + w
of column p Q + q. P and L are a thread's place in its program, q, j and w count its registers: a sum over keys is one over the
thread's own registers and then one over few lanes, without shared memory or barriers. Vectors of a number a column are
[Q, P, L], the same for each lane of a column, and vectors of keys [P, L, W], the same for each column of a lane. The compiler
chooses this layout for each of them by itself: first what lies together in memory, then the last axes. All is float32, and
every operation is rounded as written: what the fold repeats of a row comes out the same to the bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.instructions import multiply_add

LANES = 8  # that share a column
WORDS = 4  # keys that lie side by side in a thread: 16 bytes

type State = tuple[Array, ...]  # [Q, P, L, W] each
type Keys = tuple[Array, ...]  # [P, L, W] each


class Tile(NamedTuple):
    """Where a program's columns are: indices into arrays, and how it computes with them."""

    rows: Array  # [Q, P, 1, 1], columns of the state
    keys: tuple[Array, ...]  # [P, L, W] each
    columns: Array  # [Q, P, L]
    interpret: bool

    @classmethod
    def of(cls, part: Any, Dk: int, columns: int, num_warps: int, lanes: int, interpret: bool) -> Tile:
        """That of the program `part` of a head's Dv / columns."""
        L = min(lanes, Dk // WORDS)
        P = min(num_warps * 32 // L, columns)
        Q = columns // P
        iota = lambda shape, axis: jax.lax.broadcasted_iota(jnp.int32, shape, axis)  # noqa: E731
        column = lambda *shape: part * columns + iota(shape, 1) * Q + iota(shape, 0)  # noqa: E731
        keys = iota((P, L, WORDS), 1) * WORDS + iota((P, L, WORDS), 2)
        firsts = range(0, Dk, L * WORDS)
        return cls(column(Q, P, 1, 1), tuple(keys + first for first in firsts), column(Q, P, L), interpret)

    def load(self, ref: Any, *at: Any) -> State:
        return tuple(ref[*at, self.rows, keys[None]] for keys in self.keys)

    def store(self, ref: Any, *at: Any, state: State) -> None:
        for keys, part in zip(self.keys, state, strict=True):
            ref[*at, self.rows, keys[None]] = part

    def load_keys(self, ref: Any, *at: Any) -> Keys:
        return tuple(ref[*at, keys] for keys in self.keys)

    def update(self, state: State, k: Keys, u: Array, decay: Array) -> State:
        """S <- g S + k u^T."""
        add = lambda part, k: multiply_add(k[None], u[..., None], decay * part, self.interpret)  # noqa: E731
        return tuple(add(*pair) for pair in zip(state, k, strict=True))

    def read(self, state: State, x: Keys) -> Array:
        """S^T x: [Q, P, L]."""
        total = state[0] * x[0][None]
        for part, y in zip(state[1:], x[1:], strict=True):
            total = multiply_add(part, y[None], total, self.interpret)
        return jnp.broadcast_to(jnp.sum(jnp.sum(total, axis=3), axis=2)[..., None], self.columns.shape)
