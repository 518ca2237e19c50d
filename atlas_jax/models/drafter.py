"""The multi-token-prediction drafter (DeepSeek-V3 report, 2024, section 2.2, in Qwen's form): one full-attention layer that reads
the embedding of the newest token and the target's hidden before it."""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp

from atlas_jax.config import ModelConfig
from atlas_jax.models.attention import Attention, Projected
from atlas_jax.models.feed_forward import feed_forward
from atlas_jax.models.layers import parameter, project, rms_norm, scaled_normal
from atlas_jax.shapes import Array, Float, Int


class DrafterNorms(NamedTuple):
    """The drafter's norms of width D, which lie with the target's in one array."""

    embedding: Float[Array, " D"]
    hidden: Float[Array, " D"]
    input: Float[Array, " D"]
    post: Float[Array, " D"]
    final: Float[Array, " D"]


class MtpDrafter(nn.Module):
    """x = fc([norm(embedding); norm(hidden)]) -> decoder layer -> norm. Embedding and head are the target's."""

    config: ModelConfig
    dtype: jnp.dtype = jnp.dtype("float32")
    layout: str = "layers"
    devices: int = 1

    def setup(self) -> None:
        D = self.config.hidden_size
        self.fc = parameter(self, "fc", lambda key: scaled_normal(2 * D)(key, (2 * D, D), self.dtype))
        self.attention = Attention(self.config, 1, self.dtype, self.layout, self.devices)
        self.feed_forward = feed_forward(self.config)(self.config, 1, self.dtype, self.layout, self.devices)

    def _norm(self, x: Array, weight: Array) -> Array:
        return rms_norm(x, weight, self.config.rms_norm_eps)

    def mix(
        self, norms: DrafterNorms, embedded: Float[Array, "*rows D"], hidden: Float[Array, "*rows D"]
    ) -> Float[Array, "*rows D"]:
        """The layer's input."""
        both = [self._norm(embedded, norms.embedding), self._norm(hidden, norms.hidden)]
        return project(jnp.concatenate(both, axis=-1), self.fc)

    def enter(
        self,
        norms: DrafterNorms,
        embedded: Float[Array, "*rows D"],
        hidden: Float[Array, "*rows D"],
        positions: Int[Array, "*rows"],
    ) -> tuple[Float[Array, "*rows D"], Projected]:
        """The layer's residual input and the projections of its attention."""
        x = self.mix(norms, embedded, hidden)
        return x, self.attention.project(self._norm(x, norms.input), positions, 0)

    def leave(
        self,
        norms: DrafterNorms,
        x: Float[Array, "R D"],
        out: Float[Array, "R H Dh"],
        gate: Float[Array, "R H Dh"],
        *,
        few_rows: bool,
    ) -> Float[Array, "R D"]:
        """From attention's output to the normed hidden, which is both the next step's hidden and the head's input."""
        x = x + self.attention.finish(out, gate, 0)
        x = x + self.feed_forward(self._norm(x, norms.post), 0, few_rows=few_rows)
        return self._norm(x, norms.final)

    def keys_values(
        self,
        norms: DrafterNorms,
        embedded: Float[Array, "T D"],
        hidden: Float[Array, "T D"],
        positions: Int[Array, " T"],
    ) -> tuple[Float[Array, "T Hkv Dh"], Float[Array, "T Hkv Dh"]]:
        """Keys and values of prompt rows: all that the drafter needs of them."""
        _, p = self.enter(norms, embedded, hidden, positions)
        return p.k, p.v
