"""What the engine counts."""

from __future__ import annotations

import collections
from typing import Any

from atlas_jax.engine.api import FINISHED
from atlas_jax.metrics import AcceptanceLog

WINDOW_S = 10  # seconds that the rate of tokens is taken over


class Figures:
    """Counts since the engine's start; only its thread writes them."""

    def __init__(self, began: float) -> None:
        self.acceptance = AcceptanceLog()
        self.finished: dict[str, int] = dict.fromkeys(FINISHED, 0)
        self.prompt_tokens = self.restored_tokens = self.tokens = self.dispatches = 0
        self._began = began
        self._recent: collections.deque[tuple[int, int]] = collections.deque(maxlen=WINDOW_S + 1)  # second, tokens

    def emit(self, now: float, tokens: int) -> None:
        self.tokens += tokens
        second = int(now)
        if self._recent and self._recent[-1][0] == second:
            tokens += self._recent.pop()[1]
        self._recent.append((second, tokens))

    def tokens_per_s(self, now: float) -> float:
        recent = [n for second, n in [*self._recent] if second > now - WINDOW_S]
        return sum(recent) / min(WINDOW_S, max(now - self._began, 1.0))

    def reading(self, now: float) -> dict[str, Any]:
        """Fields of `EngineStats`."""
        return dict(
            finished=dict(self.finished),
            prompt_tokens=self.prompt_tokens,
            restored_tokens=self.restored_tokens,
            tokens=self.tokens,
            tokens_per_s=self.tokens_per_s(now),
            acceptance=self.acceptance.total(),
            dispatches=self.dispatches,
        )
