"""Checks that chat and plain completions share."""

from __future__ import annotations

from collections.abc import Sequence

from atlas_jax.serve.backend import Backend
from atlas_jax.serve.faults import FieldError
from atlas_jax.serve.http.schema import INERT, Request


class UnknownModel(FieldError):
    """Another model than the one that is served."""


def check_model(backend: Backend, name: str) -> None:
    if name != backend.config.name:
        message = f"The model `{name[:100]}` does not exist here; the one that does is `{backend.config.name}`."
        raise UnknownModel(message, "model", "model_not_found")


def check_common(backend: Backend, body: Request) -> int:
    """How many choices are wanted. Raises RequestError, and NotReady."""
    check_model(backend, body.model)
    backend.engine  # noqa: B018  # raises NotReady
    choices = 1 if body.n is None else body.n
    if choices > backend.config.max_choices:
        raise FieldError(f"n may be at most {backend.config.max_choices} here, got {choices}", "n")
    if body.stream_options is not None and not body.stream:
        raise FieldError("stream_options are allowed only with stream", "stream_options")
    return choices


def ignored(body: Request, more: Sequence[str] = ()) -> dict[str, str]:
    """The response header that names what was accepted without effect."""
    names = [name for name in INERT if getattr(body, name, None) not in (None, False)]
    if body.stream_options and body.stream_options.include_obfuscation:
        names.append("stream_options.include_obfuscation")
    names += list(more)[:16]
    return {"x-atlas-ignored": ", ".join(names)} if names else {}
