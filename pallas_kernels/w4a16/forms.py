"""How quantised weights lie in memory.

A weight has K inputs and N outputs. Inputs come in blocks of 128: K is padded to P, a multiple of it, and the padding's scales
are 0. Of a block, a column's codes lie together, so that a thread loads 16 bytes of one column at once. Four-bit codes stand two
to a byte: byte j of a block holds input j in its low half and input j + 64 in its high half.

Leading axes, where they are: layers (layout "stacked"), then experts. Nothing here can be indexed: a kernel takes the whole stack
and a layer's number, since a slice would be a copy.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jaxtyping import Float, Float32, Int32, UInt8

BLOCK = 128  # inputs
Arrays = Any  # JAX's, or on the way from a checkpoint to the device numpy's


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int4:
    """(code - zero) * scale, codes 0 … 15.

    Attributes:
        codes: two to a byte.
        scales: of groups of 32, 64 or 128 inputs, in the checkpoint's dtype.
        zeros: the code that stands for 0, for each scale; None where all are 8.
        order: which input each row of codes belongs to, where groups are not of neighbours (GPTQ's act-order).
    """

    codes: UInt8[Arrays, "*lead blocks N 64"]
    scales: Float[Arrays, "*lead groups N"]
    zeros: UInt8[Arrays, "*lead groups N"] | None = None
    order: Int32[Arrays, "*lead K"] | None = None

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return BLOCK * self.codes.shape[-3] // self.scales.shape[-2]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Nvfp4:
    """code * block scale * scale; codes are E2M1, block scales E4M3, both exact in bfloat16, and so is their product.

    Attributes:
        codes: two to a byte.
        scales: the bits of the E4M3 scales of groups of 16 inputs.
        scale: of each output, so that projections with scales of their own can stand side by side.
        rounded: the values are rounded to bfloat16, as compressed-tensors' own library does: for float32 models, which are there
            for comparison. Kernels need not know it.
    """

    codes: UInt8[Arrays, "*lead blocks N 64"]
    scales: UInt8[Arrays, "*lead groups N"]
    scale: Float32[Arrays, "*lead N"]
    rounded: bool = dataclasses.field(default=False, metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fp8:
    """code * scale.

    Attributes:
        codes: the bits of E4M3 numbers.
        scales: of each block of inputs, or one for all of them (groups = 1).
    """

    codes: UInt8[Arrays, "*lead blocks N 128"]
    scales: Float32[Arrays, "*lead groups N"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SideBySide:
    """Weights of the same inputs in forms of their own, plain arrays [K, N] among them; their outputs follow one another."""

    parts: tuple[Any, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ByLayer:
    """A stack whose layers are not all of one form: layer i is number `places[i][1]` of the stack `stacks[places[i][0]]`."""

    stacks: tuple[Any, ...]
    places: tuple[tuple[int, int], ...] = dataclasses.field(metadata=dict(static=True))


Packed = Int4 | Nvfp4 | Fp8
FORMS = (Int4, Nvfp4, Fp8, SideBySide, ByLayer)  # what may stand where a plain array does


def outputs(weight: Packed | jax.Array) -> int:
    """N of a packed weight, or of a plain one [..., K, N]."""
    return weight.shape[-1] if isinstance(weight, jax.Array) else weight.codes.shape[-2]
