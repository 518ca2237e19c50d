"""Times of the paged attention kernels on a GPU, beside their floor and the bars.

    python -m pallas_kernels.paged_attention.bench [--kv-dtype float8_e4m3fn]

A layer of the 27B shape (24 query and 4 key/value heads of 256), one sequence, bfloat16 unless told, pages of 256 tokens, timed as
the runtime runs it: layers one after another in one CUDA graph. The floor is the keys and values, read once, at the copy bandwidth
measured first.
At 4k tokens the four layers (67 MB) stay partly in an H200's cache of 50 MB.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import triton
from pallas_kernels.paged_attention.arg_specs import SHAPES, Shape, attend_specs
from pallas_kernels.timing import begin, compiled, normal, row, seconds

LAYERS = 4


def layers(K: int, count: int = LAYERS, **tuning: Any) -> Callable[..., Any]:
    """`count` layers of attention, each of which reads what the one before gave."""

    def run(q: Any, pages: Any, *rest: Any) -> Any:
        for layer in range(count):
            q += triton.attend(q, pages, layer, *rest, K, first=0, row_group=16, **tuning)
        return q

    return run


def bench(shape: Shape, contexts: tuple[int, ...], rows: tuple[int, ...], bandwidth: float, kv_dtype: Any) -> None:
    shape = shape._replace(layers=LAYERS)
    specs = {(context, K): attend_specs(shape, 1, K, context, kv_dtype=kv_dtype) for context in contexts for K in rows}
    jobs = {(context, K): compiled(layers(K), *spec) for (context, K), spec in specs.items()}
    for context in contexts:
        _, spec, table_spec, *_ = specs[context, rows[0]]
        pages = jax.tree.map(lambda x: normal(0, *x.shape).astype(x.dtype), spec)
        table = jnp.arange(1, table_spec.shape[1] + 1, dtype=jnp.int32)[None]
        floor = context * shape.token_bytes * jnp.dtype(kv_dtype).itemsize / 2 / bandwidth * 1e6
        first = None
        for K in rows:
            start, n_rows = (jnp.full(1, x, jnp.int32) for x in (context - K, K))
            q = normal(1, *specs[context, K][0].shape)
            time, _ = seconds(jobs[context, K].result(), (q, pages, table, start, n_rows))
            us = time / LAYERS * 1e6
            first = first or us
            bar = "70 %" if context >= 32768 else "-"
            row(
                f"context {context}, K = {K}",
                f"{us:.1f} us",
                f"{floor:.1f} us",
                f"{floor / us:.0%} of copy",
                bar,
                f"{us / first:.2f}x K = {rows[0]}" + (" (at most 1.15x)" if K == 4 else ""),
            )
        del pages


def main() -> None:
    parser = argparse.ArgumentParser(description="Times of the paged attention kernels on a GPU.")
    parser.add_argument("--kv-dtype", default="bfloat16", help="of keys and values: bfloat16 or float8_e4m3fn")
    kv_dtype = jnp.dtype(parser.parse_args().kv_dtype)
    bandwidth = begin("a layer of the 27B shape", "time", "floor", "share", "bar", "")
    bench(SHAPES["27b"], (4096, 32768, 131072), (1, 4), bandwidth, kv_dtype)


if __name__ == "__main__":
    main()
