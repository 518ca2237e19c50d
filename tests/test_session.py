"""Conversations: a session, and a client that resends its history, get the same answers and the same from the cache."""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np
import pytest

import atlas_jax
from atlas_jax.errors import RequestError
from atlas_jax.runtime import Runtime
from atlas_jax.session import Session

SYSTEM = dict(
    role="system", content="You help airline passengers. " + "Ask for the reservation number before you act. " * 50
)
CALL = dict(
    role="assistant", content="", tool_calls=[dict(function=dict(name="get_user_details", arguments=dict(id="a")))]
)
ASKED: dict[str, Any] = dict(max_tokens=12)


@functools.cache
def runtime() -> Runtime:
    return atlas_jax.load("tiny-agent")


def user(text: str) -> dict[str, str]:
    return dict(role="user", content=text)


def before_asking(messages: list[Any], **template: Any) -> int:
    """Tokens of a history without the part that asks for an answer."""
    from atlas_jax.text.chat import render_chat

    tokenizer = runtime().tokenizer
    assert tokenizer is not None
    return len(tokenizer.encode(render_chat(tokenizer, messages, add_generation_prompt=False, **template)))


@pytest.mark.parametrize("thinking", [None, True, False])
def test_turns_of_a_chat(thinking):
    """Each turn finds the one before up to the last chunk that ends where its answer was asked for, or earlier."""
    r = runtime()
    r.loop.cache.reset()
    template = {} if thinking is None else dict(enable_thinking=thinking)
    session = r.session([SYSTEM], **ASKED, **template)
    known = 0
    for turn in ("Hello.", "I want to cancel my flight. " * 30, "Yes."):
        sent = [*session.history, user(turn)]
        answer = session.send(turn)
        assert answer.restored >= known
        assert session.history == [*sent, dict(role="assistant", content=answer.text)]
        known = before_asking(sent, **template) // 256 * 256
        resent = r.generate(sent, **ASKED, **template)
        assert resent.token_ids == answer.token_ids and resent.restored == known
    assert known >= 768


@pytest.mark.long
def test_tool_calls_and_results():
    r = runtime()
    r.loop.cache.reset()
    tools = [
        dict(type="function", function=dict(name="get_user_details", parameters=dict(type="object", properties={})))
    ]
    session = r.session([SYSTEM], tools=tools, **ASKED)
    session.send("Who am I?")
    session.history[-1] = CALL  # as a client does that reads the call out of the answer
    results = [dict(role="tool", content='{"name": "Ada"}'), dict(role="tool", content='{"name": "Bob"}')]
    answer = session.send(results)
    assert session.history[1:-1] == [user("Who am I?"), CALL, *results]
    assert answer.restored >= before_asking([SYSTEM, user("Who am I?")], tools=tools) // 256 * 256 > 0


def test_forks_go_on_independently():
    r = runtime()
    one = r.session([SYSTEM], **ASKED)
    one.send("Hello.")
    other = one.fork()
    a, b = one.send("Cancel it."), other.send("Keep it.")
    assert a.restored == b.restored >= 512
    assert one.history[:3] == other.history[:3] and one.history[3] != other.history[3]


def test_token_ids():
    r = runtime()
    session = r.session(list(range(5, 300)), **ASKED)
    first = session.send([7, 8, 9])
    assert session.history == [*range(5, 300), 7, 8, 9, *first.token_ids]
    second = session.send([10] * 5, max_tokens=3)
    assert second.restored == 256 and len(second.token_ids) <= 3
    with pytest.raises(RequestError, match="a list of at least one token id"):
        session.send("Hello")


def test_a_turn_that_fails_leaves_no_trace():
    session = runtime().session(**ASKED)
    session.send("Hello.")
    history = list(session.history)
    for bad in (5, [], ["Hello"], None):
        with pytest.raises(RequestError, match="a turn of a chat is text, a message or a list of messages"):
            session.send(bad)
    with pytest.raises(RequestError, match="role must be one of"):
        session.send(dict(role="wizard", content="x"))
    with pytest.raises(RequestError, match="max_tokens"):
        session.send("Hi", max_tokens=0)
    stream = session.stream("Hi")
    next(stream)
    stream.close()
    assert session.history == history
    with session:
        session.send("Hi")
    assert len(session.history) == len(history) + 2


@pytest.mark.parametrize(
    "history",
    ["Hello", dict(role="user", content="x"), None, 5, [True], [1 << 20], [dict(role="wizard")], [CALL, 3]],
    ids=str,
)
def test_what_no_session_can_begin_with(history):
    with pytest.raises(RequestError):
        Session(runtime(), history, {})


def test_a_turn_of_token_ids_holds_token_ids():
    session = runtime().session(np.arange(5, 9), **ASKED)
    assert session.history == [5, 6, 7, 8]
    for turn in ("Hello", [], 5, None, [True], b"ab"):
        with pytest.raises(RequestError):
            session.send(turn)
    with pytest.raises(RequestError, match="unknown option bogus"):
        runtime().session([1], bogus=1)
    assert session.history == [5, 6, 7, 8]


def test_a_session_answers_one_turn_at_a_time():
    """No turn may vanish from the history because another was answered beside it."""
    session = runtime().session([5, 6, 7], max_tokens=3)
    early, stream = session.stream([8]), session.stream([9])
    next(stream)
    refused: list[Any] = []

    def ask() -> None:
        with pytest.raises(RequestError, match="answering another turn") as error:
            session.send([10])
        refused.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert refused and session.history == [5, 6, 7]
    assert [*stream][-1].completion
    history = list(session.history)
    assert history[:4] == [5, 6, 7, 9]
    with pytest.raises(RequestError, match="has gone on"):
        next(early)
    assert session.history == history
    session.history = history[:4]  # a caller may go back
    session.send([8])
    assert session.history[:5] == [5, 6, 7, 9, 8]
