"""The linear-attention mixer: short causal convolution, gated delta rule, gated norm (Yang et al., 2024)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from atlas_jax.models.layers import Block, Initializer, gated_rms_norm, project, scaled_normal
from atlas_jax.shapes import Array, Float
from pallas_kernels import gated_delta


class Rows(NamedTuple):
    """What a row's input projection yields, as it comes: queries, keys, values, output gate, write strength, decay."""

    projected: Float[Array, "*rows width"]

    @property
    def gate(self) -> Float[Array, "*rows width"]:
        """The whole row: cut out here, the gate would be copied."""
        return self.projected


class Projected(NamedTuple):
    """A row's input projection in parts."""

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
        # Side by side: a_log [Hv] and dt_bias [Hv], which make the decay, and the output's norm [Dv].
        self.vectors = self.vector("vectors", _initial_vectors(heads), (2 * heads + c.linear_value_head_dim,))
        self.out_proj = self.weight("out_proj", scaled_normal(c.value_size), (c.value_size, c.hidden_size))

    def project(self, x: Float[Array, "*rows D"], i: int) -> Projected:
        """Input projection of layer `i`. Decay and write strength are float32 whatever the weights are."""
        c = self.config
        out = project(x, self.in_proj, i)
        mixed, _, b, a = jnp.split(
            out, [c.conv_channels, c.conv_channels + c.value_size, out.shape[-1] - c.linear_num_value_heads], axis=-1
        )
        log_decay, beta = gated_delta.gates(a, b, *jnp.split(self.vectors[i][: 2 * c.linear_num_value_heads], 2))
        return Projected(mixed, self._gate(out), log_decay, jnp.exp(log_decay), beta)

    def project_rows(self, x: Float[Array, "*rows D"], i: int) -> Rows:
        """Input projection of layer `i` for `gated_delta.step`, which takes it as it comes."""
        return Rows(project(x, self.in_proj, i))

    def convolve(self, windows: Float[Array, "*rows W C"], i: int) -> tuple[Array, Array, Array]:
        """From rows' windows, oldest input first: float32 queries [..., Hk, Dk] (unit length, scaled), keys (unit length)
        and values [..., Hv, Dv]."""
        c = self.config
        keys, values = (
            (c.linear_num_key_heads, c.linear_key_head_dim),
            (c.linear_num_value_heads, c.linear_value_head_dim),
        )
        return gated_delta.convolve(windows, self.conv[i], *keys, *values)

    def mixer(self) -> gated_delta.Mixer:
        """The weights that `gated_delta.step` applies, of all layers in one array each (layout "stacked")."""
        stacked: Any = self.conv, self.vectors
        return gated_delta.Mixer(*stacked)

    def finish(
        self, out: Float[Array, "*rows Hv Dv"], gate: Float[Array, "*rows Hv Dv"] | Float[Array, "*rows width"], i: int
    ) -> Float[Array, "*rows D"]:
        """Gated norm a head, then the output projection of layer `i`. `gate` may be the row that has it (`project_rows`)."""
        gate = gate if gate.ndim == out.ndim else self._gate(gate)
        norm = self.vectors[i][2 * self.config.linear_num_value_heads :]
        y = gated_rms_norm(out, norm, gate, self.config.rms_norm_eps)
        return project(y.reshape(*y.shape[:-2], -1), self.out_proj, i, devices=self.devices)

    def _gate(self, projected: Float[Array, "*rows width"]) -> Float[Array, "*rows Hv Dv"]:
        c = self.config
        gate = projected[..., c.conv_channels : c.conv_channels + c.value_size]
        return gate.reshape(*gate.shape[:-1], c.linear_num_value_heads, c.linear_value_head_dim)


def _initial_vectors(heads: int) -> Initializer:
    def init(key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        """Of [..., 2 heads + Dv]: logarithms of 1 … 16, and ones."""
        a_log = jnp.log(jax.random.uniform(key, (*shape[:-1], heads), dtype, 1.0, 16.0))
        return jnp.concatenate([a_log, jnp.ones((*shape[:-1], shape[-1] - heads), dtype)], axis=-1)

    return init
