"""Rounding of a weight to a scheme: to the nearest code, with scales from the largest value of each group, or searched."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from atlas_jax.shapes import Array, Float
from atlas_jax.weights.quantised.codes import Codes
from atlas_jax.weights.quantised.scheme import Scheme
from pallas_kernels.w4a16.reference import e2m1, e4m3

STEP, STEPS = 0.03, 10  # a search tries scales down to 0.7 of that which just covers the largest value
BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # where the nearest E2M1 number changes
LARGEST_E2M1, LARGEST_E4M3 = 6.0, 448.0


def rounded(weight: Float[Array, "N K"], scheme: Scheme, *, search: bool = False) -> Codes:
    """The codes and scales nearest to a weight of N outputs and K inputs.

    Args:
        scheme: symmetric; K need not be a multiple of its groups.
        search: tries smaller scales for each group, which round more finely and cut off its largest values, and keeps the one
            with the least squared error.
    """
    N, K = weight.shape
    weight = weight.astype(jnp.float32)
    if scheme.kind == "fp8":
        return _fp8(weight, scheme)
    group = scheme.group or K
    groups = jnp.pad(weight, ((0, 0), (0, -K % group))).reshape(N, -1, group)
    largest = jnp.max(jnp.abs(groups), axis=-1)
    make = _int4_codes if scheme.kind == "int4" else _nvfp4_codes(jnp.max(largest))
    best = make(groups, largest, 1.0)
    if search:

        def smaller(i: Array, best: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            codes, scales, error = make(groups, largest, 1.0 - STEP * (i + 1))
            better = error < best[2]
            pick = lambda new, old: jnp.where(better, new, old)  # noqa: E731
            return jnp.where(better[..., None], codes, best[0]), pick(scales, best[1]), pick(error, best[2])

        best = jax.lax.fori_loop(0, STEPS, smaller, best)
    codes = best[0].reshape(N, -1)[:, :K]
    if scheme.kind == "int4":
        return Codes(scheme, codes, best[1])
    scale = jnp.maximum(jnp.max(largest), 1e-30) / (LARGEST_E2M1 * LARGEST_E4M3)
    return Codes(scheme, codes, best[1], scale=jnp.broadcast_to(scale, (N,)))


def _error(groups: Array, values: Array) -> Array:
    return jnp.sum((groups - values) ** 2, axis=-1)


def _int4_codes(groups: Array, largest: Array, factor: Array | float) -> tuple[Array, Array, Array]:
    """Codes, bfloat16 scales and squared errors of groups [N, groups, group]."""
    scales = jnp.maximum(largest * (factor / 7.5), 1e-30).astype(jnp.bfloat16)
    wide = scales.astype(jnp.float32)[..., None]
    steps = jnp.clip(jnp.round(groups / wide), -8, 7)
    return (steps + 8).astype(jnp.uint8), scales, _error(groups, steps * wide)


def _nvfp4_codes(largest_of_all: Array) -> Callable[[Array, Array, Array | float], tuple[Array, Array, Array]]:
    scale = jnp.maximum(largest_of_all, 1e-30) / (LARGEST_E2M1 * LARGEST_E4M3)

    def make(groups: Array, largest: Array, factor: Array | float) -> tuple[Array, Array, Array]:
        """Codes, the bits of E4M3 scales, squared errors."""
        rounded = (largest * (factor / LARGEST_E2M1) / scale).astype(jnp.float8_e4m3fn)
        bits = rounded.view(jnp.uint8)
        wide = jnp.maximum(e4m3(bits, jnp.float32) * scale, 1e-30)[..., None]
        sizes = jnp.abs(groups) / wide
        codes = sum((sizes > bound).astype(jnp.uint8) for bound in BETWEEN)
        codes = jnp.where((groups < 0) & (codes > 0), codes | 8, codes).astype(jnp.uint8)
        return codes, bits, _error(groups, e2m1(codes, jnp.float32) * wide)

    return make


def _fp8(weight: Array, scheme: Scheme) -> Codes:
    N, K = weight.shape
    if scheme.group is None:
        scales = jnp.maximum(jnp.max(jnp.abs(weight), axis=1, keepdims=True), 1e-30) / LARGEST_E4M3
        wide = scales
    else:
        padded = jnp.pad(weight, ((0, -N % 128), (0, -K % 128)))
        tiles = padded.reshape(padded.shape[0] // 128, 128, -1, 128)
        blocks = jnp.maximum(jnp.max(jnp.abs(tiles), axis=(1, 3)), 1e-30) / LARGEST_E4M3
        scales = jnp.repeat(blocks, 128, axis=0)[:N]
        wide = jnp.repeat(scales, 128, axis=1)[:, :K]
    return Codes(scheme, (weight / wide).astype(jnp.float8_e4m3fn).view(jnp.uint8), scales)
