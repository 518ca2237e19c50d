"""Plain-JAX paged attention: the twin of the GPU kernels and what CPUs run. Shapes are those of `api`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.paged_attention.pages import stored, turned
from pallas_kernels.ragged import BLOCK
from pallas_kernels.rows import by_row_group, by_sequence, live_rows, pad_rows

HIGHEST = jax.lax.Precision.HIGHEST


def write(pages: Any, layer: int, k: Array, v: Array, page_table: Array, start: Array, n_rows: Array, K: int) -> Any:
    B, page_size = start.shape[0], pages.page_size
    row = jnp.arange(K)
    live = row < n_rows[:, None]
    position = jnp.where(live, start[:, None] + row, 0)
    page = jnp.where(live, jnp.take_along_axis(page_table, position // page_size, axis=1), 0).reshape(-1)
    offset = (position % page_size).reshape(-1)
    k, v = (stored(x[: B * K], pages.keys.dtype) for x in (k, v))

    def put(i: Array, pages: Any) -> Any:
        def one(x: Array, new: Array, column: bool) -> Array:
            """A token is a column of the last two axes, or a row."""
            at = (0, offset[i]) if column else (offset[i], 0)
            new = jnp.expand_dims(new, -1 if column else -2)[None, None]
            return jax.lax.dynamic_update_slice(x, new, (layer, page[i], 0, *at))

        turn = turned(pages.keys.dtype)
        return type(pages)(one(pages.keys, k[i], not turn), one(pages.values, v[i], turn))

    return jax.lax.fori_loop(0, live_rows(n_rows, K), put, pages)


def attend(
    q: Array,
    pages: Any,
    layer: int,
    page_table: Array,
    start: Array,
    n_rows: Array,
    K: int,
    *,
    first: int | Array,
    row_group: int,
) -> Array:
    R, H, Dh = q.shape
    B, page_size = start.shape[0], pages.page_size
    hides = not (isinstance(first, int) and first == 0)

    def one(q: Array, table: Array, start: Array, n_rows: Array, first: Array) -> Array:
        full = start // page_size  # pages of committed rows only, which all rows see
        used = jnp.where(n_rows > 0, (start + n_rows + page_size - 1) // page_size, 0)

        def rows(q: Array, position: Array) -> Array:
            return _over_pages(q, position, pages, layer, table, full, used, first if hides else None)

        position = jnp.where(jnp.arange(K) < n_rows, start + jnp.arange(K), 0)
        return by_row_group(rows, row_group, n_rows, q, position)

    out = by_sequence(
        one, q[: B * K].reshape(B, K, H, Dh), page_table, start, n_rows, jnp.broadcast_to(first, start.shape)
    )
    return pad_rows(out.astype(q.dtype).reshape(B * K, H, Dh), R)


def attend_ragged(
    q: Array, pages: Any, layer: int, page_table: Array, start: Array, begin: Array, n_rows: Array
) -> Array:
    T, page_size = q.shape[0], pages.page_size
    padded = pad_rows(q, 2 * T)  # so that T rows can be taken from anywhere

    def sequence(s: Array, out: Array) -> Array:
        """All rows of a sequence in one product a page and head: as many as there can be, what follows them included."""
        full = start[s] // page_size
        used = jnp.where(n_rows[s] > 0, (start[s] + n_rows[s] + page_size - 1) // page_size, 0)
        live = jnp.arange(T) < n_rows[s]
        position = jnp.where(live, start[s] + jnp.arange(T), 0)
        part = lambda x: jax.lax.dynamic_slice_in_dim(x, begin[s] * BLOCK, T)  # noqa: E731
        new = _over_pages(part(padded), position, pages, layer, page_table[s], full, used, None)
        new = jnp.where(live[:, None, None], new.astype(q.dtype), part(out))
        return jax.lax.dynamic_update_slice_in_dim(out, new, begin[s] * BLOCK, 0)

    count = jnp.max(jnp.where(n_rows > 0, jnp.arange(1, n_rows.shape[0] + 1), 0))
    return jax.lax.fori_loop(0, count, sequence, jnp.zeros_like(padded))[:T]


def _over_pages(
    q: Array, position: Array, pages: Any, layer: int, table: Array, full: Array, used: Array, first: Array | None
) -> Array:
    """Attention of rows of one sequence [rows, H, Dh] at `position` [rows] over its first `used` pages, of which the first `full`
    hold nothing but what all rows see; float32. One product a page and head."""
    _, H, Dh = q.shape
    Hkv, page_size = pages.keys.shape[2], pages.page_size
    group = H // Hkv
    q = q.reshape(-1, Hkv, group, Dh).transpose(1, 0, 2, 3).reshape(Hkv, -1, Dh).astype(jnp.float32) * Dh**-0.5
    limit = jnp.repeat(position, group)[None, :, None]

    def page(i: Array, carry: tuple[Array, Array, Array], settled: bool) -> tuple[Array, Array, Array]:
        highest, total, mixed = carry
        at = lambda x: jax.lax.dynamic_slice(x, (layer, table[i], 0, 0, 0), (1, 1, *x.shape[2:]))[0, 0]  # noqa: E731
        key, value = (at(x).astype(jnp.float32) for x in pages)
        if turned(pages.keys.dtype):
            key, value = jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2)
        score = jnp.einsum("hrd,hdt->hrt", q, key, precision=HIGHEST)
        position = i * page_size + jnp.arange(page_size)[None, None, :]
        seen = position <= limit
        if first is not None:
            seen &= position >= first
            value = jnp.where((position[0] >= first)[..., None], value, 0.0)  # 0 * NaN
        if not settled:
            # A dead or rejected row may hold anything. Those who see it shall notice, and 0 * NaN must not reach the others.
            finite = jnp.isfinite(value).all(-1)
            score = jnp.where(finite[:, None], score, jnp.nan)
            value = jnp.where(finite[..., None], value, 0.0)
        score = jnp.where(seen, score, -jnp.inf)
        new = jnp.maximum(highest, score.max(-1))
        weight = jnp.exp(score - new[..., None])
        old = jnp.exp(highest - new)
        mixed = mixed * old[..., None] + jnp.einsum("hrt,htd->hrd", weight, value, precision=HIGHEST)
        return new, total * old + weight.sum(-1), mixed

    shape = q.shape[:2]
    lowest = jnp.full(shape, -1e30, jnp.float32)  # finite: a page without a visible key must not give inf - inf
    carry = (lowest, jnp.zeros(shape), jnp.zeros(q.shape))
    carry = jax.lax.fori_loop(0, jnp.minimum(full, used), functools.partial(page, settled=True), carry)
    _, total, mixed = jax.lax.fori_loop(full, used, functools.partial(page, settled=False), carry)
    out = mixed / jnp.maximum(total, 1e-30)[..., None]
    return out.reshape(Hkv, -1, group, Dh).transpose(1, 0, 2, 3).reshape(-1, H, Dh)
