"""GPTQ (AutoGPTQ, GPTQModel): eight codes a word along the inputs, zero points along the outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from atlas_jax.weights.quantised.codes import Codes, nibbles
from atlas_jax.weights.quantised.compressed_tensors import in_order, order_of
from atlas_jax.weights.quantised.formats import FLOATS, Format, Unsupported, Want, boolean, groups, int4_scheme
from atlas_jax.weights.quantised.scheme import Scheme


@dataclasses.dataclass(frozen=True)
class GptqFormat:
    """`offset` is 1 in the first version of the format, which stores zero points less one, and 0 in the second."""

    scheme: Scheme
    offset: int
    unused = ()

    def tensors(self, N: int, K: int) -> dict[str, Want]:
        G = groups(K, self.scheme.group)
        return {
            "qweight": Want(((-(-K // 8), N),), ("I32",)),
            "qzeros": Want(((G, -(-N // 8)),), ("I32",)),
            "scales": Want(((G, N),), FLOATS),
            "g_idx": Want(((K,),), ("I32", "I64")),
        }

    def prepare(self, tensors: dict[str, np.ndarray], N: int, K: int) -> dict[str, np.ndarray]:
        tensors = dict(tensors)
        if (order := order_of(tensors.pop("g_idx"), self.scheme.group, K)) is not None:
            tensors["order"] = order
        stored = np.asarray(tensors["qzeros"]).view(np.uint32)
        zeros = (stored[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).reshape(len(stored), -1)[:, :N]
        if self.offset and (zeros == 15).any():
            raise ValueError(
                "a zero point is stored as 15, which readers of this version of GPTQ take for 16 or for 0; write the "
                "checkpoint as gptq_v2"
            )
        if self.scheme.symmetric:
            if (zeros + self.offset != 8).any():
                raise ValueError("its zero points are not all 8, though quantization_config says sym")
            del tensors["qzeros"]
        return tensors

    def codes(self, tensors: Mapping[str, Any], N: int, K: int) -> Codes:
        zeros, order = tensors.get("qzeros"), tensors.get("order")
        return Codes(
            self.scheme,
            in_order(jnp.swapaxes(nibbles(tensors["qweight"], -2)[:K], -1, -2), order),
            jnp.swapaxes(tensors["scales"], -1, -2),
            None if zeros is None else jnp.swapaxes(nibbles(zeros, -1)[:, :N] + jnp.uint8(self.offset), -1, -2),
            order,
        )


def format_of(about: Mapping[str, Any], changes: Mapping[str, Any]) -> Format:
    """The layout that a `quantization_config` of quant_method "gptq" describes, with a module's `changes` to it.

    Raises:
        Unsupported: naming it.
    """
    about = {**about, **changes}
    version = about.get("checkpoint_format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise Unsupported(f"GPTQ of checkpoint_format {version!r}; gptq and gptq_v2 can be read")
    symmetric = boolean("GPTQ", about, "sym")
    scheme = int4_scheme("GPTQ", about.get("bits"), about.get("group_size", -1), symmetric)
    return GptqFormat(scheme, int(version == "gptq"))
