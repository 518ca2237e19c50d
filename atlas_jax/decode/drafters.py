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
    """Drafts from a known answer, right as often as asked: forced accept (1), forced reject (0), or throughput at a chosen
    acceptance with output that stays exact.

    Attributes:
        acceptance: how often a draft is right; or how often the first, the second … is, where those before it were (the last
            rate counts for all after it). Drafts are drawn independently, by the request's seed and the position.
        mtp: lets the MTP head draft as `MtpChain` does first, so that a round takes the time it takes with such drafts. The
            head's drafts stand where a wrong one is due (changed where they happen to be right).

    Its state are the rates, [S, max_drafts], so that one executable serves them all, and the script: prompt and answer,
    [S, max_length + 1].
    """

    acceptance: float | tuple[float, ...] = dataclasses.field(default=1.0, compare=False)
    mtp: bool = False
    name: ClassVar[str] = "scripted"
    by_hidden: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self._rates or not all(0 <= rate <= 1 for rate in self._rates):
            raise RequestError(f"acceptance must lie in 0 … 1, or be a tuple of such rates, got {self.acceptance}")

    @property
    def _rates(self) -> tuple[float, ...]:
        return self.acceptance if isinstance(self.acceptance, tuple) else (self.acceptance,)

    def init(self, config: ModelConfig, run: RunConfig) -> Any:
        if self.mtp:
            MtpChain().init(config, run)
        S, places = run.slots + 1, run.max_drafts
        rates = np.asarray((self._rates + self._rates[-1:] * places)[:places], np.float32)
        return jnp.tile(rates, (S, 1)), jnp.zeros((S, run.max_length + 1), jnp.int32)

    def teach(self, state: Any, slot: int, known: np.ndarray) -> Any:
        rates, script = state
        return rates, script.at[slot].set(np.pad(known, (0, script.shape[1] - known.size)))

    def propose(self, context: DraftContext, target: TargetState, state: Any, drafts: int) -> Proposal:
        rates, script = state
        at = jnp.minimum(context.length[:, None] + 1 + jnp.arange(drafts), script.shape[1] - 1)
        due = jnp.take_along_axis(script[context.slots], at, axis=1)
        wrong = (due + 1) % context.vocab_size
        if self.mtp:
            drafted = MtpChain().propose(context, target, (), drafts)
            target, wrong = drafted.target, jnp.where(drafted.tokens == due, wrong, drafted.tokens)

        def draw(length: Array, seed: Array) -> Array:
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(2), seed), length)
            return jax.random.uniform(key, (drafts,))

        right = jax.vmap(draw)(context.length, context.seed) < rates[context.slots, :drafts]
        return Proposal(jnp.where(right, due, wrong), jnp.full(at.shape[0], drafts, jnp.int32), target, state)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": NoDrafter,
    "mtp": MtpChain,
    "lookup": LookupDrafter,
    "hybrid": HybridDrafter,
    # For tests and measurements, which know them: whoever asks for a name that is none is not offered them.
    "random": RandomDrafter,
    "forced-accept": lambda: ScriptedDrafter(1.0),
    "forced-reject": lambda: ScriptedDrafter(0.0),
}
OFFERED = ("none", "mtp", "lookup", "hybrid")


def drafter_named(name: str) -> Drafter:
    """Raises RequestError for an unknown name, saying which there are."""
    if name not in DRAFTERS:
        raise RequestError(f"unknown drafter {name!r:.100}; there are {', '.join(OFFERED)}", "drafter")
    return DRAFTERS[name]()
