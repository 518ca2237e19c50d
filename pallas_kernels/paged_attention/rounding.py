"""What keys and values become in the cache: one rounding for every kernel and twin."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.instructions import bfloat16_of_e4m3

FLOAT8 = jnp.dtype("float8_e4m3fn")
LARGEST = 448.0  # of float8_e4m3fn


def stored(x: Array, dtype: jnp.dtype) -> Array:
    """`x` as the cache keeps it. Eight bits hold up to 448: what is larger becomes that, and what is not finite NaN."""
    if dtype != FLOAT8:
        return x.astype(dtype)
    x = x.astype(jnp.float32)
    bounded = jnp.minimum(jnp.maximum(x, -LARGEST), LARGEST)
    return jnp.where(jnp.abs(x) < jnp.inf, bounded, jnp.nan).astype(dtype)


def restored(x: Array, dtype: jnp.dtype, interpret: bool) -> Array:
    """What a kernel reads of it, in `dtype`."""
    if x.dtype != FLOAT8 or dtype != jnp.bfloat16:
        return x.astype(dtype)
    return bfloat16_of_e4m3(jax.lax.bitcast_convert_type(x, jnp.uint8), interpret)
