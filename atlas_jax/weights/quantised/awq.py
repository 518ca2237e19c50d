"""AWQ (AutoAWQ, version "gemm"): eight codes a word along the outputs, interleaved; zero points likewise."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from atlas_jax.shapes import Array
from atlas_jax.weights.quantised.codes import Codes, nibbles
from atlas_jax.weights.quantised.formats import FLOATS, Format, Plain, Unsupported, Want, groups, int4_scheme
from atlas_jax.weights.quantised.scheme import Scheme

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # output j of eight lies in nibble PLACES[j]


@dataclasses.dataclass(frozen=True)
class AwqFormat(Plain):
    scheme: Scheme
    unused = ()

    def tensors(self, N: int, K: int) -> dict[str, Want]:
        G = groups(K, self.scheme.group)
        return {
            "qweight": Want(((K, N // 8),), ("I32",)),
            "qzeros": Want(((G, N // 8),), ("I32",)),
            "scales": Want(((G, N),), FLOATS),
        }

    def codes(self, tensors: Mapping[str, Any], N: int, K: int) -> Codes:
        return Codes(
            self.scheme,
            _outputs(tensors["qweight"]),
            jnp.swapaxes(tensors["scales"], -1, -2),
            _outputs(tensors["qzeros"]),
        )


def _outputs(words: Array) -> Array:
    """int32 [n, N/8] -> codes [N, n]."""
    codes = nibbles(words, -1).reshape(*words.shape, 8)[..., jnp.asarray(PLACES)]
    return jnp.swapaxes(codes.reshape(words.shape[0], -1), -1, -2)


def format_of(about: Mapping[str, Any]) -> Format:
    """The layout that a `quantization_config` of quant_method "awq" describes.

    Raises:
        Unsupported: naming it.
    """
    if (version := str(about.get("version") or "gemm").lower()) != "gemm":
        raise Unsupported(f"AWQ of version {version!r}; gemm can be read")
    if not about.get("zero_point", True):
        raise Unsupported("AWQ without zero points")
    scheme = int4_scheme("AWQ", about.get("bits", about.get("w_bit")), about.get("group_size", -1), symmetric=False)
    return AwqFormat(scheme)
