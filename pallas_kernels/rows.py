"""Ways to run rows and sequences such that the bits of one do not depend on how many others run beside it.

A library picks its algorithm (blocking, split of the reduction) by shape, so a row of a one-row product and the same row of a
five-row product may differ in the last bit; and what a compiler fuses with an operation decides which products and sums it
contracts. Here rows always pass in groups of one fixed size. A row's result then depends on that row and the weights alone.

On a CPU each group is an iteration of a loop whose bound is known only at run time: the body is compiled by itself, with the same
shapes in every executable, and groups without rows cost nothing. On a GPU, where rows that pad a group are free, the caller
pads its rows once (`bucket`), and the groups follow one another without a loop: for one group, the program is the same line by
line whatever the rows are. Barriers keep groups apart there: side by side, XLA would make one fusion of two groups' norms, whose
sums are split otherwise than those of one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


def round_up(n: int, multiple: int) -> int:
    """The least multiple that is no less than `n`."""
    return -(-n // multiple) * multiple


def bucket(rows: int, group: int) -> int:
    """How many rows to pad `rows` to before they pass through a program of `by_row_group`s."""
    return round_up(rows, group) if jax.default_backend() == "gpu" else rows


_LIVE: ContextVar[int | None] = ContextVar("live", default=None)


@contextlib.contextmanager
def at_most(live: int) -> Iterator[None]:
    """Says to kernels, while a function of padded rows is traced, that none past the first `live` matters. They may leave those out
    where that changes no bit of the others."""
    token = _LIVE.set(live)
    try:
        yield
    finally:
        _LIVE.reset(token)


def most_live(rows: int) -> int:
    """How many of `rows` rows can matter to who traces this."""
    live = _LIVE.get()
    return rows if live is None else min(rows, live)


def by_row_group(f: Callable[..., Any], group: int, count: Array, *rows: Array, live: int | None = None) -> Any:
    """Applies `f`, a function of `group` rows, to every group of `rows` (arrays with one common leading axis R).

    Args:
        live: how many leading rows can matter at all; the others pad a bucket.
        count: how many leading rows matter, at run time; groups past them are skipped and yield zeros. It must be computed
            from the call's inputs: a constant would let the compiler dissolve the loop.

    Returns: what `f` returns, with leading axis R again.
    """
    R = rows[0].shape[0]
    if jax.default_backend() == "gpu":
        padded = [pad_rows(x, bucket(R, group)) for x in rows]
        parts: list[Any] = []
        for i in range(0, bucket(R, group), group):
            given = [x[i : i + group] for x in padded]
            # Waits for the group before, and for nothing to be fused with what stands around.
            given, _ = jax.lax.optimization_barrier((given, parts[-1:]))
            with at_most(group if live is None else min(max(live - i, 1), group)):
                parts.append(f(*given))
        parts = jax.lax.optimization_barrier(parts)
        return jax.tree.map(lambda *ys: (ys[0] if len(ys) == 1 else jnp.concatenate(ys))[:R], *parts)
    # With one group more than there are rows for, a slice is never the whole: it would be simplified away, and a body that
    # does not depend on the iteration is moved out of the loop and compiled with what stands there.
    total = round_up(R, group) + group
    padded = [pad_rows(x, total) for x in rows]
    part = lambda i: [jax.lax.dynamic_slice_in_dim(x, i * group, group) for x in padded]  # noqa: E731
    shapes = jax.eval_shape(lambda i: f(*part(i)), jnp.int32(0))
    zeros = jax.tree.map(lambda s: jnp.zeros((total, *s.shape[1:]), s.dtype), shapes)

    def body(i: Array, out: Any) -> Any:
        put = lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, i * group, 0)  # noqa: E731
        return jax.tree.map(put, out, f(*part(i)))

    out = jax.lax.fori_loop(0, (jnp.minimum(count, R) + group - 1) // group, body, zeros)
    return jax.tree.map(lambda y: y[:R], out)


def pad_rows(x: Array, total: int) -> Array:
    """Appends zeros to the leading axis, up to `total` rows."""
    return x if x.shape[0] == total else jnp.pad(x, [(0, total - x.shape[0])] + [(0, 0)] * (x.ndim - 1))


def least_holding(rows: int, sizes: Sequence[int]) -> int:
    """The first of ascending `sizes` that is no less than `rows`."""
    return next(size for size in sizes if size >= rows)


def add_in_order(parts: Array, written: np.ndarray | None = None) -> Array:
    """The sum of `parts` [P, R, N], one addition after another: how a compiler splits a reduction may depend on how many rows there
    are. Where `written` [P, N] is false, a part holds nothing."""
    held = np.ones(parts.shape[::2], bool) if written is None else written
    terms = (part if mine.all() else jnp.where(mine, part, 0) for part, mine in zip(parts, held, strict=True))
    return functools.reduce(jnp.add, terms)


def by_sequence(f: Callable[..., Any], *xs: Any) -> Any:
    """Applies `f` to each sequence of `xs`, pytrees of arrays with one common leading axis B.

    What must not depend on B belongs into a loop with a run-time bound inside `f`.
    """
    if jax.tree.leaves(xs)[0].shape[0] == 1:
        return jax.tree.map(lambda y: y[None], f(*jax.tree.map(lambda x: x[0], xs)))
    return jax.lax.map(lambda x: f(*x), xs)


def live_rows(n_rows: Array, K: int) -> Array:
    """Where the last live row of B sequences with `n_rows` of K rows each stands, plus one, when they lie one after another."""
    return jnp.max(jnp.where(n_rows > 0, jnp.arange(n_rows.shape[0]) * K + n_rows, 0))
