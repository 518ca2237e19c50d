"""Values of `<parameter=…>` tags as JSON, by the tool's parameter schema: text is written raw there, other values as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_KINDS = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    dict: "object",
    list: "array",
}
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_NESTING = 8  # how far $ref and anyOf are followed


def is_text(schema: Mapping[str, Any], name: str) -> bool:
    """Whether the parameter is text whatever its value looks like. One that the schema does not know is."""
    return _allowed(schema, name) == {"string"}


def argument_text(schema: Mapping[str, Any], name: str, value: str) -> str:
    """The JSON text of a parameter's value: of the schema's type if it can be read as such, otherwise text."""
    allowed = _allowed(schema, name)
    try:
        parsed = json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        parsed = _WORDS.get(value.strip().lower(), value)
    kind = _KINDS[type(parsed)]
    if kind in allowed or (kind == "integer" and "number" in allowed):
        return json.dumps(parsed, ensure_ascii=False)
    if kind == "number" and "integer" in allowed and float(parsed).is_integer():
        return json.dumps(int(parsed))
    return json.dumps(value, ensure_ascii=False)


def _allowed(schema: Mapping[str, Any], name: str) -> set[str]:
    properties = schema.get("properties")
    part = properties.get(name) if isinstance(properties, Mapping) else None
    return (_types(part, schema, _NESTING) if part is not None else set()) or {"string"}


def _types(part: Any, schema: Mapping[str, Any], depth: int) -> set[str]:
    """JSON types that a schema allows; empty if it does not say."""
    if not isinstance(part, Mapping) or depth == 0:
        return set()
    out: set[str] = set()
    kinds = part.get("type")
    out |= {kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)}
    if isinstance(reference := part.get("$ref"), str) and reference.startswith("#/"):
        target: Any = schema
        for key in reference[2:].split("/"):
            target = target.get(key) if isinstance(target, Mapping) else None
        out |= _types(target, schema, depth - 1)
    for key in ("anyOf", "oneOf", "allOf"):
        for choice in part[key] if isinstance(part.get(key), list) else ():
            out |= _types(choice, schema, depth - 1)
    values = part["enum"] if isinstance(part.get("enum"), list) else [part["const"]] if "const" in part else []
    return out or {_KINDS[type(value)] for value in values if type(value) in _KINDS}


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
