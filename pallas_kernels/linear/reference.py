"""Plain-JAX product: the twin of the GPU kernels and what CPUs run."""

import jax
import jax.numpy as jnp
from jax import Array


def linear(x: Array, weight: Array, transposed: bool) -> Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None  # no TF32
    contract = (((x.ndim - 1,), (1 if transposed else 0,)), ((), ()))
    return jax.lax.dot_general(x, weight, contract, precision=precision, preferred_element_type=jnp.float32)
