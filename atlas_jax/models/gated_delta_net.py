"""The linear-attention mixer: short causal convolution, gated delta rule, gated norm (Yang et al., 2024)."""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from atlas_jax.models.layers import Block, gated_rms_norm, project, scaled_normal, unit_length
from atlas_jax.shapes import Array, Float


class Projected(NamedTuple):
    """What a row's input projection yields."""

    mixed: Float[Array, "*rows C"]  # queries, keys and values before the convolution
    gate: Float[Array, "*rows Hv Dv"]
    log_decay: Float[Array, "*rows Hv"]  # float32
    decay: Float[Array, "*rows Hv"]  # its exponential
    beta: Float[Array, "*rows Hv"]  # float32


class GatedDeltaNet(Block):
    """Row-wise halves of the mixer; the recurrence between them is `pallas_kernels.gated_delta`."""

    def setup(self) -> None:
        c = self.config
        heads, width = c.linear_num_value_heads, c.conv_channels + c.value_size + 2 * c.linear_num_value_heads
        self.in_proj = self.weight("in_proj", scaled_normal(c.hidden_size), (c.hidden_size, width))
        self.conv = self.weight(
            "conv", scaled_normal(c.linear_conv_kernel_dim), (c.linear_conv_kernel_dim, c.conv_channels)
        )
        self.a_log = self.vector(
            "a_log", lambda key, shape, dtype: jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0)), (heads,)
        )
        self.dt_bias = self.vector("dt_bias", nn.initializers.ones, (heads,))
        self.norm = self.vector("norm", nn.initializers.ones, (c.linear_value_head_dim,))
        self.out_proj = self.weight("out_proj", scaled_normal(c.value_size), (c.value_size, c.hidden_size))

    def project(self, x: Float[Array, "*rows D"], i: int) -> Projected:
        """Input projection of layer `i`. Decay and write strength are float32 whatever the weights are."""
        c = self.config
        out = project(x, self.in_proj[i])
        mixed, gate, b, a = jnp.split(
            out, [c.conv_channels, c.conv_channels + c.value_size, out.shape[-1] - c.linear_num_value_heads], axis=-1
        )
        gate = gate.reshape(*x.shape[:-1], c.linear_num_value_heads, c.linear_value_head_dim)
        log_decay = -jnp.exp(self.a_log[i]) * jax.nn.softplus(a.astype(jnp.float32) + self.dt_bias[i])
        return Projected(mixed, gate, log_decay, jnp.exp(log_decay), jax.nn.sigmoid(b).astype(jnp.float32))

    def convolve(self, windows: Float[Array, "*rows W C"], i: int) -> tuple[Array, Array, Array]:
        """From rows' windows, oldest input first: float32 queries [..., Hk, Dk] (unit length, scaled), keys (unit length)
        and values [..., Hv, Dv]."""
        c = self.config
        y = jnp.sum(windows.astype(jnp.float32) * self.conv[i].astype(jnp.float32), axis=-2).astype(windows.dtype)
        y = jax.nn.silu(y).astype(jnp.float32)
        q, k, v = jnp.split(y, [c.key_size, 2 * c.key_size], axis=-1)
        rows = y.shape[:-1]
        q, k = (unit_length(x.reshape(*rows, c.linear_num_key_heads, c.linear_key_head_dim)) for x in (q, k))
        return q * c.linear_key_head_dim**-0.5, k, v.reshape(*rows, c.linear_num_value_heads, c.linear_value_head_dim)

    def finish(
        self, out: Float[Array, "*rows Hv Dv"], gate: Float[Array, "*rows Hv Dv"], i: int
    ) -> Float[Array, "*rows D"]:
        """Gated norm a head, then the output projection of layer `i`."""
        y = gated_rms_norm(out, self.norm[i], gate, self.config.rms_norm_eps)
        return project(y.reshape(*y.shape[:-2], -1), self.out_proj[i])
