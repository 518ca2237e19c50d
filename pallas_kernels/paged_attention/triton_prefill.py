"""Paged attention of many rows a sequence (chunks of prompts): tiles of rows, each going through the keys that it sees."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.instructions import awaited
from pallas_kernels.paged_attention import softmax
from pallas_kernels.paged_attention.pages import loaded, turned, unit_of
from pallas_kernels.paged_attention.triton import operand
from pallas_kernels.ragged import BLOCK
from pallas_kernels.registry import large_shared_memory, matrix_precision


def attend_ragged(q: Array, pages: Any, layer: int, *args: Any, **tuning: Any) -> Array:
    return _attend(q, pages, operand(layer), *args, **tuning)


@functools.partial(jax.jit, static_argnames=("rows", "unit", "num_warps", "num_stages", "interpret"))
def _attend(
    q: Array,
    pages: Any,
    layer: Array,
    page_table: Array,
    start: Array,
    begin: Array,
    n_rows: Array,
    *,
    rows: int | None = None,
    unit: int = 64,
    num_warps: int = 8,
    num_stages: int | None = None,
    interpret: bool = False,
) -> Array:
    """As `api.attend_ragged`, but that padding comes out as anything."""
    large = q.dtype == jnp.bfloat16 and not interpret and large_shared_memory()
    rows, unit = rows or (128 if large else 64), unit_of(pages.page_size, unit if large else min(unit, 32))
    num_stages = num_stages or (3 if large else 1)  # page numbers; keys and values; products
    T, H, _ = q.shape
    return pl.pallas_call(
        functools.partial(
            _tile,
            rows=rows,
            unit=unit,
            per_page=pages.page_size // unit,
            precision=matrix_precision(q),
            interpret=interpret,
        ),
        grid=(H, -(-T // rows), start.shape[0]),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name="paged_attention_prefill",
    )(layer, page_table, start, begin, n_rows, q, *pages)


def _tile(layers, table, starts, begins, counts, q, keys, values, out, *, rows, unit, per_page, precision, interpret):
    # The longest tiles go first: the last ones to finish are short.
    head, tile, s = pl.program_id(0), pl.num_programs(1) - 1 - pl.program_id(1), pl.program_id(2)
    layer, start, count = layers[0], starts[s], counts[s]
    T, H, Dh = q.shape
    kv = head // (H // keys.shape[2])

    @pl.when(tile * rows < count)
    def _():
        number = tile * rows + jnp.arange(rows)  # a tile's rows are its sequence's, wherever these begin
        inside = jnp.broadcast_to((number < count)[:, None], (rows, Dh))
        row = jnp.minimum(begins[s] * BLOCK + number, T - 1)
        at = (row[:, None], jnp.full((1, 1), head), jnp.arange(Dh)[None, :])
        x = plgpu.load(q.at[at], mask=inside, other=0.0)
        limit = jnp.minimum(start + number, start + count - 1)
        end = jnp.minimum(start + (tile + 1) * rows, start + count)  # of the positions that the tile sees
        whole, used = (start + tile * rows) // unit, (end + unit - 1) // unit

        def step(index, carry, masked):
            page = table[s, jax.lax.div(index, jnp.int32(per_page))]
            tokens = pl.ds(jax.lax.rem(index, jnp.int32(per_page)) * unit, unit)
            key = loaded(keys, (layer, page, kv), slice(None), tokens, q.dtype, interpret)
            value = loaded(values, (layer, page, kv), tokens, slice(None), q.dtype, interpret)
            score = plgpu.dot(x, key, precision=precision)
            if masked:
                position = index * unit + jnp.arange(unit)
                value = jnp.where((position < end)[:, None], value, 0)  # a page may hold anything past its rows
                if not turned(values.dtype):
                    # Who sees a row with NaN shall notice, and 0 * NaN not reach the others. In eight bits no registers are left
                    # for it: there a NaN spoils the rows of its tile.
                    finite = jnp.sum(jnp.abs(value.astype(jnp.float32)), axis=1) < jnp.inf
                    value = jnp.where(finite[:, None], value, 0)
                    score = jnp.where(finite[None, :], score, jnp.nan)
                score = jnp.where(position[None, :] <= limit[:, None], score, -jnp.inf)
            high, total, mixed = softmax.add(carry, score, value, precision, interpret)
            return high, total, awaited(mixed, interpret)

        carry = softmax.empty(rows, Dh)
        carry = jax.lax.fori_loop(0, jnp.minimum(whole, used), functools.partial(step, masked=False), carry)
        _, total, mixed = jax.lax.fori_loop(jnp.minimum(whole, used), used, functools.partial(step, masked=True), carry)
        result = (mixed / jnp.maximum(total, 1e-30)[:, None]).astype(out.dtype)
        plgpu.store(out.at[at], result, mask=inside)
