"""One weight, or a stack of them, from the tensors that a checkpoint stores it in."""

from __future__ import annotations

import dataclasses
import functools
import mmap
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax.errors import CheckpointError
from atlas_jax.weights.checkpoint import Checkpoint
from atlas_jax.weights.names import Join, Weight, matrix, rows_of
from atlas_jax.weights.quantised.codes import Codes, joined, packed
from atlas_jax.weights.quantised.formats import Format
from atlas_jax.weights.quantised.modules import Stored, stored
from atlas_jax.weights.quantised.recipe import Recipe
from pallas_kernels.w4a16 import ByLayer, SideBySide

Views = dict[str, list[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a part of a weight is made of its tensors; a static argument."""

    format: Format | None
    shape: tuple[int, ...]
    experts: bool


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A weight that is ready to be read.

    Attributes:
        layers: what its parts are stored as.
        views: of each part: its tensors, of every expert.
        groups: which parts lie in one array: those of one form.
    """

    layers: tuple[Stored, ...]
    views: tuple[Views, ...]
    kinds: tuple[Kind, ...]
    groups: tuple[tuple[int, ...], ...]
    join: Join
    dtype: str

    @functools.cached_property
    def form(self) -> Any:
        """What the weight will be like, as `jax.eval_shape` says it."""
        shapes = tuple(
            tuple((key, _stacked_shape(x, kind)) for key, x in views.items())
            for views, kind in zip(self.views, self.kinds, strict=True)
        )
        return _form_of(self.kinds, self.groups, self.join, self.dtype, shapes)

    def touch(self) -> None:
        """Has the file's pages read. numpy lets other threads run meanwhile, which an access by `mmap` does not."""
        for tensors in self.views:
            for x in (x for parts in tensors.values() for x in parts if x.size):
                x.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE].max()

    def value(self) -> Any:
        """The weight, on the device."""
        arrays = [
            {key: jax.device_put(np.stack(x) if kind.experts else x[0]) for key, x in views.items()}
            for views, kind in zip(self.views, self.kinds, strict=True)
        ]
        # Waiting bounds what is in flight: the copies to the device read the tensors' memory.
        return jax.block_until_ready(_build(self.kinds, self.groups, self.join, self.dtype, arrays))

    def release(self, checkpoint: Checkpoint) -> int:
        """Lets go of the file's pages; returns how many bytes the tensors have."""
        names = [name for layer in self.layers for name in layer.names.values()]
        for name in names:
            checkpoint.release(name)
        return sum(checkpoint.entries[name].nbytes for name in names)


def prepare(checkpoint: Checkpoint, weight: Weight, recipe: Recipe | None, dtype: str) -> Prepared:
    """Reads what is small and decides how the rest goes together.

    Raises:
        CheckpointError: a small tensor says what cannot be done exactly.
    """
    layers, views, kinds = [], [], []
    for part in weight.parts:
        found = stored(part, weight.join, checkpoint.entries, recipe)
        formats = {layer.format for layer in found}
        if len(formats) > 1:
            raise CheckpointError(
                f"{checkpoint.directory}: the experts of {found[0].name} and others are not quantised alike; "
                "quantise all experts of a layer in one way"
            )
        tensors = [_prepared(checkpoint, layer) for layer in found]
        keys = {key for each in tensors for key in each}
        for each in tensors:  # of some experts the inputs may lie in order
            for key in keys - each.keys():
                each[key] = np.arange(part.shape[1], dtype=np.int32)
        layers += found
        views.append({key: [each[key] for each in tensors] for key in sorted(keys)})
        kinds.append(Kind(formats.pop(), part.shape, part.experts))
    dtype = "float32" if weight.float32 else dtype
    return Prepared(tuple(layers), tuple(views), tuple(kinds), _alike(views, kinds), weight.join, dtype)


def _prepared(checkpoint: Checkpoint, layer: Stored) -> dict[str, np.ndarray]:
    try:
        return dict(layer.prepared(checkpoint))
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.directory}: {layer.name.removesuffix('.weight')}: {error}") from error


def _alike(views: Sequence[Views], kinds: Sequence[Kind]) -> tuple[tuple[int, ...], ...]:
    """Neighbours that can lie in one array: plain ones, and those of one scheme, scale dtype and order of inputs."""

    def key(i: int) -> Any:
        layout = kinds[i].format
        if layout is None:
            return None
        order = [np.asarray(x).tobytes() for x in views[i].get("order", ())]
        scales = [x[0].dtype.str for name, x in views[i].items() if "scale" in name]
        return type(layout), layout, order, scales

    groups: list[list[int]] = []
    for i in range(len(kinds)):
        if groups and key(groups[-1][-1]) == key(i):
            groups[-1].append(i)
        else:
            groups.append([i])
    return tuple(tuple(group) for group in groups)


def _stacked_shape(views: list[np.ndarray], kind: Kind) -> jax.ShapeDtypeStruct:
    lead = (len(views),) if kind.experts else ()
    return jax.ShapeDtypeStruct((*lead, *views[0].shape), views[0].dtype)


def _built(kinds: Sequence[Kind], groups: Sequence[Sequence[int]], join: Join, dtype: str, arrays: Any) -> Any:
    parts = []
    for kind, tensors in zip(kinds, arrays, strict=True):
        if kind.format is None:
            parts.append(tensors[""].astype(dtype))
            continue
        read = functools.partial(kind.format.codes, N=kind.shape[0], K=kind.shape[1])
        parts.append(jax.vmap(read)(tensors) if kind.experts else read(tensors))
    if all(kind.format is None for kind in kinds):
        value = join(*parts)
    else:
        for i, part in enumerate(parts):
            if (rows := rows_of(join, i)) is not None:
                parts[i] = part.rows(rows) if isinstance(part, Codes) else jnp.take(part, rows, axis=-2)
        forms = tuple(_form([parts[i] for i in group], dtype) for group in groups)
        value = forms[0] if len(forms) == 1 else SideBySide(forms)
    # The barrier makes the result arrays of their own: on a CPU, `device_put` hands out the file's pages themselves.
    return jax.lax.optimization_barrier(value)


def _form(parts: list[Any], dtype: str) -> Any:
    return packed(joined(parts), dtype) if isinstance(parts[0], Codes) else matrix(*parts)


@functools.lru_cache(maxsize=256)  # layers are alike
def _form_of(kinds: Any, groups: Any, join: Join, dtype: str, shapes: Any) -> Any:
    return jax.eval_shape(functools.partial(_built, kinds, groups, join, dtype), [dict(part) for part in shapes])


_build = jax.jit(_built, static_argnums=(0, 1, 2, 3))


class Made:
    """Weights as they are made: a single one, one by one, or each put into its place of a stack; where the layers are not all
    of one form, of one stack for each."""

    def __init__(self, weights: Sequence[Prepared], stacked: bool, single: bool = False) -> None:
        self.weights, self.stacked, self.single = weights, stacked, single
        self._values: list[Any] = []
        self._count = 0
        self._kinds: list[Any] = []  # forms that have a stack
        self._sizes: list[int] = []
        self._places: list[tuple[int, int]] = []
        for weight in weights if stacked else ():
            if weight.form not in self._kinds:
                self._kinds.append(weight.form)
                self._sizes.append(0)
            stack = self._kinds.index(weight.form)
            self._places.append((stack, self._sizes[stack]))
            self._sizes[stack] += 1
        self._stacks: list[Any] = [None] * len(self._kinds)

    @property
    def form(self) -> Any:
        """What `all` will be like, as `jax.eval_shape` says it."""
        if not self.stacked:
            return self._gathered([weight.form for weight in self.weights])
        wide = lambda x, size: jax.ShapeDtypeStruct((size, *x.shape), x.dtype)  # noqa: E731
        pairs = zip(self._kinds, self._sizes, strict=True)
        return self._gathered([jax.tree.map(lambda x, size=size: wide(x, size), kind) for kind, size in pairs])

    def add(self, value: Any) -> None:
        """Takes the next weight."""
        if self.stacked:
            stack, number = self._places[self._count]
            if self._stacks[stack] is None:
                size = self._sizes[stack]
                self._stacks[stack] = jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), value)
            self._stacks[stack] = put(self._stacks[stack], value, number)
        else:
            self._values.append(value)
        self._count += 1

    def all(self) -> Any:
        """The single weight; or of all layers: a tuple, a stack, or stacks of several forms."""
        return self._gathered(self._stacks if self.stacked else self._values)

    def _gathered(self, values: list[Any]) -> Any:
        if not self.stacked:
            return values[0] if self.single else tuple(values)
        return values[0] if len(values) == 1 else ByLayer(tuple(values), tuple(self._places))


def _put(stack: Any, value: Any, number: Any) -> Any:
    return jax.tree.map(lambda s, v: jax.lax.dynamic_update_index_in_dim(s, v, number, 0), stack, value)


put = jax.jit(_put, donate_argnums=0)
