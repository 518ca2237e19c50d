"""What every reader of a quantised layout offers, and the checks they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from atlas_jax.weights.quantised.codes import Codes
from atlas_jax.weights.quantised.scheme import INT4_GROUPS, Scheme

FLOATS = ("F32", "BF16", "F16")


class Want(NamedTuple):
    """What a tensor must be like."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]


@runtime_checkable
class Format(Protocol):
    """The layout of one linear layer's weight, N outputs by K inputs, in tensors `module.NAME`. Hashable."""

    @property
    def scheme(self) -> Scheme: ...

    @property
    def unused(self) -> tuple[str, ...]:
        """Names of tensors that may be there and are not needed: activations are not quantised here."""
        ...

    def tensors(self, N: int, K: int) -> dict[str, Want]:
        """The tensors by name."""
        ...

    def prepare(self, tensors: dict[str, np.ndarray], N: int, K: int) -> dict[str, np.ndarray]:
        """Looks at small tensors before anything is read, and leaves out those that say nothing.

        Raises:
            ValueError: they say what this runtime cannot do exactly.
        """
        ...

    def codes(self, tensors: Mapping[str, Any], N: int, K: int) -> Codes:
        """The weight; traced. F8 tensors come as their bits."""
        ...


class Unsupported(ValueError):
    """A scheme that this runtime does not read; the text names it."""


@dataclasses.dataclass(frozen=True)
class Plain:
    """Parts of readers whose small tensors need no look."""

    def prepare(self, tensors: dict[str, np.ndarray], N: int, K: int) -> dict[str, np.ndarray]:
        return tensors


def boolean(what: str, about: Mapping[str, Any], name: str) -> bool:
    """A setting that is true where nothing is said.

    Raises:
        Unsupported: it is neither true nor false; the text begins with `what`.
    """
    value = about.get(name, True)
    if not isinstance(value, bool):
        raise Unsupported(f"{what} with {name} {value!r:.100}; true and false can be read")
    return value


def int4_scheme(what: str, bits: Any, group: Any, symmetric: bool) -> Scheme:
    """The scheme of integers in groups of `group` inputs (-1 or None: a whole channel).

    Raises:
        Unsupported: other widths or groups; the text begins with `what`.
    """
    if bits != 4:
        raise Unsupported(f"{what} with {bits} bits; integers of 4 bits can be read")
    if group in (-1, None):
        return Scheme("int4", None, symmetric)
    if type(group) is not int or not (group in INT4_GROUPS or (group > 0 and group % 128 == 0)):
        raise Unsupported(f"{what} in groups of {group}; groups of 32, 64, or a multiple of 128 inputs can be read")
    return Scheme("int4", group, symmetric)


def groups(K: int, group: int | None) -> int:
    """How many groups `K` inputs make."""
    return 1 if group is None else -(-K // group)


def trivial_zeros(zeros: np.ndarray) -> bool:
    """Whether every zero point, packed as eight nibbles a word, is 8."""
    return bool((np.asarray(zeros).view(np.uint32) == 0x88888888).all())
