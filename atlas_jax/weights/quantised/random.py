"""Random quantised weights for a model's shape, made on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from atlas_jax.config import ModelConfig
from atlas_jax.shapes import Array
from atlas_jax.weights.quantised.scheme import BLOCKS, Scheme
from pallas_kernels.w4a16 import Fp8, Int4, Nvfp4, Packed, SideBySide
from pallas_kernels.w4a16.pack import padded


def random_quantised(
    config: ModelConfig, scheme: Scheme, head: bool, shapes: Any, plain: Callable[[Array], Any], key: Array
) -> dict[str, Any]:
    """The tree `shapes` with packed weights in the place of those that `BLOCKS` names, and of the head where `head` says so.

    Args:
        plain: makes the whole tree of plain weights from a key. What is quantised is not computed.
    """

    def replaced(path: Any, leaf: Any) -> bool:
        keys = [p.key for p in path[1:] if hasattr(p, "key")]
        return (keys == ["head"] and head) or (len(keys) == 2 and keys[1] in BLOCKS.get(keys[0], ()))

    leaves, tree = jax.tree.flatten_with_path(shapes)
    wanted = [replaced(path, leaf) for path, leaf in leaves]
    kept = jax.jit(lambda key: [x for x, packed in zip(jax.tree.leaves(plain(key)), wanted, strict=True) if not packed])
    rest = iter(kept(key))
    keys = jax.random.split(key, len(leaves))
    out = []
    for (path, leaf), packed, at in zip(leaves, wanted, keys, strict=True):
        if not packed:
            out.append(next(rest))
            continue
        names = [p.key for p in path[1:] if hasattr(p, "key")]
        small = 2 * config.linear_num_value_heads if names == ["linear_attention", "in_proj"] else 0
        out.append(_weight(scheme, leaf.shape, small, leaf.dtype)(at))
    return jax.tree.unflatten(tree, out)


@functools.cache
def _weight(scheme: Scheme, shape: tuple[int, ...], small: int, dtype: Any) -> Callable[[Array], Any]:
    """Makes a weight of `shape`, whose last `small` outputs are not quantised."""
    *lead, K, N = shape

    def make(key: Array) -> Any:
        packed = random_packed(scheme, (*lead, K, N - small), key)
        if not small:
            return packed
        rest = jax.random.normal(jax.random.fold_in(key, 1), (*lead, K, small), jnp.float32) * K**-0.5
        return SideBySide((packed, rest.astype(dtype)))

    return jax.jit(make)


def random_packed(scheme: Scheme, shape: tuple[int, ...], key: Array) -> Packed:
    """A packed weight of `shape` [..., K, N], whose values have about the deviation K^-½."""
    *lead, K, N = shape
    P, codes_key, scales_key = padded(K), *jax.random.split(key)
    uniform = lambda shape: jax.random.uniform(scales_key, shape, jnp.float32, 0.5, 1.5) * K**-0.5  # noqa: E731
    if scheme.kind == "fp8":
        bits = jax.random.bits(codes_key, (*lead, P // 128, N, 128), jnp.uint8)
        codes = (bits & 0x80) | 0x30 | (bits & 7)  # ± 0.5 … 0.94: no NaN among them
        return Fp8(codes, uniform((*lead, 1 if scheme.group is None else P // 128, N)) / 0.7)
    codes = jax.random.bits(codes_key, (*lead, P // 128, N, 64), jnp.uint8)
    if scheme.kind == "nvfp4":
        scales = jax.random.bits(scales_key, (*lead, P // 16, N), jnp.uint8) & 7 | 0x38  # 1 … 1.875
        return Nvfp4(codes, scales, uniform((*lead, N)) / 4.4)
    scales = uniform((*lead, P // (scheme.group or 128), N)) / 4.6
    zeros = None if scheme.symmetric else jnp.full(scales.shape, 8, jnp.uint8)
    return Int4(codes, scales.astype(jnp.bfloat16), zeros)
