"""Drafts of the model's own multi-token-prediction head."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from atlas_jax.config import ModelConfig, RunConfig
from atlas_jax.decode.protocol import DraftContext, Drafter, Proposal
from atlas_jax.errors import RequestError
from atlas_jax.shapes import Array
from atlas_jax.state import TargetState


@dataclasses.dataclass(frozen=True)
class MtpChain:
    """Chained steps of the model's MTP head: the first from the target's hidden, the others from the head's own.

    `refeed` is `RunConfig.refeed`: whether rows of accepted drafts are written again with the target's hiddens.
    """

    refeed: bool = True
    name: ClassVar[str] = "mtp"

    def init(self, config: ModelConfig, run: RunConfig) -> Any:
        if not config.has_mtp:
            raise RequestError("drafter 'mtp' needs a checkpoint with mtp.* tensors; use drafter 'none'")
        return ()

    def propose(self, context: DraftContext, target: TargetState, state: Any, drafts: int) -> Proposal:
        best = lambda hidden: jnp.argmax(context.logits(hidden), axis=-1).astype(jnp.int32)  # noqa: E731
        tokens = jnp.zeros((context.slots.shape[0], drafts), jnp.int32).at[:, 0].set(best(context.hidden))

        def extend(i: Array, carry: tuple[Array, Array, TargetState]) -> tuple[Array, Array, TargetState]:
            tokens, hidden, target = carry
            hidden, target = context.step(target, tokens[:, i - 1], hidden, context.length + i)
            return tokens.at[:, i].set(best(hidden)), hidden, target

        tokens, _, target = jax.lax.fori_loop(1, drafts, extend, (tokens, context.hidden, target))
        return Proposal(tokens, jnp.full(tokens.shape[0], drafts, jnp.int32), target, state)


def rows_left(drafter: Drafter, drafts: int) -> int:
    """How many rows of a round's accepted drafts, the first ones, stay as drafting wrote them. Of d drafts d - 1 have rows: the
    last is nobody's input."""
    return max(drafts - 1, 0) if isinstance(drafter, MtpChain) and not drafter.refeed else 0
