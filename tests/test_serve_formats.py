"""Formats end to end: the command, a process of its own, tiny-agent with its drafts, and the `openai` package."""

import json
import os
import pathlib
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
START_S = 500
SCHEMA = {
    "type": "object",
    "properties": {
        "user": {"type": "string", "maxLength": 12},
        "cabin": {"enum": ["economy", "business"]},
        "passengers": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["user", "cabin", "passengers"],
    "additionalProperties": False,
}
FLIGHT = r"HAT[0-9]{3} on 2024-05-[0-3][0-9]"
pytestmark = pytest.mark.long  # compiles everything that formats and log-probabilities need


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[openai.OpenAI, str]]:
    """A client, and what the server said until it was ready."""
    command = [sys.executable, "-m", "atlas_jax.cli", "serve", "tiny-agent", "--http", "127.0.0.1:0", "--slots", "2"]
    command += ["--max-length", "1024", "--drafter", "mtp", "--drafts", "3", "--warm-up", "answers,grammars"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as process:
        try:
            assert process.stderr
            said, end = "", time.monotonic() + START_S
            while "atlas-jax: ready\n" not in said:
                assert select.select([process.stderr], [], [], max(0.0, end - time.monotonic()))[0], said
                more = os.read(process.stderr.fileno(), 1 << 16).decode()
                assert more, said
                said += more
            url = said.split("listening: ")[1].split(";")[0]
            yield openai.OpenAI(base_url=f"{url}/v1", api_key="x", timeout=300, max_retries=0), said
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def ask(client: openai.OpenAI, response_format: dict[str, Any], **options: Any) -> tuple[str, Any]:
    """An answer with a format, whole and in a stream, which must be the same; and its usage."""
    given: dict[str, Any] = dict(
        model="tiny-agent",
        messages=[{"role": "user", "content": "Book me a flight, please."}],
        max_tokens=200,
        temperature=0,
        extra_body={"response_format": response_format},
    )
    answer = client.chat.completions.create(**given, **options)
    pieces = client.chat.completions.create(**given, **options, stream=True)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == answer.choices[0].message.content and answer.choices[0].finish_reason == "stop"
    return text, answer.usage


def test_the_warm_up_is_told(server):
    done = [tuple(map(int, pair)) for pair in re.findall(r"atlas-jax: (\d+) of (\d+) executables are ready", server[1])]
    assert done, server[1]


def test_every_format_with_drafts(server):
    client, _ = server
    first = time.perf_counter()
    text, usage = ask(
        client, {"type": "json_schema", "json_schema": {"name": "trip", "strict": True, "schema": SCHEMA}}
    )
    assert time.perf_counter() - first < 60, "the first request with a format compiled something"
    value = json.loads(text)
    assert sorted(value) == ["cabin", "passengers", "user"] and value["cabin"] in ("economy", "business")
    assert 1 <= value["passengers"] <= 9 and len(value["user"]) <= 12
    drafted = usage.completion_tokens_details.accepted_prediction_tokens
    text, usage = ask(client, {"type": "regex", "regex": FLIGHT})
    assert re.fullmatch(FLIGHT, text)
    drafted += usage.completion_tokens_details.accepted_prediction_tokens
    assert drafted > 0, "no draft was accepted in any of them"


def test_strict_calls(server):
    """Whatever the model would rather write, at any temperature."""
    client, _ = server
    parameters = {
        "type": "object",
        "properties": {
            "user_id": {"type": "string"},
            "cabin": {"enum": ["economy", "business"]},
            "bags": {"type": "integer"},
        },
        "required": ["cabin", "bags"],
    }
    tool: Any = {"type": "function", "function": {"name": "book", "parameters": parameters, "strict": True}}
    ended = 0
    for seed in range(6):
        got = client.chat.completions.create(
            model="tiny-agent", messages=[{"role": "user", "content": "Book me a flight, please."}], tools=[tool], seed=seed,
            tool_choice="required" if seed % 2 else {"type": "function", "function": {"name": "book"}}, temperature=0.3 * seed,
            max_tokens=120).choices[0]  # fmt: skip
        assert got.message.tool_calls
        for call in got.message.tool_calls if got.finish_reason == "tool_calls" else ():
            ended += 1
            assert call.type == "function" and call.function.name == "book"
            value = json.loads(call.function.arguments)
            assert value["cabin"] in ("economy", "business") and isinstance(value["bags"], int)
            assert set(value) <= {"user_id", "cabin", "bags"}
    assert ended


def test_sampled_formats(server):
    client, _ = server
    ended = 0
    for seed in range(8):  # nothing says how long an object is
        got = client.chat.completions.create(
            model="tiny-agent", messages=[{"role": "user", "content": "Which flight?"}], temperature=1.5, seed=seed, max_tokens=150,
            response_format={"type": "json_object"}).choices[0]  # fmt: skip
        assert got.message.content and got.message.content.startswith("{")
        if got.finish_reason == "stop":
            ended += 1
            assert isinstance(json.loads(got.message.content), dict)
    assert ended
    for seed in range(3):
        text = client.chat.completions.create(
            model="tiny-agent", messages=[{"role": "user", "content": "Which flight?"}], temperature=1.3, seed=seed, max_tokens=60,
            extra_body={"response_format": {"type": "regex", "regex": FLIGHT}}).choices[0].message.content  # fmt: skip
        assert text and re.fullmatch(FLIGHT, text)
