"""Products with packed weights. Callers that need bits independent of the row count pass whole row groups
(`pallas_kernels.rows.by_row_group`), or rows one by one."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jaxtyping import DTypeLike, Float, Float32, Int

from pallas_kernels.registry import choose
from pallas_kernels.w4a16 import reference, triton, triton_experts, triton_prefill
from pallas_kernels.w4a16.decode import takes
from pallas_kernels.w4a16.forms import Packed

Layer = Int[Array, ""] | int | None

PRODUCTS = {"reference": reference.product, "triton": triton.product}
EXPERT_PRODUCTS = {"reference": reference.expert_product, "triton": triton_experts.expert_product}
GROUPED_PRODUCTS = {"reference": reference.grouped_product, "triton": triton_prefill.grouped_product}


def product(
    x: Float[Array, "R K"], weight: Packed, layer: Layer = None, *, implementation: str | None = None
) -> Float32[Array, "R N"]:
    """`x` times a weight, or layer `layer` of a stack of them. Accumulated in float32: group by group, in order."""
    by_platform = {"gpu": "triton"} if x.dtype == jnp.bfloat16 else {}  # the tensor cores have no float32
    return choose("w4a16 product", PRODUCTS, implementation, by_platform)(x, weight, layer)


def expert_product(
    x: Float[Array, "R *k K"],
    weight: Packed,
    experts: Int[Array, "R k"],
    layer: Layer = None,
    *,
    implementation: str | None = None,
) -> Float32[Array, "R k N"]:
    """Row r, or for each of its experts an input of its own, times the experts `experts[r]`, all different: decoding. Bits depend
    on the row and the expert alone; the kernel reads an expert once for all rows."""
    by_platform = {"gpu": "triton"} if triton_experts.fits(x, weight) else {}
    return choose("w4a16 expert product", EXPERT_PRODUCTS, implementation, by_platform)(x, weight, experts, layer)


def grouped_product(
    x: Float[Array, "R K"],
    weight: Packed,
    sizes: Int[Array, " E"],
    layer: Layer = None,
    *,
    implementation: str | None = None,
) -> Float32[Array, "R N"]:
    """Rows sorted by expert times their experts, `sizes[e]` rows of expert e: prefill."""
    by_platform = {"gpu": "triton"} if takes(x, weight) else {}
    return choose("w4a16 grouped product", GROUPED_PRODUCTS, implementation, by_platform)(x, weight, sizes, layer)


def dequantise(weight: Packed, layer: Layer, inputs: int, dtype: DTypeLike) -> Float[Array, "*experts K N"]:
    """The weight that the codes stand for, `inputs` by outputs like a plain one, rounded to `dtype` once."""
    return reference.dequantise(weight, layer, inputs, dtype)
