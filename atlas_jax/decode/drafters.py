"""Drafters: what proposes the tokens that the target then verifies.

A drafter is a small frozen object with a name and two pure functions, so that a jitted round can hold it as a constant and its
state travels as a pytree. Whatever it proposes, the output is that of plain decoding: only the speed depends on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax.config import ModelConfig, RunConfig
from atlas_jax.decode.hybrid import HybridDrafter
from atlas_jax.decode.lookup import LookupDrafter
from atlas_jax.decode.mtp import MtpChain
from atlas_jax.decode.protocol import DraftContext, Drafter, Proposal
from atlas_jax.errors import RequestError
from atlas_jax.shapes import Array
from atlas_jax.state import TargetState


@dataclasses.dataclass(frozen=True)
class NoDrafter:
    """Plain decoding."""

    name: ClassVar[str] = "none"
    feeds: ClassVar[bool] = False

    def init(self, config: ModelConfig, run: RunConfig) -> Any:
        return ()

    def propose(self, context: DraftContext, target: TargetState, state: Any, drafts: int) -> Proposal:
        B = context.slots.shape[0]
        return Proposal(jnp.zeros((B, drafts), jnp.int32), jnp.zeros(B, jnp.int32), target, state)


@dataclasses.dataclass(frozen=True)
class RandomDrafter:
    """Uniform tokens, for tests: almost every draft is rejected. Drafts differ in number from round to round."""

    name: ClassVar[str] = "random"

    def init(self, config: ModelConfig, run: RunConfig) -> Any:
        return ()

    def propose(self, context: DraftContext, target: TargetState, state: Any, drafts: int) -> Proposal:
        def one(seed: Array, length: Array) -> tuple[Array, Array]:
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(1), seed), length)
            tokens = jax.random.randint(key, (drafts,), 0, context.vocab_size, jnp.int32)
            return tokens, jax.random.randint(jax.random.fold_in(key, 1), (), 0, drafts + 1, jnp.int32)

        tokens, count = jax.vmap(one)(context.seed, context.length)
        return Proposal(tokens, count, target, state)


@dataclasses.dataclass(frozen=True)
class ScriptedDrafter:
    """Drafts from a known answer, each right with probability `acceptance`: forced accept (1), forced reject (0), or throughput
    at a chosen acceptance with output that stays exact.

    Its state is the acceptance, [S], and the script: prompt and answer, [S, max_length + 1].
    """

    acceptance: float = dataclasses.field(default=1.0, compare=False)  # in the state: one executable serves them all
    name: ClassVar[str] = "scripted"
    by_hidden: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance <= 1:
            raise RequestError(f"acceptance must lie in 0 … 1, got {self.acceptance}")

    def init(self, config: ModelConfig, run: RunConfig) -> Any:
        S = run.slots + 1
        return jnp.full(S, self.acceptance, jnp.float32), jnp.zeros((S, run.max_length + 1), jnp.int32)

    def teach(self, state: Any, slot: int, known: np.ndarray) -> Any:
        acceptance, script = state
        return acceptance, script.at[slot].set(np.pad(known, (0, script.shape[1] - known.size)))

    def propose(self, context: DraftContext, target: TargetState, state: Any, drafts: int) -> Proposal:
        acceptance, script = state

        def one(slot: Array, length: Array, seed: Array) -> Array:
            at = jnp.minimum(length + 1 + jnp.arange(drafts), script.shape[1] - 1)
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(2), seed), length)
            right = jax.random.uniform(key, (drafts,)) < acceptance[slot]
            return jnp.where(right, script[slot, at], (script[slot, at] + 1) % context.vocab_size)

        tokens = jax.vmap(one)(context.slots, context.length, context.seed)
        return Proposal(tokens, jnp.full(tokens.shape[0], drafts, jnp.int32), target, state)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": NoDrafter,
    "mtp": MtpChain,
    "lookup": LookupDrafter,
    "hybrid": HybridDrafter,
    "random": RandomDrafter,
    "forced-accept": lambda: ScriptedDrafter(1.0),
    "forced-reject": lambda: ScriptedDrafter(0.0),
}


def drafter_named(name: str) -> Drafter:
    """Raises RequestError for an unknown name, saying which there are."""
    if name not in DRAFTERS:
        raise RequestError(f"unknown drafter {name!r}; there are {', '.join(DRAFTERS)}")
    return DRAFTERS[name]()
