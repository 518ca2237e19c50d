"""Plain-JAX products with packed weights: the twins of the GPU kernels and what CPUs run."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.registry import matrix_precision
from pallas_kernels.w4a16.forms import BLOCK, Fp8, Int4, Nvfp4, Packed
from pallas_kernels.w4a16.pack import padded, unpack_nibbles


def e2m1(codes: Array, dtype: Any) -> Array:
    """Four-bit floats 0, ½, 1, 1½, 2, 3, 4, 6 and, from code 8 on, their negatives."""
    exponent, half = (codes >> 1) & 3, (codes & 1).astype(jnp.int32)
    size = jnp.where(exponent == 0, half, (2 + half) << (exponent.astype(jnp.int32) - 1).clip(0))
    return (jnp.where(codes >= 8, -size, size).astype(jnp.float32) * 0.5).astype(dtype)


def e4m3(bits: Array, dtype: Any) -> Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(dtype)


def _of(weight: Any, index: Any) -> Any:
    """Takes number `index` of the leading axis."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False), weight)


def _dot(x: Array, w: Array) -> Array:
    """[..., R, k] times [..., N, k] -> float32 [..., R, N]."""
    batch = tuple(range(x.ndim - 2))
    contract = ((x.ndim - 1,), (w.ndim - 1,))
    return jax.lax.dot_general(
        x, w, (contract, (batch, batch)), precision=matrix_precision(x), preferred_element_type=jnp.float32
    )


def product(x: Array, weight: Packed, layer: Any) -> Array:
    weight = weight if layer is None else _of(weight, layer)
    R = x.shape[0]
    if isinstance(weight, Int4) and weight.order is not None:
        x = x[:, weight.order]
    x = jnp.pad(x, ((0, 0), (0, padded(x.shape[1]) - x.shape[1])))
    x = jnp.swapaxes(x.reshape(R, -1, BLOCK), 0, 1)
    zeros = jnp.zeros((R, weight.codes.shape[-2]), jnp.float32)
    match weight:
        case Int4():
            groups = BLOCK // weight.group
            shifts = jnp.full_like(weight.scales, 8, jnp.uint8) if weight.zeros is None else weight.zeros
            split = lambda y: y.reshape(-1, groups, y.shape[-1])  # noqa: E731
            xs = x, weight.codes, split(weight.scales), split(shifts)
            return jax.lax.scan(_int4_block, zeros, xs)[0]
        case Nvfp4():
            xs = x, weight.codes, weight.scales.reshape(-1, BLOCK // 16, weight.scales.shape[-1])
            if weight.rounded:
                return jax.lax.scan(functools.partial(_nvfp4_block, weight.scale), zeros, xs)[0]
            return jax.lax.scan(functools.partial(_nvfp4_block, None), zeros, xs)[0] * weight.scale
        case Fp8():
            if weight.scales.shape[0] == 1:
                return jax.lax.scan(_fp8_block, zeros, (x, weight.codes, None))[0] * weight.scales[0]
            return jax.lax.scan(_fp8_block, zeros, (x, weight.codes, weight.scales))[0]


def _int4_block(total: Array, xs: tuple[Array, Array, Array, Array]) -> tuple[Array, None]:
    """Adds a block's groups, in order: each group's sum of exact factors, then its scale."""
    x, codes, scales, zeros = xs
    groups = scales.shape[0]
    split = lambda y: jnp.swapaxes(y.reshape(y.shape[0], groups, -1), 0, 1)  # noqa: E731
    steps = split(unpack_nibbles(codes)).astype(jnp.int8) - zeros.astype(jnp.int8)[:, :, None]
    sums = _dot(split(x), steps.astype(x.dtype))
    for g in range(groups):
        total = total + sums[g] * scales[g].astype(jnp.float32)
    return total, None


def _nvfp4_block(scale: Array | None, total: Array, xs: tuple[Array, Array, Array]) -> tuple[Array, None]:
    x, codes, scales = xs
    values = e2m1(unpack_nibbles(codes), jnp.float32) * jnp.repeat(e4m3(scales, jnp.float32).T, 16, axis=1)
    if scale is not None:
        values = _rounded(values * scale[:, None])
    return total + _dot(x, values.astype(x.dtype)), None  # without the scale, exact in bfloat16 too


def _rounded(values: Array) -> Array:
    """Rounded to bfloat16's eight bits."""
    return jax.lax.reduce_precision(values, exponent_bits=8, mantissa_bits=7)


def _fp8_block(total: Array, xs: tuple[Array, Array, Array | None]) -> tuple[Array, None]:
    x, codes, scale = xs
    sums = _dot(x, e4m3(codes, x.dtype))
    return total + (sums if scale is None else sums * scale), None


def expert_product(x: Array, weight: Packed, experts: Array, layer: Any) -> Array:
    weight = weight if layer is None else _of(weight, layer)
    return by_pair(x, experts, lambda row, expert: product(row[None], _of(weight, expert), None)[0])


def by_pair(x: Array, experts: Array, f: Any) -> Array:
    """`f(row, expert)` for every row [K] and each of its experts, one after another: x [R, K] or [R, k, K], experts [R, k]."""
    R, k = experts.shape
    rows = jnp.broadcast_to(x[:, None], (R, k, x.shape[-1])) if x.ndim == 2 else x
    out = jax.lax.map(lambda pair: f(*pair), (rows.reshape(R * k, -1), experts.reshape(-1)))
    return out.reshape(R, k, -1)


def grouped_product(x: Array, weight: Packed, sizes: Array, layer: Any) -> Array:
    if layer is not None:  # decoded once the rows are there: all layers' at once would fill a GPU's memory
        x, layer = jax.lax.optimization_barrier((x, jnp.asarray(layer, jnp.int32)))
    return ragged(x, dequantise(weight, layer, x.shape[1], x.dtype), sizes)


def ragged(x: Array, weight: Array, sizes: Array) -> Array:
    """Rows sorted by expert times a plain weight [E, K, N]."""
    return jax.lax.ragged_dot(x, weight, sizes, precision=matrix_precision(x), preferred_element_type=jnp.float32)


def dequantise(weight: Packed, layer: Any, inputs: int, dtype: Any) -> Array:
    values = jnp.swapaxes(whole_rows(weight, layer, dtype), -1, -2)[..., :inputs, :]
    if isinstance(weight, Int4) and weight.order is not None:
        order = weight.order if layer is None else _of(weight.order, layer)
        values = jnp.take_along_axis(values, jnp.argsort(order, axis=-1)[..., None], axis=-2)
    return values


def whole_rows(weight: Packed, layer: Any, dtype: Any) -> Array:
    """The decoded weight as it lies in the blocks, [..., N, P]: rows of inputs that belong together, padding at their end."""
    weight = weight if layer is None else _of(weight, layer)
    whole = lambda blocks: jnp.swapaxes(blocks, -2, -3).reshape(*blocks.shape[:-3], blocks.shape[-2], -1)  # noqa: E731
    wide = lambda rows, each: jnp.repeat(jnp.swapaxes(rows, -1, -2).astype(jnp.float32), each, axis=-1)  # noqa: E731
    match weight:
        case Int4():
            codes = whole(unpack_nibbles(weight.codes)).astype(jnp.float32)
            zeros = 8.0 if weight.zeros is None else wide(weight.zeros, weight.group)
            values = (codes - zeros) * wide(weight.scales, weight.group)
        case Nvfp4():
            values = e2m1(whole(unpack_nibbles(weight.codes)), jnp.float32)
            values = values * wide(e4m3(weight.scales, jnp.float32), 16) * weight.scale[..., None]
            values = _rounded(values) if weight.rounded else values
        case Fp8():
            values = e4m3(whole(weight.codes), jnp.float32)
            values = values * wide(weight.scales, values.shape[-1] // weight.scales.shape[-2])
    return values.astype(dtype)
