"""A checkpoint's linear layers as they are stored: which tensors each consists of."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from atlas_jax.weights.checkpoint import Checkpoint
from atlas_jax.weights.names import Leaf, Part, Weight, may_be_quantised
from atlas_jax.weights.quantised.formats import FLOATS, Format, Want
from atlas_jax.weights.quantised.recipe import CACHE_SCALES, Recipe
from atlas_jax.weights.safetensors import Entry

WEIGHT = ".weight"


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor of a plan as it is stored: by itself (`format` None), or in the tensors of a quantised layer.

    Attributes:
        names: the checkpoint's tensors, by their names in the format ("" for a plain one).
        wants: what each must be like.
    """

    name: str
    shape: tuple[int, ...]
    format: Format | None
    names: Mapping[str, str]
    wants: Mapping[str, Want]

    def prepared(self, checkpoint: Checkpoint) -> dict[str, np.ndarray]:
        """Views of the tensors that make up the weight; F8 as bits.

        Raises:
            ValueError: a small tensor says what this runtime cannot do exactly.
        """
        views = {key: checkpoint.read(name) for key, name in self.names.items()}
        if self.format is None:
            return views
        views = self.format.prepare(views, self.shape[0], self.shape[1])
        return {
            key: view.view(np.uint8) if view.dtype.name.startswith("float8") else view for key, view in views.items()
        }


def stored(part: Part, join: Any, entries: Mapping[str, Entry], recipe: Recipe | None) -> tuple[Stored, ...]:
    """What each tensor of a part is stored as."""
    return tuple(_stored(name, part.shape, join, entries, recipe) for name in part.names)


def _stored(
    name: str, shape: tuple[int, ...], join: Any, entries: Mapping[str, Entry], recipe: Recipe | None
) -> Stored:
    plain = Stored(name, shape, None, {"": name}, {"": Want((shape,), FLOATS)})
    if recipe is None or not name.endswith(WEIGHT) or len(shape) != 2 or not may_be_quantised(join):
        return plain
    if name in entries and entries[name].dtype in FLOATS:  # left as it was, whatever the config says
        return plain
    module = name.removesuffix(WEIGHT)
    layout = recipe.of(module)
    if layout is None:
        return plain
    names, wants = {}, {}
    for keys, want in layout.tensors(*shape).items():
        alternatives = keys.split("|")
        key = next((key for key in alternatives if f"{module}.{key}" in entries), alternatives[0])
        names[key], wants[key] = f"{module}.{key}", want
    return Stored(name, shape, layout, names, wants)


def of_leaves(leaves: Iterable[Leaf], entries: Mapping[str, Entry], recipe: Recipe | None) -> Iterator[Stored]:
    for leaf in leaves:
        for weight in leaf.weights:
            yield from of_weight(weight, entries, recipe)


def of_weight(weight: Weight, entries: Mapping[str, Entry], recipe: Recipe | None) -> Iterator[Stored]:
    for part in weight.parts:
        yield from stored(part, weight.join, entries, recipe)


def unused(found: Iterable[Stored], entries: Mapping[str, Entry]) -> set[str]:
    """Tensors beside quantised layers that this runtime does without: scales of activations and of a quantised KV cache."""
    out = set()
    for layer in found:
        if layer.format is not None:
            module = layer.name.removesuffix(WEIGHT)
            out |= {f"{module}.{suffix}" for suffix in (*layer.format.unused, *CACHE_SCALES)}
            out |= {f"{module.rpartition('.')[0]}.{suffix}" for suffix in CACHE_SCALES}
    return out & entries.keys()
