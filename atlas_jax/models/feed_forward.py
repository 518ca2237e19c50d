"""Feed-forward blocks: a dense SwiGLU, and a router over experts with a gated shared expert."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from atlas_jax.config import ModelConfig
from atlas_jax.models.layers import Block, project, scaled_normal
from atlas_jax.shapes import Array, Float, Int
from atlas_jax.tensor_parallel.shares import added
from pallas_kernels import linear


def swiglu(x: Float[Array, "*rows D"], gate_up: Any, down: Any, i: int) -> Float[Array, "*rows D"]:
    """down(silu(gate) * up) of layer `i`, gate and up side by side in one weight; float32."""
    return linear.linear(gated(project(x, gate_up, i)), down, i)


def gated(gate_up: Float[Array, "*rows both"]) -> Float[Array, "*rows inner"]:
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


class DenseFeedForward(Block):
    """SwiGLU (Shazeer, 2020)."""

    def setup(self) -> None:
        D, inner = self.config.hidden_size, self.config.intermediate_size
        self.gate_up = self.weight("gate_up", scaled_normal(D), (D, 2 * inner))
        self.down = self.weight("down", scaled_normal(inner), (inner, D))

    def __call__(self, x: Float[Array, "R D"], i: int, *, few_rows: bool) -> Float[Array, "R D"]:
        return added(swiglu(x, self.gate_up, self.down, i), self.devices).astype(x.dtype)


class MoeFeedForward(Block):
    """Softmax router over all experts, the best k summed in order of rank, plus a shared expert behind a sigmoid gate."""

    def setup(self) -> None:
        c = self.config
        D, E, inner, shared = c.hidden_size, c.num_experts, c.moe_intermediate_size, c.shared_expert_intermediate_size
        self.router = self.weight("router", scaled_normal(D), (D, E))
        self.gate_up = self.weight("gate_up", scaled_normal(D), (E, D, 2 * inner))
        self.down = self.weight("down", scaled_normal(inner), (E, inner, D))
        self.shared_gate_up = self.weight("shared_gate_up", scaled_normal(D), (D, 2 * shared))
        self.shared_down = self.weight("shared_down", scaled_normal(shared), (shared, D))
        self.shared_gate = self.weight("shared_gate", scaled_normal(D), (D, 1))

    def __call__(self, x: Float[Array, "R D"], i: int, *, few_rows: bool) -> Float[Array, "R D"]:
        """Rows x of layer `i`. `few_rows` reads each row's experts alone (decode: bits independent of the other rows);
        otherwise rows are sorted by expert for one grouped product."""
        weights, experts = self.route(x, i)
        # A device's sums are of its share of each expert: they are rounded once all are added.
        dtype = x.dtype if self.devices == 1 else jnp.dtype("float32")
        routed = self._by_pair(x, experts, i, dtype) if few_rows else self._grouped(x, experts, i, dtype)
        out = routed[:, 0] * weights[:, :1]
        for rank in range(1, weights.shape[1]):
            out = out + routed[:, rank] * weights[:, rank : rank + 1]
        shared = swiglu(x, self.shared_gate_up, self.shared_down, i).astype(dtype)
        out = out + jax.nn.sigmoid(project(x, self.shared_gate, i)) * shared
        return added(out, self.devices).astype(x.dtype)

    def route(self, x: Float[Array, "R D"], i: int) -> tuple[Float[Array, "R k"], Int[Array, "R k"]]:
        """Weights (in `x.dtype`) and ids of the chosen experts, best first."""
        probabilities = jax.nn.softmax(project(x, self.router, i).astype(jnp.float32), axis=-1)
        weights, experts = jax.lax.top_k(probabilities, self.config.num_experts_per_tok)
        if self.config.norm_topk_prob:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return weights.astype(x.dtype), experts

    def _by_pair(self, x: Array, experts: Array, i: int, dtype: jnp.dtype) -> Array:
        product = lambda a, w: linear.by_expert(a, w, experts, i)  # noqa: E731
        return product(gated(product(x, self.gate_up).astype(x.dtype)), self.down).astype(dtype)

    def _grouped(self, x: Array, experts: Array, i: int, dtype: jnp.dtype) -> Array:
        k = experts.shape[1]
        order = jnp.argsort(experts.reshape(-1), stable=True)
        sizes = jnp.bincount(experts.reshape(-1), length=self.config.num_experts).astype(jnp.int32)
        product = lambda a, w: linear.grouped(a, w, sizes, i)  # noqa: E731
        out = product(gated(product(x[order // k], self.gate_up).astype(x.dtype)), self.down).astype(dtype)
        place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size))
        return out[place].reshape(x.shape[0], k, -1)


def feed_forward(config: ModelConfig) -> type[DenseFeedForward] | type[MoeFeedForward]:
    """The block that `config` asks for."""
    return MoeFeedForward if config.num_experts else DenseFeedForward
