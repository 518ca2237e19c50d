"""Reading and writing the entries of some slots in arrays stacked over layers and slots."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from atlas_jax.shapes import Array, Float, Int


def take(x: Float[Array, "L S *rest"], slots: Int[Array, " B"]) -> Float[Array, "L B *rest"]:
    """Slots' entries; one slot is a contiguous copy rather than a gather."""
    return jax.lax.dynamic_slice_in_dim(x, slots[0], 1, axis=1) if slots.shape[0] == 1 else x[:, slots]


def put(
    x: Float[Array, "L S *rest"], slots: Int[Array, " B"], value: Float[Array, "L B *rest"]
) -> Float[Array, "L S *rest"]:
    """Writes slots' entries."""
    if slots.shape[0] == 1:
        return jax.lax.dynamic_update_slice(x, value.astype(x.dtype), (0, slots[0], *([0] * (x.ndim - 2))))
    return x.at[:, slots].set(value.astype(x.dtype))


def put_ring(
    x: Float[Array, "L S N *rest"], slots: Int[Array, " B"], start: Int[Array, " B"], value: Float[Array, "L B K *rest"]
) -> Float[Array, "L S N *rest"]:
    """Writes rows of positions start … start + K - 1 <= start + N where a ring keeps them: at position mod N."""
    at = (start[:, None] + jnp.arange(value.shape[2])) % x.shape[2]
    return x.at[:, slots[:, None], at].set(value.astype(x.dtype))
