"""How keys and values lie in the cache, for every kernel and twin: their rounding, and which way round.

Of a page of N tokens a head's keys are [Dh, N] and its values [N, Dh]: each is the right-hand side of a product as it lies. In
eight bits it is the other way round, keys [N, Dh] and values [Dh, N]: the tensor cores want what a product sums over side by side,
and GPUs turn numbers of sixteen bits on the way there, but not of eight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from pallas_kernels.instructions import bfloat16_of_e4m3

FLOAT8 = jnp.dtype("float8_e4m3fn")
LARGEST = 448.0  # of float8_e4m3fn


class Pages(NamedTuple):
    """The paged cache of L layers: P pages of N tokens, in the model's dtype or in float8_e4m3fn (`stored`), where the last two
    axes are swapped. Page 0 is the sentinel."""

    keys: Float[Array, "L P Hkv Dh N"]
    values: Float[Array, "L P Hkv N Dh"]

    @property
    def page_size(self) -> int:
        return self.keys.shape[3 if turned(self.keys.dtype) else 4]

    def where(self, live: Array, other: float) -> Pages:
        """The pages with `other` where `live` [*L, P, N] is false, whatever its leading axes broadcast to."""
        column, row = live[..., None, None, :], live[..., None, :, None]
        keys, values = (row, column) if turned(self.keys.dtype) else (column, row)
        return Pages(jnp.where(keys, self.keys, other), jnp.where(values, self.values, other))


def unit_of(page: int, most: int) -> int:
    """How many tokens of a page of so many are taken at once: a power of two that divides it."""
    return min(most, page & -page)


def turned(dtype: Any) -> bool:
    """Whether the last two axes are swapped."""
    return jnp.dtype(dtype) == FLOAT8


def page_shapes(lead: tuple[int, ...], N: int, Dh: int, dtype: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the keys and the values, whose leading axes are [L, P, Hkv]."""
    upright, lying = (*lead, Dh, N), (*lead, N, Dh)
    return (lying, upright) if turned(dtype) else (upright, lying)


def stored(x: Array, dtype: jnp.dtype) -> Array:
    """`x` as the cache keeps it. Eight bits hold up to 448: what is larger becomes that, and what is not finite NaN."""
    if dtype != FLOAT8:
        return x.astype(dtype)
    x = x.astype(jnp.float32)
    bounded = jnp.minimum(jnp.maximum(x, -LARGEST), LARGEST)
    return jnp.where(jnp.abs(x) < jnp.inf, bounded, jnp.nan).astype(dtype)


def loaded(ref: Any, lead: tuple[Any, ...], row: Any, column: Any, dtype: Any, interpret: bool) -> Array:
    """What a kernel reads of a head's keys or values, [rows, columns] as they are without eight bits, in `dtype`."""
    if not turned(ref.dtype):
        return ref[(*lead, row, column)].astype(dtype)
    x = ref[(*lead, column, row)]
    if dtype != jnp.bfloat16:
        return x.astype(dtype).T
    return bfloat16_of_e4m3(jax.lax.bitcast_convert_type(x, jnp.uint8), interpret).T
