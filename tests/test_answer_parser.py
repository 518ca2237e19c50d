"""Answers into reasoning, content and tool calls: what comes out, and that it does not depend on how the text is cut."""

import itertools
import json
import pathlib

import hypothesis
import hypothesis.strategies as st
import pytest

from atlas_jax.serve.answer_parser import (
    AnswerParser,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Reasoning,
    joined,
)

TOOLS = {
    "find": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "count": {"type": "integer"},
            "price": {"type": ["number", "null"]},
            "flags": {"type": "array"},
            "deep": {"$ref": "#/$defs/point"},
            "either": {"anyOf": [{"type": "boolean"}, {"type": "string"}]},
            "unit": {"enum": ["km", "mi"]},
        },
        "$defs": {"point": {"type": "object"}},
    },
    "go": {},
}


def parse(text, pieces=None, tools=TOOLS, **options):
    parser = AnswerParser(tools, **options)
    events = [event for piece in (pieces or [text]) for event in parser.push(piece)]
    events += parser.finish()
    return joined(events), parser


def calls(events):
    """Names and raw arguments of an answer's calls."""
    names = [e.name for e in events if isinstance(e, CallBegin)]
    pieces = [
        "".join(e.text for e in events if isinstance(e, CallArguments) and e.index == i) for i in range(len(names))
    ]
    return list(zip(names, pieces, strict=True))


def xml(name, **parameters):
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def test_plain_text_is_content_verbatim():
    for text in ("Hello.\n", "  two  spaces ", "a < b <tool", "", "\n\n"):
        events, _ = parse(text)
        assert events == ([Content(text)] if text else [])


def test_thinking_is_reasoning():
    assert parse("\nI see.\n</think>\n\nYes. ", reasoning=True)[0] == [Reasoning("I see."), Content("Yes. ")]
    assert parse("<think>\nI see.\n</think>\n\nYes.")[0] == [Reasoning("I see."), Content("Yes.")]
    assert parse("I see", reasoning=True)[0] == [Reasoning("I see")]  # cut off within its thoughts
    assert parse("</think>Yes", reasoning=True)[0] == [Content("Yes")]
    assert parse("Say <think> and </think>.")[0] == [Content("Say <think> and </think>.")]


def test_a_call_within_the_thoughts_ends_them():
    events, _ = parse("Look it up.\n" + xml("go"), reasoning=True)
    assert events == [Reasoning("Look it up."), CallBegin(0, "go"), CallArguments(0, "{}"), CallEnd(0)]
    text = "Not offered: <tool_call>"
    assert parse(text, tools=None, reasoning=True)[0] == [Reasoning(text)]


def test_xml_calls():
    text = "One moment.\n\n" + xml("find", city="Ålesund", count="3") + "\n" + xml("go")
    events, parser = parse(text)
    assert events[0] == Content("One moment.")
    assert [(name, json.loads(raw)) for name, raw in calls(events)] == [
        ("find", {"city": "Ålesund", "count": 3}),
        ("go", {}),
    ]
    assert parser.calls == 2 and not parser.broken
    assert not any(isinstance(e, Content) for e in events[1:])


def test_json_calls():
    first, second = '{"name": "find", "arguments": {"city": "a </tool_call> \\" b", "n": [1, {}]}}', '{"name":"go"}'
    text = f"Well:\n<tool_call>\n{first}\n</tool_call>\n<tool_call>{second}</tool_call>"
    events, parser = parse(text)
    assert [(n, json.loads(a)) for n, a in calls(events)] == [("find", json.loads(first)["arguments"]), ("go", {})]
    assert parser.calls == 2
    # arguments before the name, and as a string
    text = '<tool_call>{"id": 7, "arguments": "{\\"a\\": 1}", "name": "go"}</tool_call> Done.'
    events, _ = parse(text)
    assert calls(events) == [("go", '{"a": 1}')] and events[-1] == Content("Done.")


@pytest.mark.parametrize(
    ("parameter", "written", "value"),
    [
        ("city", "123", "123"),
        ("city", '{"a": 1}', '{"a": 1}'),
        ("city", "\nlead\n", "\nlead\n"),
        ("city", 'a "quote" \\ and\ttab', 'a "quote" \\ and\ttab'),
        ("count", "12", 12),
        ("count", "12.0", 12),
        ("count", "twelve", "twelve"),
        ("count", "1e999", "1e999"),
        ("count", "NaN", "NaN"),
        ("price", "1.5", 1.5),
        ("price", "None", None),
        ("flags", '["a", null]', ["a", None]),
        ("flags", "[" * 9000, "[" * 9000),
        ("deep", '{"x": 1}', {"x": 1}),
        ("either", "True", True),
        ("either", "yes", "yes"),
        ("unit", "km", "km"),
        ("unknown", "5", "5"),
    ],
)
def test_parameters_take_the_schemas_type(parameter, written, value):
    events, _ = parse(xml("find", **{parameter: written}))
    assert json.loads(calls(events)[0][1]) == {parameter: value}


def test_what_is_no_call_is_content():
    for text in (
        "<tool_call>",
        "<tool_call>\nfoo",
        "<tool_call><function=",
        "<tool_call><function=a<b>",
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": 5}</tool_call>',
        '<tool_call>{"arguments": {}',
        "<tool_call><function=>x",
    ):
        events, parser = parse(text)
        assert events == [Content(text)], text
        assert not parser.calls and not parser.broken
    assert parse(xml("go"), tools=None)[0] == [Content(xml("go"))]


def test_a_broken_call_is_not_closed():
    whole = xml("find", city="Ålesund", flags="[1, 2]")
    for cut in range(whole.index("find>") + 5, whole.index("</function>")):
        events, parser = parse(whole[:cut])
        assert parser.broken and not parser.calls
        with pytest.raises(ValueError):
            json.loads(calls(events)[0][1])
    events, parser = parse('<tool_call>{"name": "go", "arguments": {"a": 1</tool_call>!')
    assert calls(events) == [("go", '{"a": 1')] and events[-1] == Content("!") and not parser.calls


def test_every_call_of_a_real_conversation_comes_back():
    """Calls as the packaged model's own template writes them."""
    from atlas_jax.text.chat import render_chat
    from atlas_jax.text.tokenizer import Tokenizer

    directory = pathlib.Path(__file__).resolve().parent.parent / "atlas_jax" / "data" / "tiny_agent"
    tools = json.loads((directory / "airline_tools.json").read_text())
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    made = [
        (
            "book_reservation",
            {"user_id": "a_1", "flights": [{"flight_number": "HAT1", "date": "2024-05-01"}], "total_baggages": 2},
        ),
        ("think", {"thought": "one\n\ntwo </parameter"}),
    ]
    turns = [
        {
            "role": "assistant",
            "content": "So:",
            "tool_calls": [{"function": {"name": n, "arguments": a}} for n, a in made],
        }
    ]
    text = render_chat(Tokenizer(directory), [{"role": "user", "content": "?"}, *turns], add_generation_prompt=False)
    answer = text.split("<|im_start|>assistant\n")[1].removesuffix("<|im_end|>\n")
    events, _ = parse(answer, tools=schemas)
    assert events[0] == Content("So:") and [(n, json.loads(a)) for n, a in calls(events)] == made


FRAGMENTS = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "<function=", "find", ">", "</function>", "<parameter=", "city",
     "count", "</parameter>", "\n", " ", "{", "}", '"name"', ":", '"arguments"', '"', "\\", ",", "[", "]", "7", "<", "ü", "𝄞",
     xml("find", city="x", count="1"), '<tool_call>{"name": "go", "arguments": {"a": "b"}}</tool_call>', "<tool_call>\n"]
)  # fmt: skip
TEXTS = st.lists(FRAGMENTS | st.text(max_size=3), max_size=14).map("".join)


@hypothesis.given(
    text=TEXTS, cuts=st.lists(st.integers(0, 300), max_size=12), reasoning=st.booleans(), offered=st.booleans()
)
def test_any_chunking_parses_the_same(text, cuts, reasoning, offered):
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    options = dict(tools=TOOLS if offered else None, reasoning=reasoning)
    whole, parser = parse(text, **options)
    for cut in (pieces, list(text)):
        events, other = parse(text, cut, **options)
        assert events == whole
        assert (other.calls, other.broken) == (parser.calls, parser.broken)


@hypothesis.given(text=TEXTS)
def test_nothing_but_whitespace_and_tags_is_lost_without_tools(text):
    events, _ = parse(text, tools=None, reasoning=True)
    shown = "".join(e.text for e in events if isinstance(e, (Reasoning, Content)))
    squeeze = lambda t: "".join(t.split())  # noqa: E731
    assert squeeze(shown) == squeeze(text.replace("</think>", "", 1))
