"""Drafters: what proposes the tokens that the target then verifies.

A drafter is a small frozen object with a name and two pure functions, so that a jitted round can hold it as a constant and its
state travels as a pytree. Whatever it proposes, the output is that of plain decoding: only the speed depends on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax.config import ModelConfig, RunConfig
from atlas_jax.errors import RequestError
from atlas_jax.shapes import Array, Float, Int, UInt32
from atlas_jax.state import TargetState


class DraftContext(NamedTuple):
    """What a drafter may look at: B sequences about to be verified.

    `tokens[b, : length[b] + 1]` are all tokens so far; the last of them is emitted but not yet read by the target, and
    drafts continue after it. `hidden` is the MTP head's normed hidden of that token (zeros where the model has no head).
    """

    slots: Int[Array, " B"]
    tokens: Int[Array, "B columns"]
    length: Int[Array, " B"]
    hidden: Float[Array, "B D"]
    seed: UInt32[Array, " B"]
    vocab_size: int
    logits: Callable[[Array], Array]  # normed hidden [B, D] -> float32 logits [B, V] by the target's head
    step: Callable[
        ..., tuple[Array, TargetState]
    ]  # (target, tokens [B], hidden [B, D], position [B]) -> (hidden [B, D], target)


@dataclasses.dataclass(frozen=True)
class Proposal:
    """Drafts, how many of them count for each sequence, the states that proposing left, and where each draft came from (members
    of `metrics.Source`, for the counters; by default what `Source.of` says of the drafter's name)."""

    tokens: Int[Array, "B D"]
    count: Int[Array, " B"]
    target: TargetState
    state: Any
    source: Int[Array, "B D"] | None = None


@runtime_checkable
class Drafter(Protocol):
    """`init` makes the drafter's state (leaves with a leading slot axis); `propose` drafts up to `drafts` >= 1 tokens each."""

    name: ClassVar[str]

    def init(self, config: ModelConfig, run: RunConfig) -> Any: ...

    def propose(self, context: DraftContext, target: TargetState, state: Any, drafts: int) -> Proposal: ...


@runtime_checkable
class Taught(Protocol):
    """A drafter that is told the answer (`script`) before decoding: tokens of prompt and answer, or, `by_hidden`, the hiddens that
    the MTP head reads of them."""

    by_hidden: ClassVar[bool]

    def teach(self, state: Any, slot: int, known: np.ndarray) -> Any:
        """The drafter's state, in which the slot's sequence is known; rows of `known` are positions."""
        ...


@dataclasses.dataclass(frozen=True)
class NoDrafter:
    """Plain decoding."""

    name: ClassVar[str] = "none"

    def init(self, config: ModelConfig, run: RunConfig) -> Any:
        return ()

    def propose(self, context: DraftContext, target: TargetState, state: Any, drafts: int) -> Proposal:
        B = context.slots.shape[0]
        return Proposal(jnp.zeros((B, drafts), jnp.int32), jnp.zeros(B, jnp.int32), target, state)


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

    Its state is the acceptance and the script: prompt and answer, [S, max_length + 1].
    """

    acceptance: float = dataclasses.field(default=1.0, compare=False)  # in the state: one executable serves them all
    name: ClassVar[str] = "scripted"
    by_hidden: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance <= 1:
            raise RequestError(f"acceptance must lie in 0 … 1, got {self.acceptance}")

    def init(self, config: ModelConfig, run: RunConfig) -> Any:
        return jnp.float32(self.acceptance), jnp.zeros((run.slots + 1, run.max_length + 1), jnp.int32)

    def teach(self, state: Any, slot: int, known: np.ndarray) -> Any:
        acceptance, script = state
        return acceptance, script.at[slot].set(np.pad(known, (0, script.shape[1] - known.size)))

    def propose(self, context: DraftContext, target: TargetState, state: Any, drafts: int) -> Proposal:
        acceptance, script = state

        def one(slot: Array, length: Array, seed: Array) -> Array:
            at = jnp.minimum(length + 1 + jnp.arange(drafts), script.shape[1] - 1)
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(2), seed), length)
            right = jax.random.uniform(key, (drafts,)) < acceptance
            return jnp.where(right, script[slot, at], (script[slot, at] + 1) % context.vocab_size)

        tokens = jax.vmap(one)(context.slots, context.length, context.seed)
        return Proposal(tokens, jnp.full(tokens.shape[0], drafts, jnp.int32), target, state)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": NoDrafter,
    "mtp": MtpChain,
    "random": RandomDrafter,
    "forced-accept": lambda: ScriptedDrafter(1.0),
    "forced-reject": lambda: ScriptedDrafter(0.0),
}


def drafter_named(name: str) -> Drafter:
    """Raises RequestError for an unknown name, saying which there are."""
    if name not in DRAFTERS:
        raise RequestError(f"unknown drafter {name!r}; there are {', '.join(DRAFTERS)}")
    return DRAFTERS[name]()
