"""The running softmax (Milakov & Gimelshein, 2018) that the GPU kernels carry over units of keys."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import triton as plgpu

LOWEST = -1e30  # finite: a unit without a visible key must not give inf - inf

type Running = tuple[
    Array, Array, Array
]  # the highest score of each row, its sum of weights, its weighted sum of values


def empty(rows: int, Dh: int) -> Running:
    """Before any key."""
    return jnp.full(rows, LOWEST, jnp.float32), jnp.zeros(rows, jnp.float32), jnp.zeros((rows, Dh), jnp.float32)


def add(running: Running, score: Array, value: Array, precision: Any) -> Running:
    """Takes in the scores [rows, unit] (-inf where a row does not see the key) and values [unit, Dh] of one unit."""
    old_high, old_total, old_mixed = running
    high = jnp.maximum(old_high, jnp.max(score, axis=1))
    weight = jnp.exp(score - high[:, None])
    keep = jnp.exp(old_high - high)
    mixed = old_mixed * keep[:, None] + plgpu.dot(weight.astype(value.dtype), value, precision=precision)
    return high, old_total * keep + jnp.sum(weight, axis=1), mixed
