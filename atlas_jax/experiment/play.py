"""Plays conversations: user and tool messages as recorded, answers from the model, turn after turn."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any, Literal

from atlas_jax.experiment.conversations import Conversation
from atlas_jax.metrics import Acceptance
from atlas_jax.runtime import Runtime


@dataclasses.dataclass(frozen=True)
class Played:
    """One answer, and what it took.

    Attributes:
        conversation, turn: which; turns are counted from 1 on.
        cached: prompt tokens that the prefix cache had; `prompt` tokens in all.
        ttft_ms: from the call to the first token.
        tpot_ms: mean time of each token after the first; 0 for a single token.
        wall_s: of the whole call, without compiling.
    """

    conversation: str
    turn: int
    prompt: int
    cached: int
    token_ids: tuple[int, ...]
    finish_reason: str
    acceptance: Acceptance
    ttft_ms: float
    tpot_ms: float
    wall_s: float
    differed: int | None = None  # of the fingerprints, where these are on

    @property
    def warm(self) -> bool:
        return self.cached > 0

    @property
    def replayed(self) -> int:
        return self.prompt - self.cached


def warm_up(runtime: Runtime, **options: Any) -> None:
    """Compiles what conversations need: a time to first token is not one while something is compiled beside it."""
    for i, size in enumerate(runtime.loop.chunks.sizes):
        prompt = [i] * (size + 1)  # the last token is not part of prefill
        if len(prompt) + 2 <= runtime.run.max_length:
            runtime.generate(prompt, max_tokens=2, script=[0], **options)


def play(
    runtime: Runtime,
    conversation: Conversation,
    *,
    max_tokens: int,
    turns: int | None = None,
    history: Literal["recorded", "own"] = "recorded",
    scripts: list[tuple[int, ...]] | None = None,
    **options: Any,
) -> Iterator[Played]:
    """Answers every turn of a conversation, greedily unless `options` of `generate` say otherwise.

    A turn for which there is no room in a sequence ends the conversation, as it would for a client.

    Args:
        max_tokens: of an answer.
        turns: no more than these are played.
        history: what later turns find of earlier answers: the recorded one, or the model's own.
        scripts: the known answers, for drafters that draft from them.
    """
    own: list[dict[str, Any]] = []
    done = 0  # recorded messages that `own` stands for
    for turn in conversation.turns[:turns]:
        messages = turn.messages
        if history == "own":
            own += turn.messages[done:]
            messages = own
        prompt = runtime.encode(messages, tools=conversation.tools)
        if prompt.size + max_tokens > runtime.run.max_length:
            return
        script = {} if scripts is None else dict(script=list(scripts[turn.number - 1]))
        began = time.perf_counter()
        answer = runtime.generate(messages, tools=conversation.tools, max_tokens=max_tokens, **script, **options)
        wall_s = time.perf_counter() - began - answer.timings.compile_s
        yield Played(
            conversation.name,
            turn.number,
            prompt.size,
            answer.restored,
            tuple(answer.token_ids),
            answer.finish_reason,
            answer.acceptance,
            answer.timings.ttft_ms,
            answer.timings.tpot_ms,
            wall_s,
            answer.fingerprints.differed if answer.fingerprints else None,
        )
        if history == "own":
            own.append(dict(role="assistant", content=answer.text))
            done = len(turn.messages) + 1
