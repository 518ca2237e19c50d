"""Products of up to 64 rows with narrow plain weights (gates, routers) as one Pallas-Triton kernel and a sum.

A library gives a product with so few outputs to a handful of programs, each of which goes through all inputs. Here each program
takes 128 inputs and 32 outputs; the sum of the parts is fused into what reads it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.rows import add_in_order, least_holding, most_live, pad_rows

ROWS = (16, 32, 64)  # of a product
INPUTS, COLUMNS, WIDEST = 128, 32, 512


def fits(x: Array, weight: Any, layer: int | None, transposed: bool) -> bool:
    """Whether the kernel can do it, and is the faster: weights of many outputs go to the library."""
    if layer is None or transposed or x.ndim != 2 or x.dtype != jnp.bfloat16 or weight.dtype != jnp.bfloat16:
        return False
    return x.shape[0] <= ROWS[-1] and x.shape[1] % INPUTS == 0 and weight.shape[-1] <= WIDEST


def linear(x: Array, weight: Array, layer: int, transposed: bool = False, **tuning: Any) -> Array:
    """x [R, K] times layer `layer` of a stack [L, K, N] -> float32 [R, N]."""
    out = _narrow(jnp.full(1, layer, jnp.int32), x, weight, most_live(x.shape[0]), **tuning)
    return pad_rows(out, x.shape[0])


@functools.partial(jax.jit, static_argnames=("live", "num_warps", "interpret"))
def _narrow(layer: Array, x: Array, weight: Array, live: int, *, num_warps: int = 2, interpret: bool = False) -> Array:
    N, parts = weight.shape[-1], x.shape[1] // INPUTS
    rows = least_holding(live, ROWS)
    x = pad_rows(x, max(rows, x.shape[0]))

    def body(layer_ref: Any, x_ref: Any, weight_ref: Any, out_ref: Any) -> None:
        part, tile = pl.program_id(0), pl.program_id(1)
        inputs, columns = pl.ds(part * INPUTS, INPUTS), pl.ds(tile * COLUMNS, COLUMNS)
        inside = (tile * COLUMNS + jnp.arange(COLUMNS) < N)[None]
        over = lambda n: jnp.broadcast_to(inside, (n, COLUMNS))  # noqa: E731
        values = plgpu.load(weight_ref.at[layer_ref[0], inputs, columns], mask=over(INPUTS), other=0)
        product = plgpu.dot(x_ref[pl.ds(0, rows), inputs], values)
        plgpu.store(out_ref.at[part, :, columns], product, mask=over(rows))

    out = pl.pallas_call(
        body,
        grid=(parts, pl.cdiv(N, COLUMNS)),
        out_shape=jax.ShapeDtypeStruct((parts, rows, N), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="narrow_product",
    )(layer, x, weight)
    return add_in_order(out[:, :live])
