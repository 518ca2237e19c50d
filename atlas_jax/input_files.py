"""Files that a user names: text, and one JSON object a line."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

from atlas_jax.errors import RequestError


def read_text(path: str | os.PathLike[str], name: str | None = None) -> str:
    """A file's text, in UTF-8. Raises RequestError, which calls it `name` (by default its path)."""
    name = str(path) if name is None else name
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{name}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not text in UTF-8: {error}") from None


def read_json_lines[T](
    path: str | os.PathLike[str], parse: Callable[[int, Any], T], *, name: str | None = None, limit: int | None = None
) -> list[T]:
    """What `parse` makes of the number and the content of each line that is not empty.

    Args:
        parse: may raise ValueError, which RequestError is, for a line that is wrong.
        name: what errors call the file; by default its path.
        limit: reads no more lines than this.

    Raises:
        RequestError: the file cannot be read or is not text; or naming the line that is wrong.
    """
    name = str(path) if name is None else name
    lines = read_text(path, name).split("\n")
    out: list[T] = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or (limit is not None and len(out) >= limit):
            continue
        try:
            out.append(parse(number, json.loads(line)))
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{name}, line {number}: {error}") from None
    return out
