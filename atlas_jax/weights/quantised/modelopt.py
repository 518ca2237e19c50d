"""NVIDIA ModelOpt: NVFP4 and FP8."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from atlas_jax.weights.quantised.codes import Codes
from atlas_jax.weights.quantised.compressed_tensors import byte_nibbles
from atlas_jax.weights.quantised.formats import Format, Plain, Unsupported, Want, groups
from atlas_jax.weights.quantised.fp8 import Fp8Format
from atlas_jax.weights.quantised.scheme import NVFP4, Scheme


@dataclasses.dataclass(frozen=True)
class ModelOptNvfp4(Plain):
    """Two codes a byte along the inputs; the tensor's scale multiplies."""

    scheme: Scheme = NVFP4
    unused = ("input_scale",)

    def tensors(self, N: int, K: int) -> dict[str, Want]:
        return {
            "weight": Want(((N, -(-K // 2)),), ("U8",)),
            "weight_scale": Want(((N, groups(K, 16)),), ("F8_E4M3",)),
            "weight_scale_2": Want(((), (1,)), ("F32",)),
        }

    def codes(self, tensors: Mapping[str, Any], N: int, K: int) -> Codes:
        scale = jnp.broadcast_to(tensors["weight_scale_2"].reshape(()), (N,))
        return Codes(self.scheme, byte_nibbles(tensors["weight"])[:, :K], tensors["weight_scale"], scale=scale)


def format_of(about: Mapping[str, Any]) -> Format:
    """The layout of what `quant_algo` names.

    Raises:
        Unsupported: naming it.
    """
    kind, group = about.get("quant_algo"), about.get("group_size")
    if kind == "NVFP4" and group in (None, 16):
        return ModelOptNvfp4()
    if kind in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        return Fp8Format(Scheme("fp8", None), ("weight_scale",))
    if kind == "FP8_PB_WO":
        return Fp8Format(Scheme("fp8", 128), ("weight_scale",))
    size = f" in groups of {group}" if group else ""
    raise Unsupported(
        f"ModelOpt {kind}{size}; NVFP4 in groups of 16, FP8, FP8_PER_CHANNEL_PER_TOKEN and FP8_PB_WO can be read"
    )
