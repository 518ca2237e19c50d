"""The running softmax (Milakov & Gimelshein, 2018) that the GPU kernels carry over units of keys."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.instructions import exp2, multiply_add

LOWEST = -1e30  # finite: a unit without a visible key must not give inf - inf

# Of each row: the highest score, as a power of two; the sum of weights; the weighted sum of values.
type Running = tuple[Array, Array, Array]


def empty(rows: int, Dh: int) -> Running:
    """Before any key."""
    return jnp.full(rows, LOWEST, jnp.float32), jnp.zeros(rows, jnp.float32), jnp.zeros((rows, Dh), jnp.float32)


def add(running: Running, score: Array, value: Array, precision: Any, interpret: bool) -> Running:
    """Takes in the scores [rows, unit] (products as they are; -inf where a row does not see the key) and values [unit, Dh] of one
    unit."""
    old_high, old_total, old_mixed = running
    by = jnp.float32(value.shape[1] ** -0.5 / math.log(2))  # powers of two have an instruction of their own
    high = jnp.maximum(old_high, jnp.max(score, axis=1) * by)
    weight = exp2(multiply_add(score, by, -high[:, None], interpret), interpret)
    keep = exp2(old_high - high, interpret)
    mixed = old_mixed * keep[:, None] + plgpu.dot(weight.astype(value.dtype), value, precision=precision)
    return high, old_total * keep + jnp.sum(weight, axis=1), mixed
