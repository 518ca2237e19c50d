"""Products of up to 64 rows with packed weights as one Pallas-Triton kernel (and a sum, where inputs are split).

A program multiplies all rows by a share of the weight: every program has the same number of (column tile, input block) pairs, tile
after tile, so that none waits for another at the end. A tile that several programs share has a part from each; parts are added in
order. What a program does depends on the weight's shape and on the GPU, never on the rows, so a row's bits depend on it alone:
where at most eight rows can matter, a product of eight is done in place of one of sixteen or more, which adds in the same order.

The weight is the left side of the tensor cores' product, so that eight rows are its smallest right side.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.registry import multiprocessors
from pallas_kernels.rows import add_in_order, least_holding, most_live, pad_rows
from pallas_kernels.w4a16 import triton_prefill
from pallas_kernels.w4a16.decode import (
    adder,
    arrays_of,
    column_scale,
    in_stack,
    inside,
    load_columns,
    pieces_of,
    whole_blocks,
)
from pallas_kernels.w4a16.forms import Int4, Packed, outputs

ROWS = (8, 16, 32, 64)  # of a product; the first is the tensor cores' smallest, whose left side is the weight


def product(x: Array, weight: Packed, layer: Any, **tuning: Any) -> Array:
    """x [R, K] in bfloat16 -> float32 [R, N]. More than 64 rows, which no decoding has, are those of a prefill."""
    weight, layer = in_stack(weight, layer)
    if isinstance(weight, Int4) and weight.order is not None:
        x = x[:, weight.order[layer[0]]]
    x = whole_blocks(x, weight)
    if x.shape[0] > ROWS[-1]:
        return triton_prefill.product(x, weight, layer)
    live = most_live(x.shape[0])
    out = _product(layer, x, weight, live, **tuning)
    return pad_rows(out, x.shape[0])


@functools.partial(jax.jit, static_argnames=("live", "columns", "programs", "num_warps", "interpret"))
def _product(
    layer: Array,
    x: Array,
    weight: Packed,
    live: int,
    *,
    columns: int = 64,
    programs: int = 0,
    num_warps: int | None = None,
    interpret: bool = False,
) -> Array:
    N, blocks = outputs(weight), weight.codes.shape[-3]
    rows = least_holding(live, ROWS)
    x = pad_rows(x, max(rows, x.shape[0]))
    tiles = pl.cdiv(N, columns)
    # At most some 16 parts of a tile: more would cost their sum what they save.
    programs = min(programs or 8 * multiprocessors(), 16 * tiles, tiles * blocks)
    parts = _parts(tiles, blocks, programs)
    out = pl.pallas_call(
        functools.partial(
            _kernel, adder(pieces_of(weight, interpret), interpret), N, rows, columns, tiles, blocks, programs
        ),
        grid=(programs,),
        out_shape=jax.ShapeDtypeStruct((parts.max(), rows, N), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps or (2 if rows < 32 else 4), num_stages=3),
        interpret=interpret,
        name="w4a16_product",
    )(layer, x, *arrays_of(weight))
    written = np.arange(len(out))[:, None] < np.repeat(parts, columns)[:N]
    out = add_in_order(out[:, :live], written)
    if whole := column_scale(weight):
        scale, factor = whole
        out = out * (factor * scale[layer[0]])
    return out


def _parts(tiles: int, blocks: int, programs: int) -> np.ndarray:
    """How many programs have a share in each tile."""
    total, tile = tiles * blocks, np.arange(tiles)
    first, last = (((unit + 1) * programs - 1) // total for unit in (tile * blocks, tile * blocks + blocks - 1))
    return last - first + 1


def _kernel(
    add: Callable[..., Array],
    N: int,
    rows: int,
    columns: int,
    tiles: int,
    blocks: int,
    programs: int,
    layer_ref: Any,
    x_ref: Any,
    *refs: Any,
) -> None:
    *weight_refs, out_ref = refs
    program, total, layer = pl.program_id(0), tiles * blocks, layer_ref[0]
    start, end = program * total // programs, (program + 1) * total // programs

    def tile(t: Array, _: None) -> None:
        place, mask = pl.ds(t * columns, columns), inside(t, columns, N)
        load = functools.partial(load_columns, (layer,), place, mask)

        def block(b: Array, sums: Array) -> Array:
            return add(sums, b, load, lambda first, count: x_ref[pl.ds(0, rows), pl.ds(first, count)], *weight_refs)

        first, last = jnp.maximum(start - t * blocks, 0), jnp.minimum(end - t * blocks, blocks)
        sums = jax.lax.fori_loop(first, last, block, jnp.zeros((columns, rows), jnp.float32))
        part = program - ((t * blocks + 1) * programs - 1) // total
        if mask is None:
            out_ref[part, :, place] = sums.T
        else:
            plgpu.store(out_ref.at[part, :, place], sums.T, mask=jnp.broadcast_to(mask[None], (rows, columns)))

    jax.lax.fori_loop(start // blocks, (end + blocks - 1) // blocks, tile, None)
