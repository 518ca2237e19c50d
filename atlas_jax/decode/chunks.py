"""Dispatches of prompts' chunks: how many rows they have, and whose chunks one of them computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from atlas_jax.config import RunConfig
from atlas_jax.errors import ConfigError
from pallas_kernels.ragged import BLOCK, blocks

ALONE = (16, 64)  # rows of dispatches for the last, partial chunk of a prompt, beside those of whole chunks
TOGETHER = (256,)  # where they share one: with fewer rows, a GPU spends its time on reading the weights


class Batch(NamedTuple):
    """A ragged batch (`pallas_kernels.ragged`), as the executables take it: sequences without rows are the sentinel."""

    slots: np.ndarray  # [S]
    tokens: np.ndarray  # [T]
    begin: np.ndarray  # [S]
    n: np.ndarray  # [S]


class Chunks:
    """What `RunConfig.pack_prompts` decides.

    A chunk is computed in the smallest dispatch that holds it, together with others of which the same is true, if at all: what a
    row's bits depend on is the number of rows of its dispatch, and that is the chunk's own affair.

    Attributes:
        sizes: rows of the executables.
    """

    def __init__(self, run: RunConfig, interval: int) -> None:
        on_gpu = jax.default_backend() == "gpu"
        if run.pack_prompts and run.row_group == 1 and not on_gpu:
            raise ConfigError(
                "pack_prompts needs a row_group of 4 or more on a CPU: the products that single rows go through there have "
                "other bits in other places of a batch"
            )
        self.packs = run.slots > 1 and (on_gpu if run.pack_prompts is None else run.pack_prompts)
        self.slots, whole = run.slots, run.prefill_chunk
        self.sizes = sorted({s for s in (*(TOGETHER if self.packs else ALONE), interval, whole) if s <= whole})

    def size(self, rows: int) -> int:
        """Rows of the dispatch of a chunk of so many."""
        return min(size for size in self.sizes if rows <= size)

    def sequences(self, size: int) -> int:
        """How many sequences a dispatch of so many rows takes."""
        return max(1, min(self.slots, size // BLOCK)) if self.packs else 1

    def together(self, rows: Sequence[int]) -> list[int]:
        """Which chunks of so many rows one dispatch computes: the first and, in order, what fits beside it. Those without rows need
        none, and come along."""
        chosen: list[int] = []
        size = room = places = 0
        for i, n in enumerate(rows):
            if n and not size:
                size = self.size(n)
                room, places = blocks(size), self.sequences(size)
            if n and (self.size(n) != size or blocks(n) > room or not places):
                continue
            if n:
                room, places = room - blocks(n), places - 1
            chosen.append(i)
        return chosen

    def batch(self, parts: Sequence[tuple[int, np.ndarray]]) -> Batch:
        """Slots and the tokens of their chunks, which must go together, one after another."""
        size = self.size(parts[0][1].size)
        S = self.sequences(size)
        batch = Batch(*(np.zeros(n, np.int32) for n in (S, size, S, S)))
        at = 0
        for s, (slot, tokens) in enumerate(parts):
            batch.slots[s], batch.begin[s], batch.n[s] = slot, at, tokens.size
            batch.tokens[at * BLOCK : at * BLOCK + tokens.size] = tokens
            at += blocks(tokens.size)
        return batch

    def padded(self, tokens: np.ndarray) -> np.ndarray:
        """A chunk by itself, in as many rows as its dispatch has."""
        return np.pad(tokens, (0, self.size(tokens.size) - tokens.size)).astype(np.int32)
