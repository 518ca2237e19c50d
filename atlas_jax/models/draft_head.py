"""A cheaper copy of the head, with which drafts are chosen; what is verified goes through the exact one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax.config import ModelConfig, RunConfig
from atlas_jax.errors import ConfigError
from atlas_jax.shapes import Array, Float
from atlas_jax.tensor_parallel.shares import gathered
from atlas_jax.weights.quantised.codes import packed
from atlas_jax.weights.quantised.rounding import rounded
from atlas_jax.weights.quantised.scheme import Scheme
from pallas_kernels.linear import linear
from pallas_kernels.w4a16 import FORMS

SCHEME = Scheme("int4", 128)


def with_draft_head(config: ModelConfig, run: RunConfig, params: Any) -> Any:
    """The parameters, and with them the head that `run.draft_head` and `run.draft_vocabulary` ask for, if another than the exact.

    Raises:
        ConfigError: there is nothing to draft with, the head is quantised already, or the vocabulary has no more tokens.
    """
    if run.draft_head == "exact" and run.draft_vocabulary is None:
        return params
    if not config.has_mtp:
        raise ConfigError(
            "draft_head and draft_vocabulary are about the model's own drafter, and it has no mtp.* tensors"
        )
    if run.draft_vocabulary is not None and run.draft_vocabulary >= config.vocab_size:
        raise ConfigError(
            f"draft_vocabulary {run.draft_vocabulary} leaves nothing out: this model has {config.vocab_size} token ids; "
            "give fewer, or leave it out"
        )
    held = params["params"]
    head = held["embedding"] if config.tie_word_embeddings else held["head"]
    if isinstance(head, FORMS):
        raise ConfigError("this model's head is quantised already; leave draft_head 'exact' and draft_vocabulary out")
    made: dict[str, Any] = {}
    tokens = None
    if run.draft_vocabulary is not None:
        first = np.arange(run.draft_vocabulary)
        tokens = np.union1d(first, [i for i in config.eos_token_ids if i < config.vocab_size]).astype(np.int32)
        made["tokens"] = jnp.asarray(tokens)

    @jax.jit
    def make(head: Array) -> Any:
        rows = head if config.tie_word_embeddings else head.T
        rows = rows if tokens is None else rows[tokens]
        return packed(rounded(rows, SCHEME), run.dtype) if run.draft_head == "int4" else rows.T

    return params | {"params": held | {"draft_head": made | {"weight": make(head)}}}


def draft_logits(
    head: dict[str, Any], hidden: Float[Array, "R D"], vocabulary: int, devices: int = 1
) -> Float[Array, "R V"]:
    """Logits by a draft head; -inf for tokens that it does not know. One that knows all is shared by the `devices`."""
    logits = linear(hidden, head["weight"])
    if "tokens" not in head:
        return gathered(logits, devices)
    return jnp.full((hidden.shape[0], vocabulary), -jnp.inf).at[:, head["tokens"]].set(logits)
