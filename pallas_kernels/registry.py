"""Chooses among the implementations of one operation: by name, or by the platform that the program is compiled for."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping

import jax

_target: contextvars.ContextVar[str | None] = contextvars.ContextVar("target platform", default=None)


def platform() -> str:
    """The platform that programs are traced for: this process's own, or that of `compiling_for`."""
    return _target.get() or jax.default_backend()


def large_shared_memory() -> bool:
    """Whether a block of the GPU has some 200 KiB of shared memory (data-centre cards), rather than 99 (GB10 and others)."""
    return any(name in jax.devices()[0].device_kind for name in ("H100", "H200", "H20", "GH200", "B200", "B300"))


@contextlib.contextmanager
def compiling_for(name: str) -> Iterator[None]:
    """Traces for another platform ("gpu", "cpu") than this process runs on, to compile without the device."""
    token = _target.set(name)
    try:
        yield
    finally:
        _target.reset(token)


def choose[F: Callable](
    operation: str, implementations: Mapping[str, F], name: str | None, by_platform: Mapping[str, str]
) -> F:
    """Returns the implementation called `name`, or the platform's own where `name` is None (the reference elsewhere).

    Raises:
        ValueError: no implementation has that name.
    """
    if name is None:
        name = by_platform.get(platform(), "reference")
    if name not in implementations:
        raise ValueError(f"{operation} has no implementation {name!r}; it has {', '.join(sorted(implementations))}")
    return implementations[name]
