"""Named shapes of paged attention, and arguments of them for tests, for compiling without a GPU, and for benchmarks.

The `…_specs` are shapes alone; `arrays` are seeded random values. With `garbage`, everything that no row may see is NaN: rows that
no sequence has written, pages that none owns (the sentinel too), hidden rows, other layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention.pages import Pages, page_shapes
from pallas_kernels.rows import round_up


class Shape(NamedTuple):
    """Query and key/value heads, their dim, tokens of a page, and how many such layers a model has."""

    H: int
    Hkv: int
    Dh: int
    page_size: int
    layers: int

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in one layer, in bfloat16."""
        return 2 * 2 * self.Hkv * self.Dh


SHAPES = {
    "27b": Shape(24, 4, 256, 256, layers=17),
    "35b-a3b": Shape(16, 2, 256, 256, layers=11),
    "tiny-agent": Shape(4, 2, 64, 256, layers=3),
    "head-128": Shape(8, 2, 128, 64, layers=2),
    "one-group": Shape(4, 4, 64, 64, layers=2),
}
ROW_GROUP = 16  # rows of a step come in groups
SMALL = {  # for the interpreter, which is slow
    "small-4": Shape(4, 1, 32, 32, layers=2),
    "small-2": Shape(4, 2, 64, 64, layers=2),
    "pages of 48": Shape(4, 1, 32, 48, layers=2),
}


def pages_spec(shape: Shape, pages: int, dtype: Any = jnp.bfloat16) -> Pages:
    _, Hkv, Dh, N, L = shape
    shapes = page_shapes((L, pages, Hkv), N, Dh, dtype)
    return Pages(*(jax.ShapeDtypeStruct(x, jnp.dtype(dtype)) for x in shapes))  # pyright: ignore[reportArgumentType]


def attend_specs(
    shape: Shape, B: int, K: int, context: int, dtype: Any = jnp.bfloat16, kv_dtype: Any = None
) -> tuple[Any, ...]:
    """What `api.attend` takes, but for `layer` and `K`: q, pages, page_table, start, n_rows; for `context` tokens a sequence."""
    each = -(-context // shape.page_size)
    number = jax.ShapeDtypeStruct((B,), jnp.dtype("int32"))
    table = jax.ShapeDtypeStruct((B, each), jnp.dtype("int32"))
    q = jax.ShapeDtypeStruct((round_up(B * K, ROW_GROUP), shape.H, shape.Dh), jnp.dtype(dtype))
    return q, pages_spec(shape, B * each + 1, kv_dtype or dtype), table, number, number


def write_specs(
    shape: Shape, B: int, K: int, context: int, dtype: Any = jnp.bfloat16, kv_dtype: Any = None
) -> tuple[Any, ...]:
    """What `api.write` takes, but for `layer` and `K`: pages, k, v, page_table, start, n_rows."""
    _, pages, *rest = attend_specs(shape, B, K, context, dtype, kv_dtype)
    new = jax.ShapeDtypeStruct((round_up(B * K, ROW_GROUP), shape.Hkv, shape.Dh), jnp.dtype(dtype))
    return pages, new, new, *rest


def arrays(
    shape: Shape,
    K: int,
    *,
    start: Sequence[int],
    n_rows: Sequence[int],
    first: Sequence[int] | int = 0,
    layer: int = 0,
    dtype: Any = jnp.float32,
    kv_dtype: Any = None,
    seed: int = 0,
    garbage: bool = False,
) -> tuple[tuple[Any, ...], tuple[Any, Any]]:
    """Arguments of `attend_specs`, with positions 0 … start + n_rows - 1 written, and new rows k and v for `api.write`."""
    B, rng = len(start), np.random.default_rng(seed)
    context = max(s + max(n, K) for s, n in zip(start, n_rows, strict=True))
    specs = attend_specs(shape, B, K, context, dtype, kv_dtype)
    q, pages, table = rng.normal(size=specs[0].shape), specs[1], specs[2]
    owned = rng.permutation(np.arange(1, B * table.shape[1] + 1)).reshape(table.shape)
    keys, values = (rng.normal(size=x.shape) for x in pages)
    seen = np.full((shape.layers, pages.keys.shape[1], shape.page_size), not garbage)
    if garbage:
        firsts = np.broadcast_to(first, (B,))
        for b in range(B):
            at = np.arange(firsts[b], start[b] + n_rows[b])
            seen[layer, owned[b, at // shape.page_size], at % shape.page_size] = True
            q[b * K + n_rows[b] : (b + 1) * K] = np.nan
    values_ = (q, Pages(keys, values), owned, np.asarray(start), np.asarray(n_rows))  # pyright: ignore
    q, pages, *rest = jax.tree.map(lambda x, spec: jnp.asarray(x, spec.dtype), values_, specs)
    given = q, pages.where(jnp.asarray(seen), jnp.nan), *rest
    new = write_specs(shape, B, K, context, dtype, kv_dtype)[1]
    return given, tuple(jnp.asarray(rng.normal(size=new.shape), new.dtype) for _ in range(2))  # pyright: ignore
