"""A drafter for research: the MTP chain with the target's own hidden at one draft, to tell what a draft loses by its input."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from atlas_jax.config import ModelConfig, RunConfig
from atlas_jax.decode.mtp import MtpChain
from atlas_jax.decode.protocol import DraftContext, Proposal
from atlas_jax.errors import RequestError
from atlas_jax.shapes import Array
from atlas_jax.state import TargetState


@dataclasses.dataclass(frozen=True)
class OracleChain:
    """`MtpChain`, but draft number `draft` is made from the target's hidden of the position before it instead of the head's own.

    That hidden is known only where the answer is: the request brings it as `script`, and its hiddens are computed first. What
    they say holds where the answer is that script; on another one, drafts are as good as for any wrong hidden.

    Its state are the hiddens that the drafter reads, by position, [S, max_length + 1, D].
    """

    draft: int = 2
    name: ClassVar[str] = "oracle"
    by_hidden: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.draft, numbers.Integral) or isinstance(self.draft, bool) or self.draft < 2:
            raise RequestError(
                f"the oracle's draft must be an integer from 2 on, got {self.draft!r}; draft 1 has the target's hidden as it is"
            )

    def init(self, config: ModelConfig, run: RunConfig) -> Any:
        if self.draft > run.max_drafts:
            raise RequestError(
                f"the oracle's draft {self.draft} is beyond this runtime's {run.max_drafts}; load with a larger max_drafts"
            )
        return jnp.zeros((run.slots + 1, run.max_length + 1, config.hidden_size), jnp.dtype(run.dtype))

    def teach(self, state: Array, slot: int, known: np.ndarray) -> Array:
        return state.at[slot].set(np.pad(known, ((0, state.shape[1] - known.shape[0]), (0, 0))))

    def propose(self, context: DraftContext, target: TargetState, state: Array, drafts: int) -> Proposal:
        def step(target: TargetState, tokens: Array, hidden: Array, position: Array) -> tuple[Array, TargetState]:
            known = state[context.slots, jnp.minimum(position, state.shape[1]) - 1]
            replaced = position - context.length == self.draft - 1
            return context.step(target, tokens, jnp.where(replaced[:, None], known, hidden), position)

        proposal = MtpChain().propose(context._replace(step=step), target, (), drafts)
        return dataclasses.replace(proposal, state=state)
