"""Plain-JAX products: the twins of the GPU kernels and what CPUs run."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.registry import matrix_precision
from pallas_kernels.w4a16.reference import by_pair, ragged


def linear(x: Array, weight: Array, layer: Array | int | None, transposed: bool) -> Array:
    weight = weight if layer is None else weight[layer]
    contract = (((x.ndim - 1,), (1 if transposed else 0,)), ((), ()))
    return jax.lax.dot_general(x, weight, contract, precision=matrix_precision(x), preferred_element_type=jnp.float32)


def by_expert(x: Array, weight: Array, experts: Array, layer: int | None) -> Array:
    weight = weight if layer is None else weight[layer]
    return by_pair(x, experts, lambda row, expert: linear(row[None], weight, expert, False)[0])


def grouped(x: Array, weight: Array, sizes: Array, layer: int | None) -> Array:
    return ragged(x, weight if layer is None else weight[layer], sizes)
