"""One sequence that has a slot: what it asks for, what is left of its prompt, what a dispatch emitted of it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np

from atlas_jax.cache.prefix import Lease, Sequence
from atlas_jax.decode.request import SamplingParams
from atlas_jax.decode.state import FINISH_REASONS, RUNNING


@runtime_checkable
class Guide(Protocol):
    """What restricts a sequence's tokens."""

    def masks(self, drafts: list[int], n_rows: int, masks: np.ndarray) -> int:
        """Fills `masks` [K, ceil(V / 32)], int32: row t with the tokens that may follow the first t drafts, as bits. Rows behind a
        draft that is not allowed are left out. Returns how many rows are left of `n_rows`, 1 at least."""
        ...

    def take(self, token_ids: list[int]) -> None:
        """Goes on by tokens that were emitted. The sequence goes on after them."""
        ...

    @property
    def error(self) -> str:
        """Why it cannot go on; empty where it can."""
        ...


Cut = Callable[[int, list[int]], int | None]


@dataclasses.dataclass(frozen=True)
class Request:
    """One sequence to decode.

    Attributes:
        script: the known answer that a ScriptedDrafter drafts from.
        history: how many of the prompt's tokens the next turn's prompt will begin with; None for all of them.
        lease: of the conversation that the request belongs to.
        drafts: of a round, at most; None for as many as there are rows for.
    """

    prompt: np.ndarray
    params: SamplingParams
    script: np.ndarray | None = None
    history: int | None = None
    lease: Lease | None = None
    drafts: int | None = None


@dataclasses.dataclass(frozen=True)
class Step:
    """Tokens of one sequence that one dispatch emitted."""

    index: int
    token_ids: list[int]
    logprobs: list[float] | None
    top_logprobs: list[list[tuple[int, float]]] | None
    finish_reason: str | None


@dataclasses.dataclass(eq=False)
class Live:
    """A sequence from its admission to its release.

    Attributes:
        index: what its steps call it.
        key: a number that no other sequence of the loop has.
        slot: of the state.
        sequence: its pages, and what the prefix cache knew of it.
        chunks: begins and ends of what is left of its prompt.
        known: what a drafter that is taught the answer is told.
        started: its prompt is computed, rounds may run.
        emitted: whether a token has come.
        finish_reason: once it has ended.
        guide: restricts its tokens; rounds then take two dispatches.
    """

    index: int
    key: int
    request: Request
    slot: int
    sequence: Sequence
    chunks: collections.deque[tuple[int, int]]
    cut: Cut
    known: np.ndarray | None = None
    started: bool = False
    emitted: bool = False
    finish_reason: str | None = None
    guide: Guide | None = None

    @property
    def left(self) -> int:
        """Tokens of the prompt that are not computed yet."""
        return self.chunks[-1][1] - self.chunks[0][0] if self.chunks else 0

    @property
    def next_rows(self) -> int:
        """Tokens of the next chunk of the prompt; 0 where nothing is left to compute."""
        return self.chunks[0][1] - self.chunks[0][0] if self.chunks else 0

    def read(self, b: int, emitted: Any, finish: int) -> tuple[Step, int | None]:
        """Its part of what a dispatch emitted, sequence `b` of it; also how many of its last round's tokens a stop string leaves,
        if one was found."""
        rounds = range(emitted.tokens.shape[0])
        token_ids = [int(t) for r in rounds for t in emitted.tokens[r, b, : emitted.counts[r, b]]]
        reason = None if finish == RUNNING else FINISH_REASONS[finish]
        params = self.request.params
        keep = self.cut(self.index, token_ids) if params.stop and token_ids else None
        if keep is not None:
            token_ids, reason = token_ids[:keep], "stop"
        logprobs = top = None
        if params.logprobs:
            places = [(r, k) for r in rounds for k in range(emitted.counts[r, b])][: len(token_ids)]
            logprobs = [float(emitted.logprobs[r, b, k]) for r, k in places]
            n = params.top_logprobs
            pairs = [
                zip(emitted.top_ids[r, b, k, :n], emitted.top_logprobs[r, b, k, :n], strict=True) for r, k in places
            ]
            top = [[(int(t), float(p)) for t, p in pair] for pair in pairs]
        self.finish_reason, self.emitted = reason, self.emitted or bool(token_ids)
        return Step(self.index, token_ids, logprobs, top, reason), keep
