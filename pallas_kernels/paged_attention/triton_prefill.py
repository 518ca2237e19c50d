"""Paged attention of many rows a sequence (a prefill chunk): tiles of rows, each going through the keys that it sees."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.paged_attention import softmax
from pallas_kernels.registry import large_shared_memory, matrix_precision
from pallas_kernels.rows import pad_rows


@functools.partial(jax.jit, static_argnames=("K", "hides", "rows", "unit", "num_warps", "num_stages", "interpret"))
def attend(
    q: Array,
    pages: Any,
    layer: Array,
    page_table: Array,
    start: Array,
    n_rows: Array,
    K: int,
    *,
    first: Array,
    hides: bool,
    rows: int | None = None,
    unit: int = 64,
    num_warps: int | None = None,
    num_stages: int | None = None,
    interpret: bool = False,
) -> Array:
    """As `api.attend`, for any number of rows; the bits depend on where a row stands in the chunk."""
    large = q.dtype == jnp.bfloat16 and not interpret and large_shared_memory()
    rows, unit = rows or (128 if large else 64), unit if large else min(unit, 32)
    num_warps, num_stages = num_warps or 8, num_stages or (2 if large else 1)
    R, H, Dh = q.shape
    B = start.shape[0]
    unit = min(unit, pages.page_size)
    tiles = -(-K // rows)
    # A tile may reach past a sequence's rows: they are padded, and what belongs to no row is cut off.
    padded = jnp.pad(q[: B * K].reshape(B, K, H, Dh), ((0, 0), (0, tiles * rows - K), (0, 0), (0, 0)))
    precision = matrix_precision(q)
    out = pl.pallas_call(
        functools.partial(_tile, rows=rows, unit=unit, hides=hides, precision=precision),
        grid=(H, tiles, B),
        out_shape=jax.ShapeDtypeStruct(padded.shape, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name="paged_attention_prefill",
    )(layer, page_table, start, n_rows, first, padded, *pages)
    return pad_rows(out[:, :K].reshape(B * K, H, Dh), R)


def _tile(layers, table, starts, counts, firsts, q, keys, values, out, *, rows, unit, hides, precision):
    # The longest tiles go first: the last ones to finish are short.
    head, tile, b = pl.program_id(0), pl.num_programs(1) - 1 - pl.program_id(1), pl.program_id(2)
    layer, start, count = layers[0], starts[b], counts[b]
    _, _, Hkv, Dh, page_size = keys.shape
    per_page, kv = page_size // unit, head // (q.shape[2] // Hkv)
    x = q[b, pl.ds(tile * rows, rows), head, :]
    limit = jnp.minimum(start + tile * rows + jnp.arange(rows), start + count - 1)
    end = jnp.minimum(start + (tile + 1) * rows, start + count)  # of the positions that the tile sees
    whole, used = (start + tile * rows) // unit, (end + unit - 1) // unit

    def step(index, carry, masked):
        page = table[b, jax.lax.div(index, jnp.int32(per_page))]
        tokens = pl.ds(jax.lax.rem(index, jnp.int32(per_page)) * unit, unit)
        key = keys[layer, page, kv, :, tokens].astype(q.dtype)
        value = values[layer, page, kv, tokens, :].astype(q.dtype)
        position = index * unit + jnp.arange(unit)
        score = plgpu.dot(x, key, precision=precision) * Dh**-0.5
        if masked:
            value = jnp.where((position < end)[:, None], value, 0)  # a page may hold anything past its rows
            score = jnp.where(position[None, :] <= limit[:, None], score, -jnp.inf)
        if hides:
            value = jnp.where((position >= firsts[b])[:, None], value, 0)
            score = jnp.where((position >= firsts[b])[None, :], score, -jnp.inf)
        return softmax.add(carry, score, value, precision)

    carry = softmax.empty(rows, Dh)
    carry = jax.lax.fori_loop(0, jnp.minimum(whole, used), functools.partial(step, masked=False), carry)
    _, total, mixed = jax.lax.fori_loop(jnp.minimum(whole, used), used, functools.partial(step, masked=True), carry)
    out[b, pl.ds(tile * rows, rows), head, :] = (mixed / jnp.maximum(total, 1e-30)[:, None]).astype(out.dtype)
