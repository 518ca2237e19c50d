"""Causal grouped-query attention over a paged cache, and the write that precedes it.

A head's keys in a page are [Dh, N] and its values [N, Dh]: each is the right-hand side of a product as it lies. The reduction over
keys goes page by page with a running maximum (Milakov & Gimelshein, 2018): pages past a row's position add exact zeros, so a row's
bits depend on its own length only.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention import reference
from pallas_kernels.registry import choose


class Pages(NamedTuple):
    """The paged cache of L layers: P pages of N tokens. Page 0 is the sentinel."""

    keys: Float[Array, "L P Hkv Dh N"]
    values: Float[Array, "L P Hkv N Dh"]

    @property
    def page_size(self) -> int:
        return self.values.shape[3]


ATTEND = {"reference": reference.attend}
WRITE = {"reference": reference.write}


def write(
    pages: Pages,
    layer: int,
    k: Float[Array, "B K Hkv Dh"],
    v: Float[Array, "B K Hkv Dh"],
    page_table: Int[Array, "B pages"],
    start: Int[Array, " B"],
    n_rows: Int[Array, " B"],
    *,
    implementation: str | None = None,
) -> Pages:
    """Puts row t < n_rows[b] of sequence b at position start[b] + t; the other rows land in the sentinel page 0."""
    return choose("paged_attention.write", WRITE, implementation, {})(pages, layer, k, v, page_table, start, n_rows)


def attend(
    q: Float[Array, "B K H Dh"],
    pages: Pages,
    layer: int,
    page_table: Int[Array, "B pages"],
    start: Int[Array, " B"],
    n_rows: Int[Array, " B"],
    *,
    first: int | Int[Array, " B"] = 0,
    row_group: int,
    implementation: str | None = None,
) -> Float[Array, "B K H Dh"]:
    """Row t of sequence b attends to positions `first` … start[b] + t. Softmax in float32, scale Dh^-1/2, output in `q.dtype`.

    `first` hides the rows before it, one number for all sequences or one each: the drafter's layer has none at position 0.
    What is hidden may hold anything, NaN included. Rows at and past `n_rows` are undefined but finite where the cache is.
    `row_group` query rows share one product.
    """
    return choose("paged_attention.attend", ATTEND, implementation, {})(
        q, pages, layer, page_table, start, n_rows, first=first, row_group=row_group
    )
