"""Products of activation rows with a weight of any form. Callers that need bits independent of the row count pass whole row groups
(`pallas_kernels.rows.by_row_group`)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import w4a16
from pallas_kernels.linear import reference, triton
from pallas_kernels.registry import choose
from pallas_kernels.w4a16 import triton_experts, triton_prefill
from pallas_kernels.w4a16.decode import takes
from pallas_kernels.w4a16.forms import ByLayer, Packed, SideBySide

IMPLEMENTATIONS = {"reference": reference.linear, "triton": triton.linear}
BY_EXPERT = {"reference": reference.by_expert, "triton": triton_experts.expert_product}
GROUPED = {"reference": reference.grouped, "triton": triton_prefill.grouped_product}


def linear(
    x: Float[Array, "*rows D"],
    weight: Any,
    layer: int | None = None,
    *,
    transposed: bool = False,
    implementation: str | None = None,
) -> Float[Array, "*rows N"]:
    """`x @ weight` for a weight [D, N], or `x @ weight.T` for a `transposed` weight [N, D]; accumulated and returned in float32.

    Args:
        weight: an array or a form of `pallas_kernels.w4a16`; with `layer`, of all layers: a stack, or a tuple of one weight each.
    """
    weight, layer = at(weight, layer)
    if isinstance(weight, SideBySide):
        parts = [linear(x, part, layer, transposed=transposed, implementation=implementation) for part in weight.parts]
        return jnp.concatenate(parts, axis=-1)
    if isinstance(weight, Packed):
        rows = x.reshape(-1, x.shape[-1])
        return w4a16.product(rows, weight, layer, implementation=implementation).reshape(*x.shape[:-1], -1)
    by_platform = {"gpu": "triton"} if triton.fits(x, weight, layer, transposed) else {}
    return choose("linear", IMPLEMENTATIONS, implementation, by_platform)(x, weight, layer, transposed)


def by_expert(
    x: Float[Array, "R *k D"],
    weight: Any,
    experts: Int[Array, "R k"],
    layer: int | None = None,
    *,
    implementation: str | None = None,
) -> Float[Array, "R k N"]:
    """Row r, or for each of its experts an input of its own, times the experts `experts[r]` of a weight [E, D, N], in float32. Bits
    depend on the row and the expert alone."""
    weight, layer = at(weight, layer)
    if isinstance(weight, SideBySide):
        parts = [by_expert(x, part, experts, layer, implementation=implementation) for part in weight.parts]
        return jnp.concatenate(parts, axis=-1)
    if isinstance(weight, Packed):
        return w4a16.expert_product(x, weight, experts, layer, implementation=implementation)
    by_platform = {"gpu": "triton"} if triton_experts.fits(x, weight) else {}
    return choose("by_expert", BY_EXPERT, implementation, by_platform)(x, weight, experts, layer)


def grouped(
    x: Float[Array, "R D"],
    weight: Any,
    sizes: Int[Array, " E"],
    layer: int | None = None,
    *,
    implementation: str | None = None,
) -> Float[Array, "R N"]:
    """Rows sorted by expert times a weight [E, D, N], `sizes[e]` rows with expert e, in float32. Bits depend on the row, the expert
    and the numbers of rows and experts."""
    weight, layer = at(weight, layer)
    if isinstance(weight, SideBySide):
        parts = [grouped(x, part, sizes, layer, implementation=implementation) for part in weight.parts]
        return jnp.concatenate(parts, axis=-1)
    if isinstance(weight, Packed):
        return w4a16.grouped_product(x, weight, sizes, layer, implementation=implementation)
    by_platform = {"gpu": "triton"} if takes(x, weight) else {}
    return choose("grouped", GROUPED, implementation, by_platform)(x, weight, sizes, layer)


def at(weight: Any, layer: int | None) -> tuple[Any, int | None]:
    """The weight that holds layer `layer`, and its number there (None where it holds nothing else)."""
    if layer is None:
        return weight, None
    if isinstance(weight, tuple):
        return weight[layer], None
    if isinstance(weight, ByLayer):
        stack, number = weight.places[layer]
        return weight.stacks[stack], number
    return weight, layer
