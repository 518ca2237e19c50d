"""Small steps and kernels with and without the faults that `deviceless` is there to find."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

L, H, D = 2, 8, 128
STATE = jax.ShapeDtypeStruct((L, H, D, D), jnp.float32)  # 1 MiB
ROWS = jax.ShapeDtypeStruct((H, D), jnp.float32)
COUNT = jax.ShapeDtypeStruct((), jnp.int32)


def _update(state_in: Any, k: Any, u: Any, state_out: Any) -> None:
    state_out[...] = 0.5 * state_in[...] + k[...][:, None] * u[...][None, :]


def update(state: Array, k: Array, u: Array, layer: int) -> Array:
    """Decays one layer of the stack and adds a product, in place."""
    tile = pl.BlockSpec((None, None, D, D), lambda head: (layer, head, 0, 0))
    row = pl.BlockSpec((None, D), lambda head: (head, 0))
    return pl.pallas_call(
        _update,
        grid=(H,),
        in_specs=[tile, row, row],
        out_specs=tile,
        out_shape=STATE,
        input_output_aliases={0: 0},
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=1),
        name="update",
    )(state, k, u)


def step(state: Array, k: Array, u: Array) -> Array:
    for layer in range(L):
        state = update(state, k, u, layer)
    return state


def loop(state: Array, k: Array, u: Array, n: Array) -> tuple[Array, Array]:
    """Steps until `n`, or until what a step found says stop: as decoding does."""

    def go_on(carry: Any) -> Array:
        i, _, found = carry
        return (i < n) & (found[jnp.maximum(i - 1, 0)] < 100)

    def body(carry: Any) -> Any:
        i, state, found = carry
        state = step(state, k, u)
        return i + 1, state, found.at[i].set(jnp.argmax(state[0, 0, 0]).astype(jnp.int32))

    _, state, found = jax.lax.while_loop(go_on, body, (jnp.int32(0), state, jnp.zeros(64, jnp.int32)))
    return state, found


def fixed_loop(state: Array, k: Array, u: Array) -> Array:
    """As many steps as the host knows when it compiles."""
    return jax.lax.fori_loop(0, 5, lambda _, state: step(state, k, u), state)


def kept(state: Array, k: Array, u: Array) -> tuple[Array, Array]:
    """Returns the old state beside the new one, so there must be a copy."""
    return step(state, k, u), state


def _matmul(a: Any, b: Any, out: Any) -> None:
    out[...] = plt.dot(a[...], b[...])


def product(a: Array, b: Array) -> Array:
    """One tile's product [M, K] x [K, N]: with large tiles it takes much shared memory, or more registers than there are."""
    return pl.pallas_call(
        _matmul,
        out_shape=jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        name="product",
    )(a, b)


def _every_other(x: Any, out: Any) -> None:
    out[...] = x[pl.ds(0, out.shape[0], stride=2)]


def every_other(x: Array) -> Array:
    return pl.pallas_call(
        _every_other,
        out_shape=jax.ShapeDtypeStruct((x.shape[0] // 2,), x.dtype),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        name="every_other",
    )(x)


def backend_of(state: Array) -> Array:
    """Nothing that the state's memory could be used for; the size says which backend was chosen by."""
    return state[0, 0, 0, : 7 if jax.default_backend() == "gpu" else 3]


def scaled(x: Array, by: float) -> Array:
    return x * by


twice = functools.partial(scaled, by=2.0)
