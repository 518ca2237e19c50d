"""What a drafter is, what it sees and what it returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np

from atlas_jax.config import ModelConfig, RunConfig
from atlas_jax.shapes import Array, Bool, Float, Int, UInt32
from atlas_jax.state import TargetState


class DraftContext(NamedTuple):
    """What a drafter may look at: B sequences about to be verified.

    `tokens[b, : length[b] + 1]` are all tokens so far; the last of them is emitted but not yet read by the target, and
    drafts continue after it. `hidden` is the MTP head's normed hidden of that token; zeros where the model has no head, or the
    head was not asked for (`Drafter.feeds`, `Planner.plan`).
    """

    slots: Int[Array, " B"]
    tokens: Int[Array, "B columns"]
    length: Int[Array, " B"]
    most: Int[
        Array, " B"
    ]  # drafts that can be verified: what the request allows and there is room for; more are dropped
    running: Bool[Array, " B"]  # padding and finished sequences are not: their drafts are dropped
    hidden: Float[Array, "B D"]
    seed: UInt32[Array, " B"]
    vocab_size: int
    logits: Callable[[Array], Array]  # normed hidden [B, D] -> float32 logits [B, V] by the target's head
    step: Callable[
        ..., tuple[Array, TargetState]
    ]  # (target, tokens [B], hidden [B, D], position [B]) -> (hidden [B, D], target)
    plan: Any = None  # of a `Planner`


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
    """`init` makes the drafter's state (leaves with a leading slot axis); `propose` drafts up to `drafts` >= 1 tokens each.

    A drafter that never reads `context.hidden` may say so with an attribute `feeds = False`: the MTP head's layer is then left
    alone, which saves its time.
    """

    name: ClassVar[str]

    def init(self, config: ModelConfig, run: RunConfig) -> Any: ...

    def propose(self, context: DraftContext, target: TargetState, state: Any, drafts: int) -> Proposal: ...


@runtime_checkable
class Planner(Protocol):
    """A drafter that needs the MTP head in some rounds only: `plan` says for which sequences, before the head is fed."""

    def plan(self, context: DraftContext, state: Any, drafts: int) -> tuple[Bool[Array, " B"], Any]:
        """Which sequences will be drafted for with `context.hidden`, and what `propose` then finds as `context.plan`."""
        ...


@runtime_checkable
class Taught(Protocol):
    """A drafter that is told the answer (`script`) before decoding: tokens of prompt and answer, or, `by_hidden`, the hiddens that
    the MTP head reads of them."""

    by_hidden: ClassVar[bool]

    def teach(self, state: Any, slot: int, known: np.ndarray) -> Any:
        """The drafter's state, in which the slot's sequence is known; rows of `known` are positions."""
        ...
