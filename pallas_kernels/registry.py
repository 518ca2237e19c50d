"""Chooses among the implementations of one operation: by name, or by the platform that the program is compiled for."""

from collections.abc import Callable, Mapping

import jax


def choose[F: Callable](
    operation: str, implementations: Mapping[str, F], name: str | None, by_platform: Mapping[str, str]
) -> F:
    """Returns the implementation called `name`, or the platform's own where `name` is None (the reference elsewhere).

    Raises:
        ValueError: no implementation has that name.
    """
    if name is None:
        name = by_platform.get(jax.default_backend(), "reference")
    if name not in implementations:
        raise ValueError(f"{operation} has no implementation {name!r}; it has {', '.join(sorted(implementations))}")
    return implementations[name]
