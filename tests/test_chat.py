import json
import pathlib
from typing import Any

import numpy as np
import pytest

import atlas_jax.text.tokenizer
from atlas_jax.errors import CheckpointError, RequestError
from atlas_jax.text.chat import render_chat, validated
from atlas_jax.text.tokenizer import Tokenizer

TINY = pathlib.Path(atlas_jax.text.tokenizer.__file__).parent.parent / "data" / "tiny_agent"
TOOLS = json.loads((TINY / "airline_tools.json").read_text())
tokenizer = Tokenizer(TINY)

SYSTEM = {"role": "system", "content": "  Be brief. <b> & é 数据\n"}
HI = {"role": "user", "content": "Hello {{ 7 * 7 }} {% raw %}"}
CALL = {
    "role": "assistant",
    "content": "Let me look.",
    "reasoning_content": "They ask for a flight.",
    "tool_calls": [
        {
            "id": "c1",
            "type": "function",
            "function": {
                "name": "search",
                "arguments": {"from": "JFK", "n": 2, "deep": {"a": [1, None, "<é>"]}, "ok": True},
            },
        },
        {"id": "c2", "type": "function", "function": {"name": "now", "arguments": {}}},
    ],
}
RESULTS = [
    {"role": "tool", "tool_call_id": "c1", "content": '{"flights": ["<A1>"]}'},
    {"role": "tool", "tool_call_id": "c2", "content": "noon"},
]
ANSWER = {"role": "assistant", "content": "<think>\nold thoughts\n</think>\n\nFlight A1."}
SILENT = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "now", "arguments": {"tz": "UTC"}}}],
}
TALKS: dict[str, list[dict[str, Any]]] = {
    "one turn": [HI],
    "system": [SYSTEM, HI],
    "developer": [SYSTEM | {"role": "developer"}, HI],
    "turns": [SYSTEM, HI, ANSWER, HI, {"role": "assistant", "content": "Yes."}, HI],
    "tools used": [SYSTEM, HI, CALL, *RESULTS, ANSWER, HI],
    "waiting for the answer to tools": [HI, CALL, *RESULTS],
    "a call without text": [HI, SILENT, {"role": "tool", "content": "noon"}],
    "reasoning under its other names": [HI, {"role": "assistant", "content": "a", "reasoning": "why"}, HI],
    "thinking": [HI, {"role": "assistant", "content": "a", "thinking": "why", "tool_calls": None}, HI],
}


@pytest.fixture(scope="module")
def reference():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(TINY)


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("talk", TALKS)
def test_text_and_ids_are_those_of_transformers(reference, talk, tools, thinking, prompt):
    options = {} if thinking is None else {"enable_thinking": thinking}
    template = dict(tools=tools, add_generation_prompt=prompt, **options)
    text = render_chat(tokenizer, TALKS[talk], **template)
    assert text == reference.apply_chat_template(TALKS[talk], tokenize=False, **template)
    ids = reference.apply_chat_template(TALKS[talk], tokenize=True, return_dict=True, **template)["input_ids"]
    assert tokenizer.encode(text) == ids


def test_other_variables_of_the_template(reference):
    talk = TALKS["turns"]
    text = render_chat(tokenizer, talk, preserve_thinking=False)
    assert text == reference.apply_chat_template(
        talk, tokenize=False, add_generation_prompt=True, preserve_thinking=False
    )
    assert "old thoughts" not in text and "old thoughts" in render_chat(tokenizer, talk)


def test_real_conversations(reference, shared):
    lines = (shared / "data" / "agentic" / "tau_airline.jsonl").read_text().splitlines()
    for line in lines[:20]:
        record = json.loads(line)
        messages = record["messages"] if isinstance(record, dict) else record
        text = render_chat(tokenizer, messages, tools=TOOLS, add_generation_prompt=False)
        parsed = validated(messages)  # transformers hands arguments on as text, which this template refuses
        assert text == reference.apply_chat_template(parsed, tools=TOOLS, tokenize=False)
        assert tokenizer.encode(text) == reference(text)["input_ids"]


def test_arguments_may_be_json_text():
    def call(arguments: object) -> list[dict[str, Any]]:
        return [HI, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]

    arguments = {"a": [1, "x"], "b": "é"}
    assert render_chat(tokenizer, call(json.dumps(arguments))) == render_chat(tokenizer, call(arguments))
    assert render_chat(tokenizer, call("")) == render_chat(tokenizer, call({}))
    flat = [HI, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": json.dumps(arguments)}]}]
    assert render_chat(tokenizer, flat) == render_chat(tokenizer, call(arguments))


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render_chat(tokenizer, [HI | {"content": parts}]) == render_chat(tokenizer, [HI | {"content": "ab"}])


def test_the_caller_keeps_its_messages():
    before = json.dumps(TALKS)
    render_chat(tokenizer, TALKS["tools used"], tools=TOOLS)
    assert json.dumps(TALKS) == before


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("hello", "must be a list"),
        (["hello"], "messages[0]: an object with role and content is needed, got str"),
        ([{"content": "x"}], "messages[0].role must be one of system, developer, user, assistant, tool, got None"),
        ([HI, {"role": "bot", "content": "x"}], "messages[1].role must be one of"),
        ([{"role": "user"}], "messages[0].content is missing"),
        ([{"role": "user", "content": None}], "messages[0].content is missing"),
        ([HI, {"role": "assistant"}], "messages[1].content is missing"),
        ([HI, {"role": "assistant", "tool_calls": []}], "messages[1].content is missing"),
        ([{"role": "user", "content": 3}], "messages[0].content must be text or a list of text parts, got int"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "content[0]: this model reads text parts",
        ),
        ([{"role": "user", "content": [7]}], "this model reads text parts only, got 'int'"),
        ([HI | {"tool_calls": []}], "tool_calls must be a list, in a message of the assistant"),
        ([HI, {"role": "assistant", "tool_calls": {}}], "tool_calls must be a list"),
        ([HI, {"role": "assistant", "tool_calls": ["f"]}], "tool_calls[0] must have a function with a name"),
        ([HI, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}], "a function with a name"),
        ([HI, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}], "arguments are not valid JSON"),
        (
            [HI, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}],
            "must be a JSON object, got list",
        ),
        ([HI | {"extra": object()}], "messages[0].extra: a JSON value is needed, got object"),
        ([HI | {"extra": {1: 2}}], "messages[0].extra: keys must be text, got 1"),
        ([SYSTEM], "template refused the messages: a conversation needs at least one user message"),
        ([HI, SYSTEM], "only the first message may be a system message"),
    ],
)
def test_malformed_messages_are_named(messages, message):
    with pytest.raises(RequestError) as error:
        render_chat(tokenizer, messages)
    assert message in str(error.value)


def test_malformed_tools_and_variables_are_named():
    with pytest.raises(RequestError, match=r"tools\[1\] must be an object with a function that has a name"):
        render_chat(tokenizer, [HI], tools=[TOOLS[0], {"type": "function"}])
    with pytest.raises(RequestError, match="documents: a JSON value is needed, got ndarray"):
        render_chat(tokenizer, [HI], documents=np.zeros(2))


def with_template(directory: pathlib.Path, *named: str) -> Tokenizer:
    (directory / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    templates = [dict(zip(("name", "template"), entry.split("=", 1), strict=True)) for entry in named]
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": templates}))
    return Tokenizer(directory)


def test_named_templates(tmp_path):
    named = with_template(
        tmp_path, "default=plain", "tool_use=tools", "rag={{ bos_token }}{{ documents }}{{ eos_token }}"
    )
    assert render_chat(named, [HI]) == "plain"
    assert render_chat(named, [HI], tools=TOOLS) == "tools"
    assert render_chat(named, [HI], chat_template="rag", documents=["d"]) == "<s>['d']"
    with pytest.raises(RequestError, match="'none'; there are: default, tool_use, rag"):
        render_chat(named, [HI], chat_template="none")
    with pytest.raises(RequestError, match="has no chat template"):
        render_chat(with_template(tmp_path), [HI])


def test_what_templates_may_use(tmp_path):
    source = "{% for m in messages %}{% if m.content == 'stop' %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
    source += "{% generation %}-{{ strftime_now('%Y') | length }}-{% endgeneration %}{{ tools | tojson(indent=1) }}"
    talk = [{"role": "user", "content": content} for content in ("a", "stop", "b")]
    text = render_chat(with_template(tmp_path, f"default={source}"), talk, tools=[{"name": "<é>"}])
    assert text == 'a-4-[\n {\n  "name": "<é>"\n }\n]'


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ render.__globals__ }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_cannot_get_out(tmp_path, attack):
    with pytest.raises(RequestError, match="template refused"):
        render_chat(with_template(tmp_path, f"default={attack}"), [HI])


def test_a_broken_template_is_the_checkpoints_fault(tmp_path):
    with pytest.raises(CheckpointError, match="chat template 'default' is broken"):
        render_chat(with_template(tmp_path, "default={% if %}"), [HI])
