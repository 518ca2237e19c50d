"""Grammars that cannot work, or would take too long: refused in one line, and no answer waits for them."""

import dataclasses
import json
import pathlib
import time

import numpy as np
import pytest
from models import CONFIGS, RUN

import atlas_jax
from atlas_jax.engine.api import Grammar
from atlas_jax.engine.grammar import Grammars, check_repeats
from atlas_jax.engine.tool_grammar import tool_call_source
from atlas_jax.errors import GrammarError
from atlas_jax.runtime import Runtime
from atlas_jax.text.tokenizer import load_tokenizer

pytest.importorskip("llguidance")
WORDS = 8192 // 32


def of_vocabulary(size):
    """Tiny-agent's vocabulary, without a model."""
    found = load_tokenizer(pathlib.Path(atlas_jax.__file__).parent / "data" / "tiny_agent")
    assert found
    config = dataclasses.replace(CONFIGS["dense"], vocab_size=size, eos_token_ids=(found.token_id("<|im_end|>") or 0,))
    return Grammars(Runtime(config, RUN, {}, found))


@pytest.fixture(scope="module")
def grammars():
    return of_vocabulary(8192)


def optional(count):
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}}


REGEXES = ["a{1000000}", "x{2,99999}", "a{0010001,}", "a{9" + "9" * 5000 + "}", "(a{1000}){1000}", r"[^\x00-\x{10FFFF}]",
           r"a[^\x00-\x{10FFFF}]", "(", "(?=a)b", r"(a)\1", "\ud800", "(" * 2000 + "a" + ")" * 2000]  # fmt: skip
SCHEMAS = [{"$ref": "#"}, {"anyOf": [{"$ref": "#"}]}, {"allOf": [{"$ref": "#"}]}, optional(500), optional(1500), 5, [], None, False,
           {"type": "nope"}, {"type": 5}, {"enum": []}, {"enum": 5}, {"not": {}}, {"type": "object", "required": 5},
           {"type": "string", "minLength": 5, "maxLength": 2}, {"oneOf": []}]  # fmt: skip


@pytest.mark.parametrize(
    "grammar",
    [Grammar("regex", text) for text in REGEXES]
    + [Grammar("json_schema", json.dumps(schema)) for schema in SCHEMAS]
    + [Grammar("json_schema", "{"), Grammar("json_schema", "[" * 100_000), Grammar("tool_call", "{}")],
    ids=lambda grammar: f"{grammar.kind}-{ascii(grammar.source)[:20]}",
)
def test_they_are_refused_in_one_line(grammars, grammar):
    with pytest.raises(GrammarError) as found:
        grammars.guide(grammar)
    said = str(found.value)
    assert said.startswith(grammar.kind) and "\n" not in said and len(said) < 600, said
    assert not any(inside in said for inside in ("NoExtensionBias", "<state>", "grm_prefix", "<non-verbose")), said


def test_what_is_wrong_is_said(grammars):
    for grammar, says in ((Grammar("regex", "a("), "unclosed group"), (Grammar("regex", r"(a)\1"), "backreferences"),
                          (Grammar("json_schema", json.dumps({"type": "string", "pattern": "("})), "unclosed group"),
                          (Grammar("json_schema", json.dumps(optional(500))), "fewer optional properties")):  # fmt: skip
        with pytest.raises(GrammarError, match=says):
            grammars.guide(grammar)


def test_probing_changes_nothing(grammars):
    """A guide that was tried out begins where one that was not does."""
    for source in ("(ab|ac)*d", "a{10000}", r"[a-z]{1,20}", "Hello there, how are you"):
        guide = grammars.guide(Grammar("regex", source))
        masks = [np.zeros((1, WORDS), np.int32) for _ in range(2)]
        guide.masks([], 1, masks[0])
        assert not guide.probe(WORDS)
        guide.masks([], 1, masks[1])
        assert masks[0].any() and (masks[0] == masks[1]).all()


def test_what_asks_too_much_later_ends_in_one_line(grammars):
    """Steps are short all the same: what llguidance may do in one is bounded."""
    properties = {"first": {"type": "string"}, "p": {"type": "string", "pattern": "^(a{1000}){1000}$"}}
    schema = {"type": "object", "properties": properties, "required": ["first", "p"]}
    guide = grammars.guide(Grammar("json_schema", json.dumps(schema)))
    mask, longest = np.zeros((1, WORDS), np.int32), 0.0
    for token in grammars.runtime.tokenizer.encode('{"first":"x","p":"' + "a" * 20):
        began = time.thread_time()
        guide.masks([], 1, mask)
        longest = max(longest, time.thread_time() - began)
        if guide.error:
            break
        guide.take([token])
    assert "too much" in guide.error and "\n" not in guide.error and "non-verbose" not in guide.error
    assert longest < 0.5, "it was 0.03 s where this was written"


def test_repeats():
    for fine in ("a{10000}", "a{,5}", "a{1,}", "[{]99999}", "a{00010000}"):
        check_repeats(fine)


BAD = [{"a": {"anyOf": 5}}, {"a": {"anyOf": None}}, {"a": {"type": "integer", "allOf": {}}}, {"a": {"enum": []}},
       {"a": {"enum": 5}}, {"a": {"type": {"x": 1}}}, {"a": {"type": [["string"]]}}, {"a": {"$ref": 5}}, 5, None]  # fmt: skip


@pytest.mark.parametrize("form", ["xml", "json"])
def test_schemas_of_tools_that_are_none(grammars, form):
    schemas = [{"type": "object", "properties": part} for part in BAD]
    schemas += [{"properties": {"a": {}}, "required": wrong} for wrong in (None, 5, True, "a", [5])]
    schemas += [{"$defs": 5}, {"type": 5}]
    for schema in schemas:
        with pytest.raises(GrammarError, match=r"^f: .* must be "):
            tool_call_source(form, {"f": schema}, None, more=True)
    # What has the right shape and still cannot be: refused by the library, or by name.
    for part in ({"type": "integer", "minimum": "x"}, {"type": "array", "items": 5}):
        source = tool_call_source(form, {"f": {"properties": {"a": part}, "required": ["a"]}}, None, more=True)
        with pytest.raises(GrammarError):
            grammars.guide(Grammar("tool_call", source))
    for part in (
        True,
        {"type": "string"},
        {"const": {"b": 1}},
        {"enum": ["é", "\t", "\\"]},
        {"type": ["integer", "null"]},
    ):
        schema = {"type": "object", "properties": {"a": part}, "required": ["a"]}
        grammars.guide(Grammar("tool_call", tool_call_source(form, {"f": schema, "g": None}, None, more=True)))


def test_a_runtime_of_another_vocabulary():
    """The probe's mask is as wide as the model's vocabulary, which need not fill its last word."""
    assert not of_vocabulary(8192 + 5).guide(Grammar("regex", "a+")).error
