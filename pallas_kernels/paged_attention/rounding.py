"""What keys and values become in the cache: one rounding for every kernel and twin."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

FLOAT8 = jnp.dtype("float8_e4m3fn")
LARGEST = 448.0  # of float8_e4m3fn


def stored(x: Array, dtype: jnp.dtype) -> Array:
    """`x` as the cache keeps it. Eight bits hold up to 448: what is larger becomes that, and what is not finite NaN."""
    if dtype != FLOAT8:
        return x.astype(dtype)
    x = x.astype(jnp.float32)
    bounded = jnp.minimum(jnp.maximum(x, -LARGEST), LARGEST)
    return jnp.where(jnp.abs(x) < jnp.inf, bounded, jnp.nan).astype(dtype)
