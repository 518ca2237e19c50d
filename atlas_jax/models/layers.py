"""Row-wise pieces shared by all blocks: norms, rotary embedding, and parameters stacked over layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from atlas_jax.config import ModelConfig
from atlas_jax.shapes import Array, Float, Int
from atlas_jax.tensor_parallel.shares import added
from pallas_kernels.linear import linear
from pallas_kernels.w4a16 import FORMS

Initializer = Callable[..., Array]


def scaled_normal(fan_in: int) -> Initializer:
    """Initialiser for a weight that sums `fan_in` inputs."""
    return nn.initializers.normal(stddev=fan_in**-0.5)


class Block(nn.Module):
    """Base of blocks whose weights exist once per layer of a kind.

    Attributes:
        layout: "stacked" holds one array [layers, …] a weight, "layers" a tuple of arrays […] (see `RunConfig.layout`).
            Either way `project(x, weight, i)` takes layer i of it, and a `vector`'s is `vector[i]`.
        devices: how many share the layers; `config` is of one share.
    """

    config: ModelConfig
    layers: int
    dtype: jnp.dtype = jnp.dtype("float32")
    layout: str = "layers"
    devices: int = 1

    def weight(self, name: str, init: Initializer, shape: tuple[int, ...], dtype: jnp.dtype | None = None):
        """Declares a weight of `shape` for each layer."""
        dtype = self.dtype if dtype is None else dtype
        if self.layout == "stacked":
            return parameter(self, name, lambda key: init(key, (self.layers, *shape), dtype))
        split = lambda key: jax.random.split(key, self.layers)  # noqa: E731
        return parameter(self, name, lambda key: tuple(init(k, shape, dtype) for k in split(key)))

    def vector(self, name: str, init: Initializer, shape: tuple[int, ...]):
        """Declares a small float32 weight (a norm, a gate bias) of `shape` for each layer."""
        return self.weight(name, init, shape, jnp.dtype("float32"))


def project(
    x: Float[Array, "*rows D"], weight: Any, i: int | None = None, *, devices: int = 1
) -> Float[Array, "*rows N"]:
    """`x @ weight`, or layer `i` of a block's weight, in whichever form (see `pallas_kernels.linear`); rounded to `x.dtype`. Where
    `devices` have some of the inputs each, their sums are added first."""
    return added(linear(x, weight, i), devices).astype(x.dtype)


def parameter(module: nn.Module, name: str, init: Callable[[Array], Any]) -> Any:
    """Declares a weight that a checkpoint may hold in a packed form, which has shapes of its own."""
    held = module.get_variable("params", name) if module.has_variable("params", name) else None
    packed = any(isinstance(x, FORMS) for x in jax.tree.leaves(held, is_leaf=lambda x: isinstance(x, FORMS)))
    return held if packed else module.param(name, init)


def rms_norm(x: Float[Array, "*rows D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*rows D"]:
    """Zero-centred RMSNorm: float32 throughout, scale 1 + weight, one rounding at the end."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * (1.0 + weight)).astype(x.dtype)


def gated_rms_norm(
    x: Float[Array, "*rows D"], weight: Float[Array, " D"], gate: Float[Array, "*rows D"], eps: float
) -> Float[Array, "*rows D"]:
    """RMSNorm of the recurrence's float32 output, plain weight, times SiLU of `gate`; rounded where the reference model rounds."""
    dtype = gate.dtype
    y = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    y = y.astype(dtype) * weight.astype(dtype)
    return (y.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))).astype(dtype)


def rotate(
    x: Float[Array, "*rows H Dh"], positions: Int[Array, "*rows"], rotary_dim: int, theta: float
) -> Float[Array, "*rows H Dh"]:
    """Rotary embedding (Su et al., 2021) of the first `rotary_dim` components, halves paired; the rest passes through."""
    half = rotary_dim // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b, rest = x[..., :half], x[..., half:rotary_dim], x[..., rotary_dim:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
