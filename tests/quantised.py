"""Weights as quantised checkpoints store them, written here from the formats' descriptions, and what they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

Tensors = dict[str, np.ndarray]
Encoded = tuple[Tensors, np.ndarray]  # tensors of a layer by name; its weight [N, K] in float64
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def words(codes: np.ndarray, axis: int) -> np.ndarray:
    """Eight codes a word, lowest bits first, along `axis`; the last word is filled with zeros."""
    codes = np.moveaxis(codes, axis, -1)
    codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % 8)])
    parts = codes.reshape(*codes.shape[:-1], -1, 8).astype(np.uint32) << np.arange(0, 32, 4, dtype=np.uint32)
    return np.ascontiguousarray(np.moveaxis(parts.sum(-1, dtype=np.uint32), -1, axis)).view(np.int32)


def _int4(rng: Any, N: int, K: int, group: int | None, dtype: Any, order: bool = False):
    """Codes, scales, zero points and the group of each input; scales and zero points [N, groups]."""
    of = np.arange(K) // (group or K)
    of = rng.permutation(of) if order else of
    shape = (N, of.max() + 1)
    scales = rng.uniform(0.01, 0.02, shape).astype(dtype)
    return rng.integers(0, 16, (N, K), np.uint8), scales, rng.integers(1, 15, shape, np.uint8), of


def _values(codes: np.ndarray, scales: np.ndarray, zeros: Any, of: np.ndarray) -> np.ndarray:
    zeros = zeros if np.isscalar(zeros) else zeros[:, of].astype(np.float64)
    return (codes - zeros) * scales.astype(np.float64)[:, of]


def pack_quantized(rng: Any, N: int, K: int, group: int | None, symmetric: bool = True, order: bool = False) -> Encoded:
    codes, scales, zeros, of = _int4(rng, N, K, group, ml_dtypes.bfloat16, order)
    out = {"weight_packed": words(codes, 1), "weight_scale": scales, "weight_shape": np.array([N, K], np.int64)}
    if not symmetric:
        out["weight_zero_point"] = words(zeros, 0)
    if order:
        out["weight_g_idx"] = of.astype(np.int32)
    return out, _values(codes, scales, 8.0 if symmetric else zeros, of)


def gptq(rng: Any, N: int, K: int, group: int, version: int, order: bool = False, symmetric: bool = False) -> Encoded:
    codes, scales, zeros, of = _int4(rng, N, K, group, np.float16, order)
    zeros = np.full_like(zeros, 8) if symmetric else zeros
    stored = zeros - 1 if version == 1 else zeros
    out = {"qweight": words(codes.T, 0), "qzeros": words(stored.T, 1), "scales": np.ascontiguousarray(scales.T)}
    return out | {"g_idx": of.astype(np.int32)}, _values(codes, scales, zeros, of)


def awq(rng: Any, N: int, K: int, group: int) -> Encoded:
    codes, scales, zeros, of = _int4(rng, N, K, group, np.float16)
    mixed = lambda x: x.reshape(x.shape[0], -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(x.shape)  # noqa: E731
    out = {"qweight": words(mixed(codes.T), 1), "qzeros": words(mixed(zeros.T), 1)}
    return out | {"scales": np.ascontiguousarray(scales.T)}, _values(codes, scales, zeros, of)


def nvfp4(rng: Any, N: int, K: int, divides: bool) -> Encoded:
    codes = rng.integers(0, 16, (N, K), np.uint8)
    scales = rng.uniform(100, 400, (N, -(-K // 16))).astype(ml_dtypes.float8_e4m3fn)
    scale = np.float32(rng.uniform(1e-5, 2e-5))
    wide = np.repeat(scales.astype(np.float64), 16, axis=1)[:, :K]
    bytes_ = np.pad(codes, ((0, 0), (0, K % 2)))
    bytes_ = bytes_[:, 0::2] | bytes_[:, 1::2] << 4
    if divides:
        out = {"weight_packed": bytes_, "weight_global_scale": np.array([1 / scale], np.float32)}
        return out | {"weight_scale": scales}, FP4[codes] * wide / np.float64(np.float32(1 / scale))
    out = {"weight": bytes_, "weight_scale_2": np.array(scale), "input_scale": np.array(0.01, np.float32)}
    return out | {"weight_scale": scales}, FP4[codes] * wide * np.float64(scale)


def fp8(rng: Any, N: int, K: int, shape: str, name: str) -> Encoded:
    codes = rng.normal(size=(N, K)).astype(ml_dtypes.float8_e4m3fn)
    down, across = -(-N // 128), -(-K // 128)
    sides = {"tensor": (), "channel": (N, 1), "blocks": (down, across)}[shape]
    scales = rng.uniform(0.01, 0.02, sides).astype(np.float32)
    wide = np.repeat(np.repeat(scales, 128, 0), 128, 1)[:N, :K] if shape == "blocks" else scales
    return {"weight": codes, name: scales}, codes.astype(np.float64) * wide


def ct(kind: str, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}
    ignore = ["lm_head", "re:^mtp.*", "re:.*gate$"]
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}, "ignore": ignore}


def _group(size: int, **more: Any) -> dict[str, Any]:
    return ct("pack-quantized", num_bits=4, type="int", strategy="group", group_size=size, **more)


_CHANNEL = ct("pack-quantized", num_bits=4, type="int", strategy="channel", symmetric=False)
_NVFP4 = ct("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)
_FLOAT8 = dict(num_bits=8, type="float")
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}

# name -> (quantization_config, encoder of an N x K layer)
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Any, int, int], Encoded]]] = {
    "ct int4 g32": (_group(32), lambda r, N, K: pack_quantized(r, N, K, 32)),
    "ct int4 g64 asymmetric": (_group(64, symmetric=False), lambda r, N, K: pack_quantized(r, N, K, 64, False)),
    "ct int4 g128": (_group(128), lambda r, N, K: pack_quantized(r, N, K, 128)),
    "ct int4 act-order": (
        _group(32, actorder="group"),
        lambda r, N, K: pack_quantized(r, N, K, 32, order=True),
    ),
    "ct int4 channel asymmetric": (_CHANNEL, lambda r, N, K: pack_quantized(r, N, K, None, False)),
    "ct nvfp4": (_NVFP4, lambda r, N, K: nvfp4(r, N, K, True)),
    "ct fp8 tensor": (
        ct("float-quantized", strategy="tensor", **_FLOAT8),
        lambda r, N, K: fp8(r, N, K, "tensor", "weight_scale"),
    ),
    "ct fp8 channel": (
        ct("float-quantized", strategy="channel", **_FLOAT8),
        lambda r, N, K: fp8(r, N, K, "channel", "weight_scale"),
    ),
    "ct fp8 blocks": (
        ct("float-quantized", strategy="block", block_structure=[128, 128], **_FLOAT8),
        lambda r, N, K: fp8(r, N, K, "blocks", "weight_scale"),
    ),
    "gptq": (_GPTQ | {"sym": False}, lambda r, N, K: gptq(r, N, K, 32, 1)),
    "gptq symmetric": (_GPTQ | {"sym": True}, lambda r, N, K: gptq(r, N, K, 32, 1, symmetric=True)),
    "gptq act-order": (_GPTQ | {"sym": False, "desc_act": True}, lambda r, N, K: gptq(r, N, K, 32, 1, order=True)),
    "gptq v2": (
        _GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"},
        lambda r, N, K: gptq(r, N, K, 32, 2),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
        lambda r, N, K: awq(r, N, K, 64),
    ),
    "modelopt nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head", "mtp*"]},
        lambda r, N, K: nvfp4(r, N, K, False),
    ),
    "modelopt fp8": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        lambda r, N, K: fp8(r, N, K, "tensor", "weight_scale"),
    ),
    "fp8 blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        lambda r, N, K: fp8(r, N, K, "blocks", "weight_scale_inv"),
    ),
    "fp8 tensor": ({"quant_method": "fp8"}, lambda r, N, K: fp8(r, N, K, "tensor", "weight_scale")),
}
