"""Plain-JAX paged attention: the twin of the GPU kernels and what CPUs run. Shapes are those of `api`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.rows import by_row_group, by_sequence, live_rows

HIGHEST = jax.lax.Precision.HIGHEST


def write(pages: Array, layer: int, k: Array, v: Array, page_table: Array, start: Array, n_rows: Array) -> Array:
    B, K = k.shape[:2]
    page_size = pages.shape[4]
    row = jnp.arange(K)
    live = row < n_rows[:, None]
    position = jnp.where(live, start[:, None] + row, 0)
    page = jnp.where(live, jnp.take_along_axis(page_table, position // page_size, axis=1), 0).reshape(-1)
    offset = (position % page_size).reshape(-1)
    kv = jnp.stack([k, v], axis=2).reshape(B * K, 1, 1, 2, k.shape[2], 1, k.shape[3]).astype(pages.dtype)

    def put(i: Array, pages: Array) -> Array:
        return jax.lax.dynamic_update_slice(pages, kv[i], (layer, page[i], 0, 0, offset[i], 0))

    return jax.lax.fori_loop(0, live_rows(n_rows, K), put, pages)


def attend(
    q: Array, pages: Array, layer: int, page_table: Array, start: Array, n_rows: Array, *, first: int, row_group: int
) -> Array:
    _, K, H, Dh = q.shape
    Hkv, page_size = pages.shape[3:5]
    group = H // Hkv

    def one(q: Array, table: Array, start: Array, n_rows: Array) -> Array:
        used = jnp.where(n_rows > 0, (start + n_rows + page_size - 1) // page_size, 0)

        def rows(q: Array, position: Array) -> Array:
            """row_group rows [row_group, H, Dh] at `position` [row_group]; one product a page and head."""
            q = q.reshape(-1, Hkv, group, Dh).transpose(1, 0, 2, 3).reshape(Hkv, -1, Dh).astype(jnp.float32) * Dh**-0.5
            limit = jnp.repeat(position, group)[None, :, None]

            def page(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                highest, total, mixed = carry
                index = (layer, table[i], 0, 0, 0, 0)
                kv = jax.lax.dynamic_slice(pages, index, (1, 1, 2, Hkv, page_size, Dh))[0, 0]
                key, value = kv[0].astype(jnp.float32), kv[1].astype(jnp.float32)
                at = i * page_size + jnp.arange(page_size)[None, None, :]
                seen = (at <= limit) & (at >= first)
                # A dead or rejected row may hold anything. Those who see it shall notice, and 0 * NaN must not reach the others.
                finite = jnp.isfinite(value).all(-1)
                score = jnp.einsum("hrd,htd->hrt", q, key, precision=HIGHEST)
                score = jnp.where(seen, jnp.where(finite[:, None], score, jnp.nan), -jnp.inf)
                value = jnp.where(finite[..., None], value, 0.0)
                new = jnp.maximum(highest, score.max(-1))
                weight = jnp.exp(score - new[..., None])
                old = jnp.exp(highest - new)
                return (
                    new,
                    total * old + weight.sum(-1),
                    mixed * old[..., None] + jnp.einsum("hrt,htd->hrd", weight, value, precision=HIGHEST),
                )

            shape = q.shape[:2]
            lowest = jnp.full(shape, -1e30, jnp.float32)  # finite: a page without a visible key must not give inf - inf
            _, total, mixed = jax.lax.fori_loop(0, used, page, (lowest, jnp.zeros(shape), jnp.zeros(q.shape)))
            out = mixed / jnp.maximum(total, 1e-30)[..., None]
            return out.reshape(Hkv, -1, group, Dh).transpose(1, 0, 2, 3).reshape(-1, H, Dh)

        position = jnp.where(jnp.arange(K) < n_rows, start + jnp.arange(K), 0)
        return by_row_group(rows, row_group, n_rows, q, position)

    return by_sequence(one, q, page_table, start, n_rows).astype(q.dtype)
