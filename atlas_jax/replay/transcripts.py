"""Conversations as one sequence of tokens each, with the spans that the assistant wrote."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from atlas_jax.errors import RequestError
from atlas_jax.input_files import read_json_lines
from atlas_jax.replay.vocabularies import Encode
from atlas_jax.text.chat import validated

START, END = "<|im_start|>", "<|im_end|>"


@dataclasses.dataclass(frozen=True)
class Transcript:
    """One conversation.

    Attributes:
        tokens: ids of all its messages.
        turns: [start, stop) of each answer of the assistant in `tokens`: its text, its tool calls and the end marker.
    """

    name: str
    tokens: list[int]
    turns: list[tuple[int, int]]


def render(message: dict[str, Any]) -> tuple[str, str, str]:
    """A message in ChatML: what stands before the body, the body with its end marker, and the line break after it.

    A tool call is the JSON of its name and arguments, with Python's spacing, between <tool_call> and </tool_call>;
    text and calls stand on lines of their own.
    """
    calls = [call.get("function", call) for call in message.get("tool_calls", ())]
    texts = [json.dumps(dict(name=call["name"], arguments=call["arguments"]), ensure_ascii=False) for call in calls]
    parts = [message.get("content", ""), *(f"<tool_call>{text}</tool_call>" for text in texts)]
    return f"{START}{message['role']}\n", "\n".join(filter(None, parts)) + END, "\n"


def tokenize(name: str, messages: list[dict[str, Any]], encode: Encode) -> Transcript:
    """Header, body and line break are encoded apart, as an answer is generated apart from its prompt."""
    tokens: list[int] = []
    turns: list[tuple[int, int]] = []
    for message in messages:
        head, body, tail = render(message)
        tokens += encode(head)
        start = len(tokens)
        tokens += encode(body)
        if message["role"] == "assistant":
            turns.append((start, len(tokens)))
        tokens += encode(tail)
    return Transcript(name, tokens, turns)


def read_transcripts(path: str | pathlib.Path, encode: Encode, limit: int | None = None) -> list[Transcript]:
    """The conversations of a file with one JSON object a line, its `messages` as in the OpenAI API, its `id` optional.

    Args:
        limit: reads no more conversations than this.

    Raises:
        RequestError: naming the line that is wrong; or the assistant says nothing in the whole file.
    """

    def transcript(number: int, row: Any) -> Transcript:
        if not isinstance(row, dict) or "messages" not in row:
            raise RequestError("an object with messages is needed")
        return tokenize(str(row.get("id", number)), validated(row["messages"]), encode)

    out = read_json_lines(path, transcript, limit=limit)
    if not any(transcript.turns for transcript in out):
        raise RequestError(f"{path}: no message of the assistant, so there is nothing to replay")
    return out
