"""Conversations to play: recorded messages, cut where the assistant speaks."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from atlas_jax.errors import RequestError
from atlas_jax.input_files import read_json_lines
from atlas_jax.text.chat import validated, validated_tools

DATA = pathlib.Path(__file__).parent.parent / "data"
HELD_OUT = DATA / "airline_held_out.jsonl"  # kept out of tiny-agent's training
HELD_OUT_TOOLS = DATA / "tiny_agent" / "airline_tools.json"


@dataclasses.dataclass(frozen=True)
class Turn:
    """One answer of the assistant: the messages before it, and the recorded one."""

    number: int  # from 1 on
    messages: list[dict[str, Any]]
    recorded: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Conversation:
    name: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None

    @property
    def turns(self) -> list[Turn]:
        places = [i for i, message in enumerate(self.messages) if message["role"] == "assistant" and i > 0]
        return [Turn(n, self.messages[:i], self.messages[i]) for n, i in enumerate(places, 1)]


def read_conversations(path: str | pathlib.Path, tools: list[dict[str, Any]] | None = None) -> list[Conversation]:
    """The conversations of a file with one JSON object a line: `messages` as in the OpenAI API; `id` and `tools` are optional.

    Args:
        tools: for conversations that bring none.

    Raises:
        RequestError: naming the line that is wrong; or no conversation has an answer of the assistant.
    """

    def conversation(number: int, row: Any) -> Conversation:
        if not isinstance(row, dict) or "messages" not in row:
            raise RequestError("an object with messages is needed")
        own = tools if row.get("tools") is None else validated_tools(row["tools"])
        return Conversation(str(row.get("id", number)), validated(row["messages"]), own)

    out = read_json_lines(path, conversation)
    if not any(conversation.turns for conversation in out):
        raise RequestError(f"{path}: the assistant answers nowhere, so there is nothing to play")
    return out
