"""The full-attention mixer: grouped queries with an output gate, normalised queries and keys, partial rotary embedding."""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from atlas_jax.models.layers import Block, project, rms_norm, rotate, scaled_normal
from atlas_jax.shapes import Array, Float, Int


class Projected(NamedTuple):
    """What a row's input projection yields; queries and keys are normalised and rotated."""

    q: Float[Array, "*rows H Dh"]
    gate: Float[Array, "*rows H Dh"]
    k: Float[Array, "*rows Hkv Dh"]
    v: Float[Array, "*rows Hkv Dh"]


class Attention(Block):
    """Row-wise halves of the mixer; the attention between them is `pallas_kernels.paged_attention`."""

    def setup(self) -> None:
        c = self.config
        width = (2 * c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim
        self.in_proj = self.weight("in_proj", scaled_normal(c.hidden_size), (c.hidden_size, width))
        self.norms = self.vector("norms", nn.initializers.zeros, (2, c.head_dim))  # of queries and of keys
        inner = c.num_attention_heads * c.head_dim
        self.out_proj = self.weight("out_proj", scaled_normal(inner), (inner, c.hidden_size))

    def project(self, x: Float[Array, "*rows D"], positions: Int[Array, "*rows"], i: int) -> Projected:
        """Input projection of layer `i`; a head's query and gate lie beside each other in the weight."""
        c = self.config
        H, Hkv, Dh = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        qg, k, v = jnp.split(project(x, self.in_proj, i), [2 * H * Dh, (2 * H + Hkv) * Dh], axis=-1)
        q, gate = jnp.split(qg.reshape(*x.shape[:-1], H, 2 * Dh), 2, axis=-1)
        k, v = (y.reshape(*x.shape[:-1], Hkv, Dh) for y in (k, v))
        q, k = (rms_norm(y, norm, c.rms_norm_eps) for y, norm in zip((q, k), self.norms[i], strict=True))
        q, k = (rotate(y, positions, c.rotary_dim, c.rope_theta) for y in (q, k))
        return Projected(q, gate, k, v)

    def finish(
        self, out: Float[Array, "*rows H Dh"], gate: Float[Array, "*rows H Dh"], i: int
    ) -> Float[Array, "*rows D"]:
        """Output gate, then the output projection of layer `i`."""
        y = out * jax.nn.sigmoid(gate)
        return project(y.reshape(*y.shape[:-2], -1), self.out_proj, i, devices=self.devices)


def causal_attention(
    q: Float[Array, "B T H Dh"], k: Float[Array, "B T Hkv Dh"], v: Float[Array, "B T Hkv Dh"]
) -> Float[Array, "B T H Dh"]:
    """Attention of whole sequences without a cache, for training."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)
