"""From codes as they are counted, [outputs, inputs], to blocks as kernels read them, and back. For numpy and JAX arrays alike."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.rows import round_up
from pallas_kernels.w4a16.forms import BLOCK


def _library(x: Any) -> Any:
    return jnp if isinstance(x, Array) else np


def padded(inputs: int) -> int:
    """Inputs in whole blocks."""
    return round_up(inputs, BLOCK)


def blocks(codes: Any) -> Any:
    """Codes [..., N, K], one to a byte -> [..., P/128, N, 128]; the padding is 0."""
    xp = _library(codes)
    *lead, N, K = codes.shape
    wide = xp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, padded(K) - K)])
    return xp.swapaxes(wide.reshape(*lead, N, -1, BLOCK), -3, -2)


def pack_nibbles(codes: Any) -> Any:
    """Codes [..., N, K] of 0 … 15, one to a byte -> bytes [..., P/128, N, 64]."""
    whole = blocks(codes)
    return whole[..., : BLOCK // 2] | (whole[..., BLOCK // 2 :] << 4)


def unpack_nibbles(packed: Any) -> Any:
    """Bytes [..., 64] -> codes [..., 128]."""
    return _library(packed).concatenate([packed & 15, packed >> 4], axis=-1)


def group_rows(scales: Any, group: int, inputs: int) -> Any:
    """Something of each group, [..., N, groups of `inputs`] -> [..., groups of P, N]; that of the padding is 0.

    A group of more than 128 inputs, a whole channel for one, is repeated for every block (`group` must be a multiple of 128, or
    reach past the last input); one of fewer must divide 128.
    """
    xp = _library(scales)
    P = padded(inputs)
    if group > BLOCK:
        scales = xp.repeat(scales, -(-group // BLOCK), axis=-1)[..., : P // BLOCK]
        group = BLOCK
    scales = xp.pad(scales, [(0, 0)] * (scales.ndim - 1) + [(0, P // group - scales.shape[-1])])
    return xp.swapaxes(scales, -1, -2)
