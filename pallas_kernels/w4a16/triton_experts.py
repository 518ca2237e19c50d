"""Products of up to 64 rows with the experts that each row chose, as one Pallas-Triton kernel.

A program takes a tile of an expert's columns and multiplies all rows that chose the expert at once, so that an expert is read once
however many rows share it. There is a program for each pair of a row and an expert, and all but the first of an expert end at
once: nothing is sorted, and nothing waits for what another kernel counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.rows import least_holding, most_live, pad_rows
from pallas_kernels.w4a16.decode import (
    adder,
    arrays_of,
    column_scale,
    in_stack,
    inside,
    load_columns,
    pieces_of,
    store_rows,
    takes,
    whole_blocks,
)
from pallas_kernels.w4a16.forms import BLOCK, Packed, outputs
from pallas_kernels.w4a16.triton import ROWS


def expert_product(x: Array, weight: Packed | Array, experts: Array, layer: Any, **tuning: Any) -> Array:
    """x [R, K], or [R, k, K] for inputs of each choice, in bfloat16, up to 64 rows; experts [R, k], different ones in a row
    -> float32 [R, k, N]. A plain weight is [L, E, K, N]."""
    weight, layer = in_stack(weight, layer)
    x = whole_blocks(x, weight)
    live = most_live(x.shape[0])
    out = _product(layer, x, weight, experts[:live], **tuning)
    return pad_rows(out, x.shape[0])


def fits(x: Array, weight: Packed | Array) -> bool:
    """Whether the kernel can do it."""
    return x.shape[0] <= ROWS[-1] and takes(x, weight)


@functools.partial(jax.jit, static_argnames=("columns", "num_warps", "interpret"))
def _product(
    layer: Array,
    x: Array,
    weight: Packed | Array,
    experts: Array,
    *,
    columns: int = 64,
    num_warps: int = 2,
    interpret: bool = False,
) -> Array:
    R, k = experts.shape
    N, blocks = outputs(weight), x.shape[-1] // BLOCK
    tuples = x.ndim == 3
    rows = least_holding(R, ROWS)
    x = x.reshape(-1, x.shape[-1]) if tuples else pad_rows(x, max(rows, x.shape[0]))
    wide = jnp.full((rows, pl.next_power_of_2(k)), -1, jnp.int32).at[:R, :k].set(experts)
    out = pl.pallas_call(
        functools.partial(_kernel, adder(pieces_of(weight, interpret), interpret), N, columns, blocks, k, tuples),
        grid=(R * k, pl.cdiv(N, columns)),
        # One row more (`store_rows`), and whole tiles of columns.
        out_shape=jax.ShapeDtypeStruct((R * k + 1, pl.cdiv(N, columns) * columns), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=3),
        interpret=interpret,
        name="w4a16_experts",
    )(layer, wide, x, *arrays_of(weight))
    out = out[:-1, :N].reshape(R, k, N)
    if whole := column_scale(weight):
        scale, factor = whole
        out = out * (factor * scale[layer[0]][experts, 0])
    return out


def _kernel(
    add: Callable[..., Array],
    N: int,
    columns: int,
    blocks: int,
    k: int,
    tuples: bool,
    layer_ref: Any,
    experts_ref: Any,
    x_ref: Any,
    *refs: Any,
) -> None:
    *weight_refs, out_ref = refs
    pair, tile = pl.program_id(0), pl.program_id(1)
    expert = experts_ref[pair // k, pair % k]
    rows = experts_ref.shape[0]
    chosen = experts_ref[...] == expert
    numbers = jnp.arange(rows)[:, None] * k + jnp.arange(experts_ref.shape[1])[None]
    first = jnp.min(jnp.where(chosen, numbers, rows * k))

    @pl.when(first == pair)
    def _() -> None:
        place, mask = pl.ds(tile * columns, columns), inside(tile, columns, N)
        pairs = jnp.max(jnp.where(chosen, numbers, -1), axis=1)
        theirs = jnp.maximum(pairs, 0)
        load = functools.partial(load_columns, (layer_ref[0], expert), place, mask)

        def read(start: Array, count: int) -> Array:
            return x_ref[theirs if tuples else pl.ds(0, rows), pl.ds(start, count)]

        def block(b: Array, sums: Array) -> Array:
            return add(sums, b, load, read, *weight_refs)

        sums = jax.lax.fori_loop(0, blocks, block, jnp.zeros((columns, rows), jnp.float32))
        store_rows(out_ref, (), theirs, pairs >= 0, place, sums.T)
