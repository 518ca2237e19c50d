"""compressed-tensors (llm-compressor, vLLM): `pack-quantized` int4, `nvfp4-pack-quantized`, `float-quantized` FP8."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from atlas_jax.shapes import Array
from atlas_jax.weights.quantised.codes import Codes, nibbles
from atlas_jax.weights.quantised.formats import FLOATS, Format, Plain, Unsupported, Want, boolean, groups, int4_scheme
from atlas_jax.weights.quantised.fp8 import Fp8Format
from atlas_jax.weights.quantised.scheme import NVFP4, Scheme


@dataclasses.dataclass(frozen=True)
class PackQuantized:
    """Eight codes a word along the inputs, stored with 8 added; zero points, if any, along the outputs, and 8 added too."""

    scheme: Scheme
    ordered: bool = False  # groups may be of scattered inputs, as weight_g_idx says
    unused = ("input_scale", "input_global_scale")

    def tensors(self, N: int, K: int) -> dict[str, Want]:
        G = groups(K, self.scheme.group)
        out = {
            "weight_packed": Want(((N, -(-K // 8)),), ("I32",)),
            "weight_scale": Want(((N, G),), FLOATS),
            "weight_shape": Want(((2,),), ("I64", "I32")),
        }
        if not self.scheme.symmetric:
            out["weight_zero_point"] = Want(((-(-N // 8), G),), ("I32",))
        if self.ordered:
            out["weight_g_idx"] = Want(((K,),), ("I32", "I64"))
        return out

    def prepare(self, tensors: dict[str, np.ndarray], N: int, K: int) -> dict[str, np.ndarray]:
        tensors = dict(tensors)
        if (shape := tensors.pop("weight_shape").tolist()) != [N, K]:
            raise ValueError(f"weight_shape says {shape}, by config.json it is {[N, K]}")
        g_idx = tensors.pop("weight_g_idx", None)
        order = None if g_idx is None or (g_idx < 0).all() else order_of(g_idx, self.scheme.group, K)
        return tensors if order is None else tensors | {"order": order}

    def codes(self, tensors: Mapping[str, Any], N: int, K: int) -> Codes:
        zeros, order = tensors.get("weight_zero_point"), tensors.get("order")
        return Codes(
            self.scheme,
            in_order(nibbles(tensors["weight_packed"], -1)[:, :K], order),
            tensors["weight_scale"],
            None if zeros is None else nibbles(zeros, -2)[:N],
            order,
        )


def order_of(g_idx: np.ndarray, group: int | None, K: int) -> np.ndarray | None:
    """Inputs sorted by group, or None where they lie sorted.

    Raises:
        ValueError: the groups are not of `group` inputs each (the last may have fewer).
    """
    size = group or K
    if not np.array_equal(np.sort(g_idx), np.arange(K) // size):
        raise ValueError(f"g_idx does not put {size} inputs into each group; such weights cannot be read exactly")
    order = np.argsort(g_idx, kind="stable").astype(np.int32)
    return None if np.array_equal(order, np.arange(K)) else order


def in_order(codes: Array, order: Array | None) -> Array:
    """Codes [N, K], which files keep in the inputs' own order, group by group."""
    return codes if order is None else jnp.take(codes, order, axis=-1)


@dataclasses.dataclass(frozen=True)
class Nvfp4Packed(Plain):
    """Two codes a byte along the inputs; the tensor's scale divides."""

    scheme: Scheme = NVFP4
    unused = ("input_global_scale", "input_scale")

    def tensors(self, N: int, K: int) -> dict[str, Want]:
        return {
            "weight_packed": Want(((N, -(-K // 2)),), ("U8",)),
            "weight_scale": Want(((N, groups(K, 16)),), ("F8_E4M3",)),
            "weight_global_scale": Want(((1,), ()), ("F32", "BF16", "F16")),
        }

    def codes(self, tensors: Mapping[str, Any], N: int, K: int) -> Codes:
        scale = 1 / tensors["weight_global_scale"].astype(jnp.float32).reshape(())
        codes = byte_nibbles(tensors["weight_packed"])[:, :K]
        return Codes(self.scheme, codes, tensors["weight_scale"], scale=jnp.broadcast_to(scale, (N,)), rounded=True)


def byte_nibbles(data: Any) -> Any:
    """Bytes [N, K/2] -> codes [N, K], the low half first."""
    return jnp.stack([data & 15, data >> 4], axis=-1).reshape(data.shape[0], -1)


def format_of(group: Mapping[str, Any], kind: str) -> Format:
    """The layout of a config group, whose `format` goes before the checkpoint's, `kind`.

    Raises:
        Unsupported: naming it.
    """
    kind = group.get("format") or kind
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise Unsupported(f"compressed-tensors {kind} without a description of weights")
    bits, form, strategy = (weights.get(key) for key in ("num_bits", "type", "strategy"))
    what = f"compressed-tensors {kind} ({form} {bits} bits, {strategy})"
    symmetric = boolean(what, weights, "symmetric")
    if weights.get("dynamic") not in (None, False):
        raise Unsupported(f"{what}, quantised anew in every step (dynamic {weights['dynamic']!r:.100})")
    if kind == "pack-quantized" and form == "int":
        if strategy not in ("group", "channel"):
            raise Unsupported(what)
        size = weights.get("group_size") if strategy == "group" else None
        scheme = int4_scheme(f"compressed-tensors {kind}", bits, size, symmetric)
        return PackQuantized(scheme, weights.get("actorder") in ("group", "dynamic", True))
    if kind == "nvfp4-pack-quantized" and (form, bits, strategy, weights.get("group_size")) == (
        "float",
        4,
        "tensor_group",
        16,
    ):
        if symmetric and weights.get("scale_dtype") in (None, "torch.float8_e4m3fn"):
            return Nvfp4Packed()
        raise Unsupported(f"{what}, asymmetric or with other scales than E4M3")
    if kind in ("float-quantized", "naive-quantized") and (form, bits) == ("float", 8) and symmetric:
        if strategy in ("tensor", "channel"):
            return Fp8Format(Scheme("fp8", None), ("weight_scale",))
        if strategy == "block" and weights.get("block_structure") in ([128, 128], "128x128"):
            return Fp8Format(Scheme("fp8", 128), ("weight_scale",))
    raise Unsupported(what)
