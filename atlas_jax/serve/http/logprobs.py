"""Log-probabilities in the two forms that OpenAI's API has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atlas_jax.completion import Delta
from atlas_jax.text.tokenizer import Tokenizer

FLOOR = -9999.0  # what OpenAI writes for a log-probability that is minus infinity, which JSON lacks


def chat_logprobs(tokenizer: Tokenizer, delta: Delta) -> dict[str, Any] | None:
    """Of chat completions: one entry a token."""
    if delta.logprobs is None:
        return None
    tops = delta.top_logprobs or [[]] * len(delta.logprobs)
    content = [
        _entry(tokenizer, token, logprob) | dict(top_logprobs=[_entry(tokenizer, *likely) for likely in top])
        for token, logprob, top in zip(delta.token_ids, delta.logprobs, tops, strict=False)
    ]
    return dict(content=content, refusal=None)


class TextLogprobs:
    """Of plain completions: parallel lists, with offsets that go on from piece to piece."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.offset = tokenizer, 0

    def add(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float | None],
        tops: Sequence[Sequence[tuple[int, float]] | None] | None,
    ) -> dict[str, Any]:
        tokens = [_text(self.tokenizer, token) for token in token_ids]
        offsets = []
        for token in tokens:
            offsets.append(self.offset)
            self.offset += len(token)
        likely = None
        if tops:
            likely = [
                None if top is None else {_text(self.tokenizer, token): _finite(value) for token, value in top}
                for top in tops
            ]
        return dict(
            tokens=tokens,
            token_logprobs=[None if value is None else _finite(value) for value in logprobs],
            top_logprobs=likely,
            text_offset=offsets,
        )


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    return dict(token=_text(tokenizer, token), logprob=_finite(logprob), bytes=list(tokenizer.token_bytes(token)))


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", "replace")


def _finite(value: float) -> float:
    return max(float(value), FLOOR)
