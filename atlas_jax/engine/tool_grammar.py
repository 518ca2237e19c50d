"""The rest of an answer that was made to begin as a tool call, as a grammar: a known name, arguments that its schema allows.

Both forms that `serve.answer_parser` reads, whichever the model's template teaches. In the XML-like one, text is written raw and
other values as JSON. In JSON, the arguments are an object by the schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

from atlas_jax.errors import GrammarError

# Of a text parameter's schema, what can be held to where text is written raw: its values, and nothing else that restricts it.
_HELD = {"type", "enum", "const", "title", "description", "default", "examples"}
_SAYING = {"enum", "const", "anyOf", "oneOf", "allOf", "$ref"}
_NESTING = 8  # how far references are followed
_RAW = """
raw: value "\\n"
value[lazy]: TEXT "</parameter>"
TEXT: /(.|\\n)*/
NAME: /[^<>\\n]{1,128}/
"""

Form = Literal["xml", "json"]


def tool_call_source(form: Form, tools: Mapping[str, Mapping[str, Any] | None], begun: str | None, more: bool) -> str:
    """The source of a `Grammar` of the kind "tool_call".

    Args:
        tools: schemas by name; None for a tool that is not strict, whose arguments may be anything.
        begun: the name, where the answer's beginning already has it.
        more: whether further calls may follow.

    Raises:
        GrammarError: a schema is none, or asks for what this form cannot be held to.
    """
    for name, schema in tools.items():
        _check_shape(name, schema or {})
        if form == "xml" and schema is not None:
            for key, part in _properties(schema):
                _check(name, key, part)
    return json.dumps(dict(form=form, tools=tools, begun=begun, more=more))


def lark(source: str, special: Callable[[str], bool], json_options: Mapping[str, Any]) -> str:
    """The grammar for llguidance, of `tool_call_source`. `special` says whether a text is one token that is no text."""
    about = json.loads(source)
    begin, end = (tag if special(tag) else json.dumps(tag) for tag in ("<tool_call>", "</tool_call>"))
    bodies = [_body(about["form"], schema, json_options) for schema in about["tools"].values()]
    heads = ["<function=%s>\n" if about["form"] == "xml" else '{"name": "%s", "arguments":'] * len(bodies)
    calls = [
        f"{json.dumps(head % name)} body_{i}" for i, (head, name) in enumerate(zip(heads, about["tools"], strict=True))
    ]
    first = f"body_{[*about['tools']].index(about['begun'])}" if about["begun"] else "call"
    again = f'("\\n" {begin} "\\n" call {end})*' if about["more"] else ""
    lines = ["%llguidance {}", f"start: {first} {end} {again}", f"call: {' | '.join(calls)}"]
    return "\n".join([*lines, *(f"body_{i}: {body}" for i, body in enumerate(bodies))]) + _RAW


def _body(form: Form, schema: Mapping[str, Any] | None, json_options: Mapping[str, Any]) -> str:
    """What follows the name, up to the closing tag of the call."""
    as_json = lambda schema: "%json " + json.dumps({**schema, "x-guidance": json_options})  # noqa: E731
    if form == "json":
        return f'" "? {as_json(schema or dict(type="object"))} "}}\\n"'
    parts = [] if schema is not None else ['("<parameter=" NAME ">\\n" raw)*']
    for key, part in _properties(schema or {}):
        value = "raw" if _is_raw(part) else f'{as_json({**_definitions(schema or {}), **part})} "\\n</parameter>\\n"'
        if (values := _values(part)) is not None:
            texts = [v if isinstance(v, str) else json.dumps(v) for v in values]
            value = f'({" | ".join(json.dumps(text) for text in texts)}) "\\n</parameter>\\n"'
        needed = key in (schema or {}).get("required", ())
        parts.append(f"({json.dumps(f'<parameter={key}>' + chr(10))} {value}){'' if needed else '?'}")
    return " ".join([*parts, '"</function>\\n"'])


def _properties(schema: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    found = schema.get("properties")
    pairs = found.items() if isinstance(found, Mapping) else ()
    return [(key, _resolved(schema, part)) for key, part in pairs if isinstance(part, dict)]


def _resolved(schema: Mapping[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """What a reference into the schema stands for; the type decides how a value is written."""
    for _ in range(_NESTING):
        reference = part.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        target: Any = schema
        for key in reference[2:].split("/"):
            target = target.get(key) if isinstance(target, Mapping) else None
        if not isinstance(target, dict):
            break
        part = target
    return part


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}


def _values(part: Mapping[str, Any]) -> list[Any] | None:
    return [part["const"]] if "const" in part else part.get("enum") if isinstance(part.get("enum"), list) else None


def _is_raw(part: Mapping[str, Any]) -> bool:
    """Whether text is among its values, or it does not say."""
    kinds = part.get("type")
    if kinds is None:
        return not _SAYING & set(part)
    return "string" in (kinds if isinstance(kinds, list) else [kinds])


def _check_shape(tool: str, schema: Mapping[str, Any]) -> None:
    """Of what is read here; the rest is llguidance's to check."""
    _check_keys(tool, schema)
    for key, part in _properties(schema):
        _check_keys(f"{tool}: parameter {key!r:.100}", part)


def _check_keys(where: str, schema: Mapping[str, Any]) -> None:
    texts = lambda value: isinstance(value, list) and all(isinstance(text, str) for text in value)  # noqa: E731
    filled = lambda value: isinstance(value, list) and bool(value)  # noqa: E731
    objects = lambda value: isinstance(value, dict)  # noqa: E731
    rules: list[tuple[str, str, Callable[[Any], bool]]] = [
        ("type", "the name of a type, or a list of such", lambda value: isinstance(value, str) or texts(value)),
        ("required", "a list of names", texts),
        ("enum", "a list of at least one value", filled),
        *((key, "a list of at least one schema", filled) for key in ("anyOf", "oneOf", "allOf")),
        *((key, "an object", objects) for key in ("properties", "$defs", "definitions")),
        ("$ref", "text", lambda value: isinstance(value, str)),
    ]
    for key, needed, fits in rules:
        if key in schema and not fits(schema[key]):
            raise GrammarError(f"{where}: {key} must be {needed}, got {json.dumps(schema[key]):.100}")


def _check(tool: str, key: str, part: Mapping[str, Any]) -> None:
    beyond = sorted(set(part) - _HELD) if _is_raw(part) else []
    nested = [
        p for name in ("anyOf", "oneOf", "allOf") for p in part.get(name, ()) if isinstance(p, Mapping) and _is_raw(p)
    ]
    if beyond or nested:
        what = ", ".join(beyond) or "a choice that text is among"
        raise GrammarError(
            f"{tool}: parameter {key!r:.100} is written as raw text in this model's form of calls, which cannot be held to {what}; "
            "leave it out, or strict"
        )
