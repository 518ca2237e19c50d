"""Small random models for tests, one for each family of feed-forward and head ratio, and jitted steps over them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax import state as states
from atlas_jax.config import FULL, LINEAR, ModelConfig, RunConfig
from atlas_jax.models import HybridModel
from atlas_jax.settings import compiler_options
from atlas_jax.weights.presets import random_params

_COMMON: dict[str, Any] = dict(
    vocab_size=96,
    hidden_size=64,
    layer_types=(LINEAR, LINEAR, FULL),
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    linear_num_key_heads=1,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    max_position_embeddings=1024,
    mtp_num_hidden_layers=1,
)
_EXPERTS: dict[str, Any] = dict(
    num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=40
)
CONFIGS = {
    "dense": ModelConfig(
        model_type="qwen3_5", linear_num_value_heads=3, intermediate_size=96, tie_word_embeddings=True, **_COMMON
    ),
    "moe": ModelConfig(model_type="qwen3_5_moe", linear_num_value_heads=2, **_EXPERTS, **_COMMON),
    "next": ModelConfig(model_type="qwen3_next", linear_num_value_heads=4, norm_topk_prob=False, **_EXPERTS, **_COMMON),
}
RUN = RunConfig(slots=4, max_length=160, max_drafts=16, row_group=4, page_size=32, prefill_chunk=32)
if jax.default_backend() == "gpu":  # the same tests, run with the kernels
    RUN = dataclasses.replace(RUN, row_group=16, layout="stacked")


def params_of(config: ModelConfig, run: RunConfig, seed: int = 0) -> Any:
    """Random parameters, with norms and gates away from their neutral values."""
    model = model_of(config, run)

    def touch(model: HybridModel) -> None:
        """Uses every weight once, which is what creates it."""
        D = config.hidden_size
        heads = (config.num_attention_heads, config.head_dim)
        x = jnp.zeros((1, D), model.dtype)
        model.logits(model.forward(jnp.zeros((1, 2), jnp.int32)).post_norm)
        model.mtp.keys_values(model.drafter_norms, x, x, jnp.zeros(1, jnp.int32))
        model.mtp.leave(
            model.drafter_norms,
            x,
            jnp.zeros((1, *heads), model.dtype),
            jnp.zeros((1, *heads), model.dtype),
            few_rows=True,
        )

    params = jax.jit(functools.partial(model.init, method=touch))(jax.random.key(seed))
    leaves, tree = jax.tree.flatten_with_path(params)

    def vary(path: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        return x + 0.1 * jax.random.normal(key, x.shape, x.dtype) if "norm" in name or "vectors" in name else x

    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    return jax.tree.unflatten(tree, [vary(path, x, key) for (path, x), key in zip(leaves, keys, strict=True)])


def model_of(config: ModelConfig, run: RunConfig) -> HybridModel:
    return HybridModel(config, dtype=jnp.dtype(run.dtype), layout=run.layout, row_group=run.row_group)


class Steps:
    """Jitted verify, commit, prefill, … of one model; states are donated as decoding donates them."""

    def __init__(self, config: ModelConfig, run: RunConfig, params: Any = None) -> None:
        self.config, self.run = config, run
        self.model = model_of(config, run)
        self.params = params_of(config, run) if params is None else params
        on_gpu = jax.default_backend() == "gpu"
        jit = functools.partial(jax.jit, compiler_options=compiler_options(run.row_group) if on_gpu else None)
        self._verify = jit(functools.partial(self.model.apply, method="verify"), donate_argnums=1)
        self._prefill = jit(functools.partial(self.model.apply, method="prefill"), donate_argnums=1)
        self._draft = jit(functools.partial(self.model.apply, method="feed"), donate_argnums=1)
        self.commit = jit(states.commit, donate_argnums=0)
        self.settle = jit(states.settle, donate_argnums=0)
        self.snapshot = jit(states.snapshot)
        self.restore = jit(states.restore, donate_argnums=0)
        self.fork = jit(states.fork, donate_argnums=0)
        self.free = jit(states.free, donate_argnums=0)

    def init(self, garbage: int | None = None) -> states.TargetState:
        """A fresh state; with `garbage`, every array that a sequence may find used holds noise, NaN included."""
        state = states.init(self.config, self.run)
        if garbage is None:
            return state
        rng = np.random.default_rng(garbage)

        def noise(x: jax.Array) -> jax.Array:
            values = rng.normal(size=x.shape) * 50
            values[rng.random(x.shape) < 0.05] = np.nan
            return jnp.asarray(values, x.dtype)

        names = [n for n in state.__dataclass_fields__ if n != "slots"]
        return dataclasses.replace(state, **{n: jax.tree.map(noise, getattr(state, n)) for n in names})

    def verify(self, state: Any, slots: Any, tokens: Any, n_rows: Any) -> Any:
        return self._verify(self.params, state, _int(slots), _int(tokens), _int(n_rows))

    def prefill(self, state: Any, slot: int, tokens: Any, n: int) -> Any:
        return self.ragged(state, [slot], tokens, [0], [n])

    def ragged(self, state: Any, slots: Any, tokens: Any, begin: Any, n: Any) -> Any:
        return self._prefill(self.params, state, _int(slots), _int(tokens), _int(begin), _int(n))

    def draft(self, state: Any, slots: Any, tokens: Any, hidden: Any, start: Any, n_rows: Any) -> Any:
        return self._draft(self.params, state, _int(slots), _int(tokens), hidden, _int(start), _int(n_rows))

    def feed(self, state: Any, slot: int, tokens: Any, K: int = 1) -> tuple[np.ndarray, Any]:
        """Decodes known tokens in verifies of K rows, all accepted. Returns float32 logits [T, V] and the state."""
        logits = []
        for i in range(0, len(tokens), K):
            part = list(tokens[i : i + K])
            out, hidden, state = self.verify(state, [slot], [part + [0] * (K - len(part))], [len(part)])
            state = self.commit(state, _int([slot]), _int([len(part)]), hidden)
            logits.append(np.asarray(out)[0, : len(part)])
        return np.concatenate(logits), state


def _int(x: Any) -> jax.Array:
    return jnp.asarray(x, jnp.int32)


@functools.cache
def steps(family: str, dtype: str = "float32", weights: str | None = None, **changes: Any) -> Steps:
    """One `Steps` a family and run configuration, shared by the tests of a process; with random quantised weights, if asked."""
    config, run = CONFIGS[family], dataclasses.replace(RUN, dtype=dtype, **changes)
    packed = weights and random_params(config, dtype=dtype, layout=run.layout, weights=weights)
    return Steps(config, run, packed or None)


def assert_same(a: Any, b: Any) -> None:
    """Every leaf equal bit for bit (NaN equals NaN)."""
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=jax.tree_util.keystr(path))
