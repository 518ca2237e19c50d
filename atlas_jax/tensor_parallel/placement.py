"""Where parameters and state lie, and how a step runs: on one device, or on several that share the model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from atlas_jax.config import ModelConfig, RunConfig
from atlas_jax.errors import ConfigError
from atlas_jax.state import TargetState
from atlas_jax.state.pool import Saved, SnapshotPool
from atlas_jax.tensor_parallel.params import Cut, cuts, rule_of, share, shared_size
from atlas_jax.tensor_parallel.shares import AXIS, check
from pallas_kernels.w4a16 import FORMS

WHOLE = PartitionSpec()
# Which axis of a state's array the devices share: that of heads, or of the channels that go with them.
STATE = {"pages": 2, "h": 2, "conv": 3, "journal_k": 3, "journal_u": 3, "journal_decay": 3}
SAVED = {"h": 1, "conv": 2}  # of one snapshot; a pool has its rows before these


class OneDevice:
    """Everything is where JAX puts it."""

    def params(self, params: Any) -> Any:
        return params

    def leaf(self, path: tuple[str, ...], value: Any) -> Any:
        return value

    def made(self, init: Callable[[], Any]) -> Any:
        """What `init` returns, where it belongs."""
        return init()

    def step(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
        """A function that runs the model."""
        return function

    def out_shardings(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Where results of a function that does not run the model belong; None where JAX likes."""
        return None


ONE_DEVICE = OneDevice()


class Placement(OneDevice):
    """On the first `devices` devices of this process, each with a share."""

    def __init__(self, config: ModelConfig, devices: int) -> None:
        check(config, devices)
        found = jax.local_devices()
        if len(found) < devices:
            raise ConfigError(
                f"tensor_parallel {devices} needs {devices} devices; JAX found {len(found)} ({found[0].device_kind})"
            )
        self.config, self.devices = config, devices
        self.mesh = Mesh(np.asarray(found[:devices]), (AXIS,))

    def params(self, params: Any) -> Any:
        """Parameters as `HybridModel.init` has them, each device's share on it. Those that are shared already stay."""
        is_weight = lambda x: isinstance(x, (tuple, *FORMS))  # noqa: E731
        return jax.tree.map_with_path(
            lambda path, x: self.leaf(tuple(key.key for key in path[1:]), x, params), params, is_leaf=is_weight
        )

    def leaf(self, path: tuple[str, ...], value: Any, params: Any = None) -> Any:
        """One parameter."""
        arrays, tree = jax.tree.flatten(value)
        each = cuts(value, rule_of(self.config, path, params), self.devices, ".".join(path))
        return jax.tree.unflatten(tree, [self._shared(x, cut) for x, cut in zip(arrays, each, strict=True)])

    def _shared(self, x: Any, cut: Cut) -> jax.Array:
        where = NamedSharding(self.mesh, WHOLE) if cut.axis is None else self._at(x.ndim + cut.axis)
        if cut.axis is None or x.sharding == where:
            return jax.device_put(x, where)
        parts = [jax.device_put(share(x, cut, i), device) for i, device in enumerate(self.mesh.devices)]
        axis, shape = x.ndim + cut.axis, list(x.shape)
        shape[axis] = shared_size(cut)
        return jax.make_array_from_single_device_arrays(tuple(shape), where, parts)

    def _at(self, axis: int) -> NamedSharding:
        return NamedSharding(self.mesh, at_axis(axis))

    def made(self, init: Callable[[], Any]) -> Any:
        """What `init` returns, made where it belongs."""
        return jax.jit(init, out_shardings=self._shardings(jax.eval_shape(init)))()

    def step(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
        """A function that runs the model, on all devices; each sees its share of parameters and state, and all of the rest."""
        of = lambda x: x.sharding.spec if isinstance(getattr(x, "sharding", None), NamedSharding) else WHOLE  # noqa: E731
        given = jax.tree.map(of, args)
        on_all = functools.partial(jax.shard_map, mesh=self.mesh, in_specs=given, check_vma=False)
        out = jax.eval_shape(on_all(function, out_specs=WHOLE), *args)
        return on_all(function, out_specs=specs(out))

    def out_shardings(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return self._shardings(jax.eval_shape(function, *args))

    def _shardings(self, tree: Any) -> Any:
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec), specs(tree), is_leaf=lambda x: isinstance(x, PartitionSpec)
        )


def placement(config: ModelConfig, run: RunConfig) -> OneDevice:
    """What `run.tensor_parallel` asks for.

    Raises:
        ConfigError: the devices cannot share the model evenly, or are not there.
    """
    return ONE_DEVICE if run.tensor_parallel == 1 else Placement(config, run.tensor_parallel)


def specs(tree: Any) -> Any:
    """Which axis of each array the devices share: of states and snapshots those of `STATE`; all else is whole on each."""
    known = TargetState, SnapshotPool, Saved
    return jax.tree.map(
        lambda x: jax.tree.map_with_path(functools.partial(_spec, x), x) if isinstance(x, known) else WHOLE,
        tree,
        is_leaf=lambda x: isinstance(x, known),
    )


def _spec(of: TargetState | SnapshotPool | Saved, path: tuple[Any, ...], _: Any) -> PartitionSpec:
    names = [str(getattr(key, "name", getattr(key, "key", ""))) for key in path]
    if isinstance(of, TargetState):
        axis = STATE.get(names[0])
    else:
        axis = SAVED.get(names[1]) if names[0] == "leaves" else None
        axis = axis if axis is None else axis + isinstance(of, SnapshotPool)
    return WHOLE if axis is None else at_axis(axis)


def at_axis(axis: int) -> PartitionSpec:
    return PartitionSpec(*[None] * axis, AXIS)
