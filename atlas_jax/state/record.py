"""Many small values of each slot in one array, so that a compiled step has few arguments."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from atlas_jax.shapes import Array, Int


class Field(NamedTuple):
    """A value that each slot has: an int32, a uint32 or float32 (kept as their bits) or a bool (0 or 1), or an array of them."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: Literal["int32", "uint32", "float32", "bool"] = "int32"

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def words(self, value: Any) -> Int[Array, "*any"]:
        x = jnp.asarray(value).astype(self.dtype)
        return x.astype(jnp.int32) if self.dtype in ("int32", "bool") else jax.lax.bitcast_convert_type(x, jnp.int32)

    def value(self, words: Int[Array, "*any"]) -> Array:
        if self.dtype == "bool":
            return words != 0
        return words if self.dtype == "int32" else jax.lax.bitcast_convert_type(words, jnp.dtype(self.dtype))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Record:
    """Fields of S slots side by side. `record["name"]` is a field as an array [S, *shape]."""

    words: Int[Array, "S words"]
    fields: tuple[Field, ...] = dataclasses.field(metadata=dict(static=True))

    def __getitem__(self, name: str) -> Array:
        field, place = self._field(name), self.place(name)
        words = self.words[:, place : place + field.size]
        return field.value(words.reshape(words.shape[0], *field.shape))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._field(name).shape

    def place(self, name: str) -> int:
        """The word where a field begins."""
        names = [field.name for field in self.fields]
        return sum(field.size for field in self.fields[: names.index(name)])

    def put(self, slots: Int[Array, "*B"], **values: Any) -> Record:
        """Sets fields of some slots, or of one (a scalar); values are [*B, *shape] or broadcast to it. Slots may repeat where
        nobody reads them, as the sentinel does."""
        slots = slots.reshape(-1)
        B, words = slots.shape[0], self.words
        for name, *rest in self._runs(list(values)):
            parts = []
            for field in map(self._field, (name, *rest)):
                x = jnp.asarray(values[field.name])
                x = x.reshape(B, *field.shape) if x.size == B * field.size else x
                parts.append(field.words(jnp.broadcast_to(x, (B, *field.shape))).reshape(B, -1))
            new, place = jnp.concatenate(parts, axis=1), self.place(name)
            if B == 1:
                words = jax.lax.dynamic_update_slice(words, new, (slots[0], place))
            else:
                words = words.at[slots, place : place + new.shape[1]].set(new)
        return dataclasses.replace(self, words=words)

    def put_at(self, name: str, slots: Int[Array, " B"], at: Int[Array, "B n"], value: Int[Array, "B n"]) -> Record:
        """Sets places `at` of a field of integers that is a vector."""
        return dataclasses.replace(self, words=self.words.at[slots[:, None], self.place(name) + at].set(value))

    def add_at(self, name: str, slots: Int[Array, " B"], at: Int[Array, "B n"], value: Int[Array, "B n"]) -> Record:
        """Adds to places `at` of a field of integers that is a vector."""
        return dataclasses.replace(self, words=self.words.at[slots[:, None], self.place(name) + at].add(value))

    def _field(self, name: str) -> Field:
        return next(field for field in self.fields if field.name == name)

    def _runs(self, names: list[str]) -> list[list[str]]:
        """`names` in order of place, those that are neighbours together."""
        runs: list[list[str]] = []
        end = -1
        for field in self.fields:
            if field.name in names:
                place = self.place(field.name)
                if place == end:
                    runs[-1].append(field.name)
                else:
                    runs.append([field.name])
                end = place + field.size
        assert sum(map(len, runs)) == len(names), f"no such field among {names}"
        return runs


def record(slots: int, fields: tuple[Field, ...], **values: Any) -> Record:
    """Fields of `slots` slots, zero but for `values`, which are [*shape], [slots, *shape] or broadcast to it."""
    made = Record(jnp.zeros((slots, sum(field.size for field in fields)), jnp.int32), fields)
    shapes = {field.name: field.shape for field in fields}
    full = {name: jnp.broadcast_to(jnp.asarray(x), (slots, *shapes[name])) for name, x in values.items()}
    return made.put(jnp.arange(slots), **full)
