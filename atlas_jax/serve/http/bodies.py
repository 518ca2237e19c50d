"""From bytes to a checked request, and OpenAI's error for what is wrong with them."""

from __future__ import annotations

import json
from typing import Any

import pydantic

from atlas_jax.serve.faults import FieldError

MAX_NESTING = 64  # of objects and lists; Python's parser gives up at about a thousand


def parse[M: pydantic.BaseModel](body: bytes, kind: type[M]) -> M:
    """Raises FieldError: not JSON, nested too deeply, or not what `kind` says."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_number)
    except UnicodeDecodeError:
        raise FieldError("the body is not UTF-8") from None
    except RecursionError:
        raise FieldError("the body is nested too deeply") from None
    except ValueError as error:
        raise FieldError(f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise FieldError("the body must be a JSON object")
    if _nesting(value) > MAX_NESTING:
        raise FieldError(f"the body is nested more than {MAX_NESTING} deep")
    try:
        return kind.model_validate(value)
    except pydantic.ValidationError as error:
        raise _explained(error) from None


def _explained(error: pydantic.ValidationError) -> FieldError:
    """The first thing that is wrong, in OpenAI's words where they have some."""
    first = min(error.errors(include_url=False, include_input=False), key=lambda e: e["type"] == "extra_forbidden")
    path = [part for part in first["loc"] if isinstance(part, int) or part.isidentifier()]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")[:200]
    if first["type"] == "missing":
        return FieldError(f"Missing required parameter: '{field}'.", field, "missing_required_parameter")
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])[:100]
        return FieldError(f"Unknown parameter: '{name}'.", name, "unknown_parameter")
    return FieldError(f"Invalid value for '{field}': {first['msg']}.", field, "invalid_value")


def _nesting(value: Any) -> int:
    """Depth of objects and lists, without recursion."""
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, (dict, list))]:
        depth += 1
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return depth


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
