"""FP8: E4M3 codes as they are, with one scale, one for each output, or one for each block of 128 x 128. The scale multiplies."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from atlas_jax.weights.quantised.codes import Codes
from atlas_jax.weights.quantised.formats import Format, Unsupported, Want
from atlas_jax.weights.quantised.scheme import Scheme

BLOCK = 128


@dataclasses.dataclass(frozen=True)
class Fp8Format:
    """`names` are the names that the scale may have."""

    scheme: Scheme
    names: tuple[str, ...]
    unused = ("input_scale", "input_activation_scale")

    def tensors(self, N: int, K: int) -> dict[str, Want]:
        down, across = -(-N // BLOCK), -(-K // BLOCK)
        blocks = ((down, across), (down, 1, across, 1))
        shapes = blocks if self.scheme.group else ((), (1,), (1, 1), (N,), (N, 1))
        return {
            "weight": Want(((N, K),), ("F8_E4M3",)),
            "|".join(self.names): Want(shapes, ("F32", "BF16", "F16", "F8_E8M0")),
        }

    def prepare(self, tensors: dict[str, np.ndarray], N: int, K: int) -> dict[str, np.ndarray]:
        (name,) = set(tensors) - {"weight"}
        return {"weight": tensors["weight"], "scale": np.asarray(tensors[name]).astype(np.float32)}

    def codes(self, tensors: Mapping[str, Any], N: int, K: int) -> Codes:
        scale = tensors["scale"]
        if self.scheme.group:
            scale = jnp.repeat(scale.reshape(-(-N // BLOCK), -1), BLOCK, axis=0)[:N]
        else:
            scale = jnp.broadcast_to(scale.reshape(-1, 1), (N, 1))
        return Codes(self.scheme, tensors["weight"], scale)


def format_of(about: Mapping[str, Any]) -> Format:
    """The layout that a `quantization_config` of quant_method "fp8" describes.

    Raises:
        Unsupported: naming it.
    """
    if (form := about.get("fmt") or "e4m3") != "e4m3":
        raise Unsupported(f"fp8 {form}; e4m3 can be read")
    size = about.get("weight_block_size")
    if size not in (None, [BLOCK, BLOCK]):
        raise Unsupported(f"fp8 in blocks of {size}; blocks of [128, 128] can be read")
    return Fp8Format(Scheme("fp8", BLOCK if size else None), ("weight_scale_inv", "weight_scale"))
