"""Products of many rows as Pallas-Triton kernels: chunks of prompts.

A program multiplies a tile of an expert's rows by a tile of its columns, so that an expert is read once for each tile of rows that
it has, in the form in which it lies in memory. Rows come sorted by expert; how many tiles each expert has is known on the device
only: there are as many programs as any distribution of the rows may need, and those past the last tile end at once. Neighbouring
programs share their rows; an expert's columns stay in the cache for its next tile of rows. A weight without experts is that of one
expert; its inputs are split where there are too few tiles to fill the GPU, and the parts added in order.

Tiles decode a weight once for each tile of rows. Of more rows than `MOST` the library makes more, even though a weight must be
decoded to memory for it, which `decoded` does.

XLA's own `ragged_dot` computes every row with every expert on GPUs.
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

from pallas_kernels.registry import large_shared_memory, multiprocessors
from pallas_kernels.rows import add_in_order
from pallas_kernels.w4a16.decode import (
    adder,
    arrays_of,
    column_scale,
    in_stack,
    inside,
    load_columns,
    pieces_of,
    rounded_pieces,
    store_rows,
    whole_blocks,
)
from pallas_kernels.w4a16.forms import BLOCK, Packed, outputs

MOST = 512  # rows


def product(x: Array, weight: Packed, layer: Array, **tuning: Any) -> Array:
    """x [R, P] in bfloat16, inputs padded to whole blocks, with layer `layer` of a stack of weights -> float32 [R, N]."""
    R = x.shape[0]
    if R > MOST:
        # Decoded once the rows are there: all layers' at once would fill the memory.
        x, layer = jax.lax.optimization_barrier((x, layer))
        values = decoded(weight, layer, **tuning)
        return jax.lax.dot_general(x, values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    one = jax.tree.map(lambda leaf: leaf[:, None], weight)
    return _grouped(layer, x, one, jnp.full(1, R, jnp.int32), **tuning)


def grouped_product(x: Array, weight: Packed | Array, sizes: Array, layer: Any, **tuning: Any) -> Array:
    """x [R, K] in bfloat16, sorted by expert, `sizes[e]` rows of expert e -> float32 [R, N]. A plain weight is [L, E, K, N]."""
    weight, layer = in_stack(weight, layer)
    return _grouped(layer, whole_blocks(x, weight), weight, sizes, **tuning)


@functools.partial(jax.jit, static_argnames=("rows", "columns", "parts", "num_warps", "interpret"))
def _grouped(
    layer: Array,
    x: Array,
    weight: Packed | Array,
    sizes: Array,
    *,
    rows: int | None = None,
    columns: int | None = None,
    parts: int | None = None,
    num_warps: int | None = None,
    interpret: bool = False,
) -> Array:
    R, E = x.shape[0], sizes.shape[0]
    plain = isinstance(weight, jax.Array)
    rows = rows or min(max(pl.next_power_of_2(pl.cdiv(R, E)), 16), 128 if E == 1 and large_shared_memory() else 64)
    columns = columns or (64 if rows == 16 else 128)
    N = outputs(weight)
    # Scaling the sums of many rows costs more than scaling, and rounding, the weights.
    pieces = (pieces_of if rows == 16 else rounded_pieces)(weight, interpret)
    scale, factor = column_scale(weight) or (None, 1.0)
    tiles = _tiles(sizes, rows, pl.cdiv(R, rows) + min(R, E) - (E == 1))
    parts = parts or (_parts(pl.cdiv(N, columns) * tiles.shape[0], x.shape[1] // BLOCK) if E == 1 else 1)
    out = pl.pallas_call(
        functools.partial(_tile, adder(pieces, interpret), factor, N, rows, columns, x.shape[1] // BLOCK),
        grid=(pl.cdiv(N, columns), tiles.shape[0], parts),
        # One row more (`store_rows`), and whole tiles of columns.
        out_shape=jax.ShapeDtypeStruct((parts, R + 1, pl.cdiv(N, columns) * columns), jnp.float32),
        compiler_params=plgpu.CompilerParams(
            num_warps=num_warps or (2 if rows == 16 and not plain else 4), num_stages=3 if large_shared_memory() else 2
        ),
        interpret=interpret,
        name="w4a16_prefill",
    )(layer, tiles, x, scale, *arrays_of(weight))
    return add_in_order(out[:, :-1, :N])


def _parts(tiles: int, blocks: int) -> int:
    """In how many parts to split the inputs: each takes its share of a tile's time, in as many waves as the GPU needs for all of
    them, and some more for the sum."""
    slots = 2 * multiprocessors()
    return min(range(1, min(blocks, 8) + 1), key=lambda p: pl.cdiv(tiles * p, slots) / p * (1 + 0.1 * p))


def _tiles(sizes: Array, rows: int, most: int) -> Array:
    """Expert, first row and the row after the last of each tile; `most` of them, without rows where there are fewer. [most, 3]"""
    ends, counts = jnp.cumsum(sizes), -(-sizes // rows)
    after, tile = jnp.cumsum(counts), jnp.arange(most)
    expert = jnp.sum(tile[:, None] >= after[None], axis=1)
    held = jnp.minimum(expert, sizes.shape[0] - 1)
    first = ends[held] - sizes[held] + (tile - after[held] + counts[held]) * rows
    end = jnp.where(expert < sizes.shape[0], jnp.minimum(first + rows, ends[held]), first)
    return jnp.stack([held, first, end], axis=1).astype(jnp.int32)


def _tile(
    add: Callable[..., Array],
    factor: float,
    N: int,
    rows: int,
    columns: int,
    blocks: int,
    layer_ref: Any,
    tiles_ref: Any,
    x_ref: Any,
    scale_ref: Any,
    *refs: Any,
) -> None:
    *weight_refs, out_ref = refs
    tile, t, part = (pl.program_id(i) for i in range(3))
    parts, (expert, first, end) = out_ref.shape[0], (tiles_ref[t, i] for i in range(3))

    @pl.when(first < end)
    def _() -> None:
        place, mask = pl.ds(tile * columns, columns), inside(tile, columns, N)
        load = functools.partial(load_columns, (layer_ref[0], expert), place, mask)
        row = first + jnp.arange(rows)
        theirs = jnp.minimum(row, end - 1)

        def block(b: Array, sums: Array) -> Array:
            return add(sums, b, load, lambda start, count: x_ref[theirs, pl.ds(start, count)], *weight_refs)

        sums = jnp.zeros((columns, rows), jnp.float32)
        sums = jax.lax.fori_loop(part * blocks // parts, (part + 1) * blocks // parts, block, sums)
        if scale_ref is not None:
            sums = sums * (factor * load(scale_ref, jnp.int32(0)))[:, None]
        store_rows(out_ref, (part,), row, row < end, place, sums.T)


@functools.partial(jax.jit, static_argnames=("columns", "num_warps", "interpret"))
def decoded(weight: Packed, layer: Array, *, columns: int = 64, num_warps: int = 8, interpret: bool = False) -> Array:
    """A layer's weight in bfloat16, [N, P]: the values of `reference.whole_rows`."""
    N, blocks, pieces = outputs(weight), weight.codes.shape[-3], rounded_pieces(weight, interpret)
    scale, factor = column_scale(weight) or (None, 1.0)

    def body(layer_ref: Any, scale_ref: Any, *refs: Any) -> None:
        *weight_refs, out_ref = refs
        tile, b = pl.program_id(0), pl.program_id(1)
        place, mask = pl.ds(tile * columns, columns), inside(tile, columns, N)
        load = functools.partial(load_columns, (layer_ref[0],), place, mask)
        whole = None if scale_ref is None else factor * load(scale_ref, jnp.int32(0))
        for at, part in (term for terms, _ in pieces(b, load, *weight_refs) for term in terms):
            if whole is not None:
                part = (part.astype(jnp.float32) * whole[:, None]).astype(jnp.bfloat16)
            out_ref[place, pl.ds(b * BLOCK + at, part.shape[1])] = part

    out = pl.pallas_call(
        body,
        grid=(pl.cdiv(N, columns), blocks),
        out_shape=jax.ShapeDtypeStruct((pl.cdiv(N, columns) * columns, blocks * BLOCK), jnp.bfloat16),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="w4a16_decode",
    )(layer, scale, *arrays_of(weight))
    return out[:N]
