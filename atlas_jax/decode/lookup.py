"""Prompt lookup on the device: what followed the longest earlier copy of a sequence's tail.

There is no index: a sequence's own row of tokens is compared with its tail shifted by each of the places a match may have. These
are a few elementwise passes that compile into one kernel and a maximum, over tokens that are on the device anyway.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp

from atlas_jax.config import ModelConfig, RunConfig
from atlas_jax.decode.protocol import DraftContext, Proposal
from atlas_jax.errors import RequestError
from atlas_jax.shapes import Array, Int
from atlas_jax.state import TargetState

MAX_MATCH = 16  # tokens of the tail that are compared; of places that match as far, the newest wins


class Found(NamedTuple):
    """The best match in each of B sequences."""

    match: Int[Array, " B"]  # its length, 0 … MAX_MATCH; 0: the newest token occurs nowhere before
    place: Int[Array, " B"]  # where it ends; meaningless without a match


def find(tokens: Int[Array, "B columns"], length: Int[Array, " B"]) -> Found:
    """The longest match of each sequence's tail, which ends with token `length`, among its tokens before that one.

    A match may overlap the tail. Tokens past `length` are not looked at, nor are other sequences'.
    """
    C = tokens.shape[1]
    back = jnp.arange(MAX_MATCH)
    at = length[:, None] - back
    # two different fillers: what lies before the first token matches nothing
    tail = jnp.where(at >= 0, jnp.take_along_axis(tokens, jnp.maximum(at, 0), axis=1), -2)
    padded = jnp.pad(tokens, ((0, 0), (MAX_MATCH - 1, 0)), constant_values=-1)
    same = jnp.ones(tokens.shape, bool)
    match = jnp.zeros(tokens.shape, jnp.int32)
    for j in range(MAX_MATCH):
        shifted = padded[:, MAX_MATCH - 1 - j : MAX_MATCH - 1 - j + C]  # token e - j at column e
        same &= shifted == tail[:, j : j + 1]
        match += same
    end = jnp.arange(C)
    best = jnp.max(jnp.where(end < length[:, None], match * C + end, 0), axis=1)
    return Found(best // C, best % C)


def continuation(
    tokens: Int[Array, "B columns"], length: Int[Array, " B"], place: Int[Array, " B"], drafts: int
) -> Int[Array, "B drafts"]:
    """The tokens after `place`. What reaches the newest token goes on with its own beginning, as a repetition would."""
    period = jnp.maximum(length - place, 1)
    at = place[:, None] + 1 + jnp.arange(drafts) % period[:, None]
    return jnp.take_along_axis(tokens, at, axis=1)


def check_min_match(min_match: int) -> None:
    if isinstance(min_match, bool) or not isinstance(min_match, int) or not 1 <= min_match <= MAX_MATCH:
        raise RequestError(f"min_match must be an integer in 1 … {MAX_MATCH}, got {min_match!r}")


@dataclasses.dataclass(frozen=True)
class LookupDrafter:
    """Prompt lookup alone: drafts where `min_match` or more tokens match, and decodes plainly elsewhere.

    Raises:
        RequestError: `min_match` is not in 1 … MAX_MATCH.
    """

    min_match: int = 2
    name: ClassVar[str] = "lookup"
    feeds: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_min_match(self.min_match)

    def init(self, config: ModelConfig, run: RunConfig) -> Any:
        return ()

    def propose(self, context: DraftContext, target: TargetState, state: Any, drafts: int) -> Proposal:
        match, place = find(context.tokens, context.length)
        tokens = continuation(context.tokens, context.length, place, drafts)
        return Proposal(tokens, jnp.where(match >= self.min_match, drafts, 0), target, state)
