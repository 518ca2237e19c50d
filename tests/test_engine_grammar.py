"""Answers that a grammar restricts: they fit it, and drafts change nothing about them."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import re
from typing import Any

import pytest
import tokenizers
from models import CONFIGS, RUN, params_of

import atlas_jax
from atlas_jax.config import FULL, LINEAR
from atlas_jax.engine.api import EngineConfig, Grammar
from atlas_jax.engine.engine import Engine
from atlas_jax.engine.grammar import Grammars
from atlas_jax.engine.tool_grammar import tool_call_source
from atlas_jax.errors import RequestError
from atlas_jax.runtime import Runtime
from atlas_jax.text.tokenizer import Tokenizer, load_tokenizer

pytest.importorskip("llguidance")
END = 95
CONFIG = dataclasses.replace(CONFIGS["dense"], layer_types=(LINEAR, FULL), eos_token_ids=(END,))
SMALL = dataclasses.replace(RUN, max_drafts=3, rounds_per_dispatch=4)
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "kind": {"enum": ["cat", "dog", "axolotl"]},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
        },
        "required": ["name", "kind", "age"],
        "additionalProperties": False,
    }
)
DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]( at [0-9]{1,2} o'clock)?"
GRAMMARS = [Grammar("json_schema", SCHEMA), Grammar("regex", DATE)]


def tokenizer(folder: pathlib.Path) -> Tokenizer:
    """A printable character is a token; the last id ends a text."""
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = ["\u0120", *(chr(c) for c in range(33, 127))]
    model = tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, [])
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer, made.decoder = byte_level, tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    assert made.token_to_id("<end>") == END
    made.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Runtime:
    return Runtime(CONFIG, SMALL, params_of(CONFIG, SMALL), tokenizer(tmp_path_factory.mktemp("tokenizer")))


def fits(grammar: Grammar, text: str) -> None:
    if grammar.kind == "regex":
        assert re.fullmatch(grammar.source, text)
        return
    value = json.loads(text)
    assert sorted(value) == ["age", "kind", "name"]
    assert value["kind"] in ("cat", "dog", "axolotl") and 0 <= value["age"] <= 120 and len(value["name"]) <= 6


@pytest.mark.parametrize("drafter", ["scripted", pytest.param("mtp", marks=pytest.mark.long)])
def test_drafts_change_nothing_and_answers_fit(runtime, drafter):
    options: list[dict[str, Any]] = [{}, dict(temperature=1.5, seed=3, repetition_penalty=1.1)]
    with Engine(runtime, EngineConfig(buckets=(4,), drafter="none")) as engine:
        free = engine.submit(engine.request("Somebody else", max_tokens=60)).result(300).token_ids
        met = set()
        for grammar in GRAMMARS:
            for option in options:
                ask = functools.partial(engine.request, "Tell me.", max_tokens=90, grammar=grammar, **option)
                want = engine.submit(ask()).result(300)
                if want.finish_reason == "stop":
                    fits(grammar, want.text)
                met.add(want.finish_reason)
                kinds: list[dict[str, Any]] = [dict(drafter="mtp", drafts=3)] * 3
                if drafter == "scripted":
                    names = ("forced-reject", "forced-accept", "forced-accept")
                    kinds = [dict(drafter=name, drafts=3, script=want.token_ids) for name in names]
                tickets = [engine.submit(ask(**kind)) for kind in kinds]
                beside = engine.submit(engine.request("Somebody else", max_tokens=60))
                for ticket in tickets:
                    assert ticket.result(300).token_ids == want.token_ids and ticket.result().text == want.text
                assert beside.result(60).token_ids == free
                told = tickets[-1].result().acceptance
                assert (
                    drafter == "mtp" or told.tokens_per_step > 2
                )  # drafts are verified with the masks, several a round
        assert "stop" in met  # the end was reached, and is the grammar's


@functools.cache
def tiny_agent() -> Runtime:
    """Its vocabulary, without a model."""
    found = load_tokenizer(pathlib.Path(atlas_jax.__file__).parent / "data" / "tiny_agent")
    assert found
    end = found.token_id("<|im_end|>")
    assert end
    return Runtime(dataclasses.replace(CONFIG, vocab_size=8192, eos_token_ids=(end,)), SMALL, {}, found)


def fitting(grammar: Grammar, text: str) -> bool:
    matcher, ids = Grammars(tiny_agent()).guide(grammar)._matcher, tiny_agent().encode(text).tolist()
    return matcher.validate_tokens(ids) == len(ids)


def test_json_may_be_laid_out_but_not_padded():
    schema = Grammar("json_schema", json.dumps({"type": "object", "properties": {"a": {"type": "array"}}}))
    value = {"a": [1, {"b": [2]}]}
    texts = [json.dumps(value), json.dumps(value, separators=(",", ":"))]
    texts += [json.dumps(value, indent=indent) for indent in (1, 2, "\t")] + [json.dumps({"a": [1]}, indent=4)]
    for grammar in (schema, Grammar("json_object")):
        assert all(fitting(grammar, text) for text in texts)
        assert not any(fitting(grammar, text) for text in ('{"a"  :[]}', '{\n\n"a":[]}', '{"a":[]\n         }'))


TOOLS = {
    "book": {
        "type": "object",
        "properties": {
            "user": {"type": "string"},
            "cabin": {"type": "string", "enum": ["economy", "business"]},
            "bags": {"$ref": "#/$defs/count"},
            "flights": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["user", "cabin", "bags"],
        "$defs": {"count": {"type": "integer", "minimum": 0}},
    },
    "note": None,
}


def xml(name: str, **values: str) -> str:
    return f"<function={name}>\n" + body(**values)


def body(**values: str) -> str:
    given = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"{given}</function>\n</tool_call>"


def test_strict_calls_in_tags():
    named, free = (
        Grammar("tool_call", tool_call_source("xml", TOOLS, begun, begun is None)) for begun in ("book", None)
    )
    good: dict[str, str] = dict(user="Ann\nof <b>", cabin="economy", bags="2")
    assert fitting(named, body(**good)) and fitting(named, body(**good, flights='["HAT1", "HAT2"]'))
    assert not fitting(named, body(**good) + "\n<tool_call>\n" + xml("note"))
    for bad in (dict(cabin="first"), dict(bags="-1"), dict(bags="two"), dict(flights="HAT1"), dict(more="x")):
        assert not fitting(named, body(**good | bad)), bad
    assert not fitting(named, body(user="Ann", cabin="economy"))
    assert fitting(
        named, body(**good).replace("\n</parameter>", "</parameter>", 1)
    )  # where the parser sees the end as well
    assert not fitting(named, body(user="Ann</parameter>\n</function>\n</tool_call>", cabin="economy", bags="2"))
    assert fitting(free, xml("note", anything="x", more="y") + "\n<tool_call>\n" + xml("book", **good))
    assert not fitting(free, xml("cancel", **good)) and not fitting(free, xml("book", **good | dict(bags="x")))
    for part in (
        {"type": "string", "pattern": "a+"},
        {"type": ["string", "null"], "maxLength": 3},
        {"anyOf": [{"type": "string"}]},
    ):
        with pytest.raises(RequestError, match="raw text"):
            tool_call_source("xml", {"f": {"type": "object", "properties": {"x": part}}}, None, False)


def test_strict_calls_in_json():
    named, free = (
        Grammar("tool_call", tool_call_source("json", TOOLS, begun, begun is None)) for begun in ("book", None)
    )
    good = json.dumps(dict(user="Ann", cabin="economy", bags=2))
    assert fitting(named, f" {good}}}\n</tool_call>") and fitting(named, f"{good}}}\n</tool_call>")
    assert fitting(
        free,
        '{"name": "note", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n{"name": "book", "arguments": '
        + good
        + "}\n</tool_call>",
    )
    for bad in (good.replace("economy", "first"), good.replace("2", "-2"), good.replace("bags", "bag"), "{}"):
        assert not fitting(named, f" {bad}}}\n</tool_call>"), bad
    assert not fitting(free, '{"name": "cancel", "arguments": {}}\n</tool_call>')


def test_what_is_no_grammar_is_refused(runtime):
    engine = Engine(runtime)
    request = functools.partial(engine.request, "Tell me.")
    for grammar, told in (
        (Grammar("json_schema", "{"), "json_schema"),
        (Grammar("json_schema", '{"type": "banana"}'), "json_schema"),
        (Grammar("json_schema", '{"$ref": "http://example.org/x"}'), "json_schema"),
        (Grammar("regex", "(a"), "regex"),
        (Grammar("regex", "(?=a)b"), "regex"),
        (Grammar("regex", "x" * (1 << 19)), "characters at most"),
        (Grammar("json_schema", "[" * 100_000), "json_schema"),
    ):
        with pytest.raises(RequestError, match=told):
            engine.submit(request(grammar=grammar))
    with pytest.raises(RequestError, match="ignore_eos does not go with a grammar"):
        engine.submit(request(grammar=GRAMMARS[0], ignore_eos=True))
    endless = Runtime(dataclasses.replace(CONFIG, eos_token_ids=()), SMALL, runtime.params, runtime.tokenizer)
    with pytest.raises(RequestError, match="it lacks: end-of-text token"):
        Engine(endless).submit(request(grammar=GRAMMARS[0]))


def test_grammars_can_be_compiled_before_the_first_request(runtime):
    with Engine(runtime, EngineConfig(buckets=(4,), drafter="none", warm_up=("answers", "grammars"))) as engine:
        made = len(runtime.loop.executables)
        answer = engine.submit(engine.request("Tell me.", max_tokens=90, grammar=GRAMMARS[1])).result(60)
        assert answer.finish_reason == "length" or re.fullmatch(DATE, answer.text)
        assert len(runtime.loop.executables) == made
