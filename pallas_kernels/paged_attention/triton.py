"""Paged attention of a few rows a sequence, and the write before it, as Pallas-Triton kernels.

Keys are cut into units of a fixed number of tokens. Program p of a head takes the units p, p + programs, … and leaves a partial
softmax (`softmax.py`); a second kernel combines the partials of a row in order. Neither the units nor the order
depend on how many rows or sequences there are, and rows pass in tiles of 16: a row's bits depend on its own length only.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.instructions import exp2
from pallas_kernels.paged_attention import softmax
from pallas_kernels.paged_attention.pages import loaded, stored, turned, unit_of

ROWS = 16  # of a tile: what one tensor-core instruction takes
UNIT = 32  # tokens
TILES = 2  # that a program holds: more rows are more programs, which find the keys in the cache
PROGRAMS = 256  # of one sequence, over all heads: two for each multiprocessor of the largest card in mind


def write(pages: Any, layer: int, *args: Any, **tuning: Any) -> Any:
    return _write(pages, operand(layer), *args, **tuning)


def attend(q: Array, pages: Any, layer: int, *args: Any, first: int | Array, row_group: int, **tuning: Any) -> Array:
    hides = not (isinstance(first, int) and first == 0)
    first = jnp.broadcast_to(jnp.asarray(first, jnp.int32), args[1].shape)
    return _attend(q, pages, operand(layer), *args, first=first, hides=hides, **tuning)


def operand(layer: int) -> Array:
    """The layer as an operand: a call is traced, lowered and compiled once for all layers."""
    return jnp.full(1, layer, jnp.int32)


@functools.partial(jax.jit, static_argnames=("K", "interpret"))
def _write(
    pages: Any,
    layer: Array,
    k: Array,
    v: Array,
    page_table: Array,
    start: Array,
    n_rows: Array,
    K: int,
    interpret: bool = False,
) -> Any:
    B = start.shape[0]
    Hkv, page_size, turn = pages.keys.shape[2], pages.page_size, turned(pages.keys.dtype)

    def body(layers, table, starts, counts, k, v, _keys, _values, keys, values):
        layer = layers[0]
        b, t, head = pl.program_id(0), pl.program_id(1), pl.program_id(2)

        @pl.when(t < counts[b])
        def _():
            position = starts[b] + t
            page, offset = table[b, position // page_size], position % page_size
            column, row = (layer, page, head, slice(None), offset), (layer, page, head, offset, slice(None))
            keys[row if turn else column] = stored(k[b * K + t, head, :], keys.dtype)
            values[column if turn else row] = stored(v[b * K + t, head, :], values.dtype)

    out = pl.pallas_call(
        body,
        grid=(B, K, Hkv),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pages),
        input_output_aliases={6: 0, 7: 1},
        compiler_params=plgpu.CompilerParams(num_warps=2, num_stages=1),
        interpret=interpret,
        name="paged_attention_write",
    )(layer, page_table, start, n_rows, k, v, *pages)
    return type(pages)(*out)


@functools.partial(jax.jit, static_argnames=("K", "hides", "num_warps", "num_stages", "unit", "programs", "interpret"))
def _attend(
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
    num_warps: int = 4,
    num_stages: int | None = None,
    unit: int = UNIT,
    programs: int | None = None,
    interpret: bool = False,
) -> Array:
    R, H, Dh = q.shape
    B = start.shape[0]
    Hkv, page_size = pages.keys.shape[2], pages.page_size
    group = H // Hkv
    unit = unit_of(page_size, unit)
    tiles = -(-K * group // ROWS)
    shares = -(-tiles // TILES)
    M = shares * min(tiles, TILES) * ROWS
    count: int = programs or 1 << (PROGRAMS // Hkv).bit_length() - 1
    columns = min(64, Dh)
    exact = q.dtype == jnp.float32
    precision = jax.lax.Precision.HIGHEST if exact else None
    num_stages = num_stages or (1 if exact else 3)
    sizes = dict(K=K, group=group, unit=unit, programs=count)
    partial = lambda *tail: jax.ShapeDtypeStruct((B, Hkv, count, M, *tail), jnp.float32)  # noqa: E731
    mixed, highest, total = pl.pallas_call(
        functools.partial(
            _partials, per_page=page_size // unit, hides=hides, precision=precision, interpret=interpret, **sizes
        ),
        grid=(B, Hkv * shares, count),
        out_shape=(partial(Dh), partial(), partial()),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name="paged_attention_partials",
    )(layer, page_table, start, n_rows, first, q, *pages)
    return pl.pallas_call(
        functools.partial(_combine, columns=columns, interpret=interpret, **sizes),
        grid=(R, H, Dh // columns),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="paged_attention_combine",
    )(start, n_rows, mixed, highest, total)


def _used(start: Array, count: Array, unit: int) -> Array:
    """Units that a sequence's rows see."""
    return jnp.where(count > 0, (start + count + unit - 1) // unit, 0)


def _partials(
    layers,
    table,
    starts,
    counts,
    firsts,
    q,
    keys,
    values,
    mixed,
    highest,
    total,
    *,
    K,
    group,
    unit,
    programs,
    per_page,
    hides,
    precision,
    interpret,
):
    b, program = pl.program_id(0), pl.program_id(2)
    layer, start, count = layers[0], starts[b], counts[b]
    used = _used(start, count, unit)
    Hkv, Dh = keys.shape[2], q.shape[2]
    shares = pl.num_programs(1) // Hkv
    head, share = pl.program_id(1) // shares, pl.program_id(1) % shares
    tiles = min(mixed.shape[3] // ROWS, TILES)
    row = share * tiles * ROWS

    @pl.when(program < used)
    def _():
        def rows(tile):
            m = row + tile * ROWS + jnp.arange(ROWS)
            t, member = m // group, m % group
            inside = t < K
            t = jnp.where(inside, t, 0)
            at = q.at[b * K + t[:, None], (head * group + member)[:, None], jnp.arange(Dh)[None, :]]
            x = plgpu.load(at, mask=jnp.broadcast_to(inside[:, None], (ROWS, Dh)), other=0.0)
            return x, start + t

        queries = [rows(tile) for tile in range(tiles)]

        def step(i, parts, settled):
            finite = None
            index = program + i * programs
            page = table[b, index // per_page]
            # A multiple of `unit` on the face of it: the compiler must see that the loads are aligned.
            tokens = pl.ds((index % per_page) * unit, unit)
            key = loaded(keys, (layer, page, head), slice(None), tokens, q.dtype, interpret)
            value = loaded(values, (layer, page, head), tokens, slice(None), q.dtype, interpret)
            position = index * unit + jnp.arange(unit)
            if hides:
                value = jnp.where((position >= firsts[b])[:, None], value, 0)
            if not settled:
                # A dead or rejected row may hold anything. Those who see it shall notice, and 0 * NaN must not reach the others.
                finite = jnp.sum(jnp.abs(value.astype(jnp.float32)), axis=1) < jnp.inf
                value = jnp.where(finite[:, None], value, 0)
            after = []
            for (x, limit), running in zip(queries, parts, strict=True):
                score = plgpu.dot(x, key, precision=precision)
                if finite is not None:
                    score = jnp.where(finite[None, :], score, jnp.nan)
                    score = jnp.where(position[None, :] <= limit[:, None], score, -jnp.inf)
                if hides:
                    score = jnp.where((position >= firsts[b])[None, :], score, -jnp.inf)
                after.append(softmax.add(running, score, value, precision, interpret))
            return tuple(after)

        # Units that end at or before `start` hold committed rows only, which all see.
        mine = lambda units: jnp.maximum(units - program + programs - 1, 0) // programs  # noqa: E731
        settled, everything = mine(start // unit), mine(used)
        carry = jax.lax.fori_loop(0, settled, functools.partial(step, settled=True), (softmax.empty(ROWS, Dh),) * tiles)
        carry = jax.lax.fori_loop(settled, everything, functools.partial(step, settled=False), carry)
        for tile, (high, sum_, mix) in enumerate(carry):
            part = pl.ds(row + tile * ROWS, ROWS)
            mixed[b, head, program, part, :] = mix
            highest[b, head, program, part] = high
            total[b, head, program, part] = sum_


def _combine(starts, counts, mixed, highest, total, out, *, K, group, unit, programs, columns, interpret):
    row, head, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    B = starts.shape[0]
    b, t = jnp.minimum(row // K, B - 1), row % K
    kv, m = head // group, t * group + head % group
    # A row past B * K takes part in nothing and comes out as zeros.
    used = jnp.where(row < B * K, jnp.minimum(_used(starts[b], counts[b], unit), programs), 0)
    every, mine = jnp.arange(programs), part * columns + jnp.arange(columns)
    live = every < used
    at = mixed.at[b, kv, every[:, None], m, mine[None, :]]
    parts = plgpu.load(at, mask=jnp.broadcast_to(live[:, None], (programs, columns)), other=0.0)
    high = plgpu.load(highest.at[b, kv, every, m], mask=live, other=softmax.LOWEST)
    sums = plgpu.load(total.at[b, kv, every, m], mask=live, other=0.0)
    weight = exp2(high - jnp.max(high, axis=0), interpret)
    denominator = jnp.maximum(jnp.sum(weight * sums, axis=0), 1e-30)
    summed = jnp.sum(parts * weight[:, None], axis=0)
    out[row, head, pl.ds(part * columns, columns)] = (summed / denominator).astype(out.dtype)
