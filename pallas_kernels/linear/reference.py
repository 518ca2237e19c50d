"""Plain-JAX products: the twins of the GPU kernels and what CPUs run."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.w4a16.reference import by_pair


def linear(x: Array, weight: Array, transposed: bool) -> Array:
    contract = (((x.ndim - 1,), (1 if transposed else 0,)), ((), ()))
    return jax.lax.dot_general(x, weight, contract, precision=_precision(x), preferred_element_type=jnp.float32)


def grouped(x: Array, weight: Array, sizes: Array) -> Array:
    return jax.lax.ragged_dot(x, weight, sizes, precision=_precision(x), preferred_element_type=jnp.float32)


def _precision(x: Array) -> jax.lax.Precision | None:
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None  # no TF32


def by_expert(x: Array, weight: Array, experts: Array, layer: int | None) -> Array:
    weight = weight if layer is None else weight[layer]
    return by_pair(x, experts, lambda row, expert: linear(row[None], weight[expert], False)[0])
