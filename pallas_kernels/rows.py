"""Ways to run rows and sequences such that the bits of one do not depend on how many others run beside it.

A library picks its algorithm (blocking, split of the reduction) by shape, so a row of a one-row product and the same row of a
five-row product may differ in the last bit. Here rows always pass in groups of one fixed size and sequences one at a time: what is
compiled for an operation has one shape in every executable, and a row's result depends on that row and the weights alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


def pad_rows(x: Array, group: int) -> Array:
    """Pads the leading axis with zero rows to a multiple of `group`."""
    missing = -x.shape[0] % group
    return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) if missing else x


def guarded(f: Callable[..., Any], *xs: Any) -> Any:
    """`f(*xs)` with nothing fused across its border, so that its inside is compiled alike wherever it stands."""
    return jax.lax.optimization_barrier(f(*jax.lax.optimization_barrier(xs)))


def by_row_group(f: Callable[..., Any], group: int, *rows: Array) -> Any:
    """Applies `f`, a function of `group` rows, to every group of `rows` (arrays with one common leading axis R).

    Returns: what `f` returns, with leading axis R again.
    """
    count = rows[0].shape[0]
    padded = [pad_rows(x, group) for x in rows]
    groups = padded[0].shape[0] // group
    if groups == 1:
        out = guarded(f, *padded)
    else:
        split = tuple(x.reshape(groups, group, *x.shape[1:]) for x in padded)
        out = jax.lax.map(lambda xs: guarded(f, *xs), split)
        out = jax.tree.map(lambda y: y.reshape(groups * group, *y.shape[2:]), out)
    return jax.tree.map(lambda y: y[:count], out)


def by_sequence(f: Callable[..., Any], *xs: Any) -> Any:
    """Applies `f` to each sequence of `xs`, pytrees of arrays with one common leading axis B."""
    if jax.tree.leaves(xs)[0].shape[0] == 1:
        out = guarded(f, *jax.tree.map(lambda x: x[0], xs))
        return jax.tree.map(lambda y: y[None], out)
    return jax.lax.map(lambda x: guarded(f, *x), xs)
