"""Causal grouped-query attention over a paged cache, and the write that precedes it.

The reduction over keys goes page by page with a running maximum (Milakov & Gimelshein, 2018): pages past a row's position add exact
zeros, so a row's bits depend on its own length only. `pages` says how the cache lies.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention import reference, triton, triton_prefill
from pallas_kernels.paged_attention.pages import Pages
from pallas_kernels.ragged import rows_of
from pallas_kernels.registry import choose

ATTEND = {"reference": reference.attend, "triton": triton.attend}
ATTEND_RAGGED = {"reference": reference.attend_ragged, "triton": triton_prefill.attend_ragged}
WRITE = {"reference": reference.write, "triton": triton.write}


def write(
    pages: Pages,
    layer: int,
    k: Float[Array, "R Hkv Dh"],
    v: Float[Array, "R Hkv Dh"],
    page_table: Int[Array, "B pages"],
    start: Int[Array, " B"],
    n_rows: Int[Array, " B"],
    K: int,
    *,
    implementation: str | None = None,
) -> Pages:
    """Puts row t < n_rows[b] of sequence b, which is k[b * K + t], at position start[b] + t; other rows go nowhere, or into the
    sentinel page 0."""
    put = choose("paged_attention.write", WRITE, implementation, {"gpu": "triton"})
    return put(pages, layer, k, v, page_table, start, n_rows, K)


def attend(
    q: Float[Array, "R H Dh"],
    pages: Pages,
    layer: int,
    page_table: Int[Array, "B pages"],
    start: Int[Array, " B"],
    n_rows: Int[Array, " B"],
    K: int,
    *,
    first: int | Int[Array, " B"] = 0,
    row_group: int,
    implementation: str | None = None,
) -> Float[Array, "R H Dh"]:
    """For few rows a sequence: row t of sequence b, which is q[b * K + t], attends to positions `first` … start[b] + t. Softmax in
    float32, scale Dh^-1/2, output in `q.dtype`.

    `first` hides the rows before it, one number for all sequences or one each: the drafter's layer has none at position 0.
    What is hidden may hold anything, NaN included. Rows at and past `n_rows` are undefined but finite where the cache is;
    rows past B * K are zeros. `row_group` query rows share one product on a CPU.
    """
    run = choose("paged_attention.attend", ATTEND, implementation, {"gpu": "triton"})
    return run(q, pages, layer, page_table, start, n_rows, K, first=first, row_group=row_group)


def write_ragged(
    pages: Pages,
    layer: int,
    k: Float[Array, "T Hkv Dh"],
    v: Float[Array, "T Hkv Dh"],
    page_table: Int[Array, "S pages"],
    start: Int[Array, " S"],
    begin: Int[Array, " S"],
    n_rows: Int[Array, " S"],
    *,
    implementation: str | None = None,
) -> Pages:
    """Puts the rows of a ragged batch (`pallas_kernels.ragged`) into their sequences' pages, from position start[s] on."""
    rows = rows_of(begin, n_rows, k.shape[0])
    position = jnp.where(rows.live, start[rows.owner] + rows.number, 0)
    # To the write, each row is a sequence of its own, with one page.
    page = page_table[rows.owner, position // pages.page_size][:, None]
    offset, live = position % pages.page_size, rows.live.astype(jnp.int32)
    return write(pages, layer, k, v, page, offset, live, 1, implementation=implementation)


def attend_ragged(
    q: Float[Array, "T H Dh"],
    pages: Pages,
    layer: int,
    page_table: Int[Array, "S pages"],
    start: Int[Array, " S"],
    begin: Int[Array, " S"],
    n_rows: Int[Array, " S"],
    *,
    implementation: str | None = None,
) -> Float[Array, "T H Dh"]:
    """The rows of a ragged batch, the first of sequence s at position start[s], attend as those of `attend` do: to all positions of
    their sequence up to their own. For many rows a sequence. Padding comes out as zeros."""
    run = choose("paged_attention.attend_ragged", ATTEND_RAGGED, implementation, {"gpu": "triton"})
    out = run(q, pages, layer, page_table, start, begin, n_rows)
    return jnp.where(rows_of(begin, n_rows, q.shape[0]).live[:, None, None], out, 0)
