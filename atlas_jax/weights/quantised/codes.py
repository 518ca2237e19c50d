"""A quantised weight as a checkpoint's reader leaves it: one code for each input and output, whatever the layout of the file."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from atlas_jax.shapes import Array
from atlas_jax.weights.quantised.scheme import Scheme
from pallas_kernels.w4a16 import Fp8, Int4, Nvfp4, Packed
from pallas_kernels.w4a16.forms import BLOCK
from pallas_kernels.w4a16.pack import blocks, group_rows, pack_nibbles


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Codes:
    """A weight of N outputs and K inputs in codes, maybe of several experts (leading axes).

    Attributes:
        codes: uint8 [..., N, K]: integers 0 … 15 (int4), or the bits of E2M1 (nvfp4) or E4M3 (fp8) numbers.
        scales: [..., N, groups]: a float dtype (int4), the bits of E4M3 numbers as uint8 (nvfp4), float32 (fp8).
        zeros: uint8 [..., N, groups], the codes that stand for 0; None where they are 8.
        order: int32 [..., K]: which input each column belongs to; None where they lie in order.
        scale: float32 [..., N]: nvfp4's factor of the whole tensor.
        rounded: the reference implementation rounds the values to bfloat16.
    """

    scheme: Scheme = dataclasses.field(metadata=dict(static=True))
    codes: Any
    scales: Any
    zeros: Any = None
    order: Any = None
    scale: Any = None
    rounded: bool = dataclasses.field(default=False, metadata=dict(static=True))

    def rows(self, of: Any) -> Codes:
        """The outputs `of`, in that order."""
        take = functools.partial(jnp.take, indices=jnp.asarray(of))
        zeros = None if self.zeros is None else take(self.zeros, axis=-2)
        scale = None if self.scale is None else take(self.scale, axis=-1)
        scales, codes = take(self.scales, axis=-2), take(self.codes, axis=-2)
        return dataclasses.replace(self, codes=codes, scales=scales, zeros=zeros, scale=scale)


def joined(parts: Sequence[Codes]) -> Codes:
    """Outputs one after another, of weights with one scheme and one order."""
    if len(parts) == 1:
        return parts[0]
    along = lambda name, axis: jnp.concatenate([getattr(part, name) for part in parts], axis)  # noqa: E731
    first = parts[0]
    return Codes(
        first.scheme,
        along("codes", -2),
        along("scales", -2),
        None if first.zeros is None else along("zeros", -2),
        first.order,
        None if first.scale is None else along("scale", -1),
        first.rounded,
    )


def packed(weight: Codes, dtype: str) -> Packed:
    """In the form that kernels read. A float32 model, there for comparison, gets the reference implementation's values."""
    K, scheme = weight.codes.shape[-1], weight.scheme
    # A channel is one group that reaches past the last input.
    group = scheme.group or -(-K // BLOCK) * BLOCK
    match scheme.kind:
        case "int4":
            zeros = None if weight.zeros is None else group_rows(weight.zeros, group, K)
            return Int4(pack_nibbles(weight.codes), group_rows(weight.scales, group, K), zeros, weight.order)
        case "nvfp4":
            rounded = weight.rounded and dtype == "float32"
            return Nvfp4(pack_nibbles(weight.codes), group_rows(weight.scales, 16, K), weight.scale, rounded)
        case "fp8":
            whole = scheme.group is None
            scales = jnp.swapaxes(weight.scales, -1, -2) if whole else group_rows(weight.scales, group, K)
            return Fp8(blocks(weight.codes), scales)


def nibbles(words: Array, axis: int) -> Array:
    """int32 words -> the eight codes of each, lowest bits first, along `axis` (-1 or -2)."""
    words = jax.lax.bitcast_convert_type(words, jnp.uint32)
    shifts = jnp.arange(0, 32, 4, dtype=jnp.uint32)
    if axis == -1:
        codes = (words[..., None] >> shifts) & 15
        return codes.reshape(*words.shape[:-1], -1).astype(jnp.uint8)
    codes = (words[..., None, :] >> shifts[:, None]) & 15
    return codes.reshape(*words.shape[:-2], -1, words.shape[-1]).astype(jnp.uint8)
