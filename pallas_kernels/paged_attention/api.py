"""Causal grouped-query attention over a paged cache, and the write that precedes it.

A head's keys in a page are [Dh, N] and its values [N, Dh]: each is the right-hand side of a product as it lies. The reduction over
keys goes page by page with a running maximum (Milakov & Gimelshein, 2018): pages past a row's position add exact zeros, so a row's
bits depend on its own length only.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention import reference, triton
from pallas_kernels.registry import choose


class Pages(NamedTuple):
    """The paged cache of L layers: P pages of N tokens, in the model's dtype or in float8_e4m3fn (`rounding.stored`). Page 0 is the
    sentinel."""

    keys: Float[Array, "L P Hkv Dh N"]
    values: Float[Array, "L P Hkv N Dh"]

    @property
    def page_size(self) -> int:
        return self.values.shape[3]


ATTEND = {"reference": reference.attend, "triton": triton.attend}
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
    """Row t of sequence b, which is q[b * K + t], attends to positions `first` … start[b] + t. Softmax in float32, scale Dh^-1/2,
    output in `q.dtype`.

    `first` hides the rows before it, one number for all sequences or one each: the drafter's layer has none at position 0.
    What is hidden may hold anything, NaN included. Rows at and past `n_rows` are undefined but finite where the cache is;
    rows past B * K are zeros. `row_group` query rows share one product on a CPU.
    """
    run = choose("paged_attention.attend", ATTEND, implementation, {"gpu": "triton"})
    return run(q, pages, layer, page_table, start, n_rows, K, first=first, row_group=row_group)
