"""Products of activation rows with a weight. Callers that need bits independent of the row count pass whole row groups
(`pallas_kernels.rows.by_row_group`)."""

from __future__ import annotations

from jaxtyping import Array, Float

from pallas_kernels.linear import reference
from pallas_kernels.registry import choose

IMPLEMENTATIONS = {"reference": reference.linear}


def linear(
    x: Float[Array, "*rows D"],
    weight: Float[Array, ...],
    *,
    transposed: bool = False,
    implementation: str | None = None,
) -> Float[Array, "*rows N"]:
    """`x @ weight` for a weight [D, N], or `x @ weight.T` for a `transposed` weight [N, D]; accumulated and returned in float32."""
    return choose("linear", IMPLEMENTATIONS, implementation, {})(x, weight, transposed)
