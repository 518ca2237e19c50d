"""Snapshots of the tree's nodes: which row of the device's pool holds which node's, what moves to the host, what is thrown away."""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax.cache.tree import Node
from atlas_jax.config import ModelConfig, RunConfig
from atlas_jax.decode.executables import SCALAR, Executables
from atlas_jax.state import TargetState, pool


class SnapshotStore:
    """Rows of a `SnapshotPool`, each the snapshot of one node, and a host tier for what they cannot hold.

    Room is made by recency: of the device's rows the longest unused moves to the host, of the host's the longest unused goes. Rows
    that a running sequence relies on do not move, and those of open sessions go last. Where there is no room, nothing is
    saved.
    """

    def __init__(
        self, config: ModelConfig, run: RunConfig, executables: Executables, rows: int, host_rows: int, page_size: int
    ) -> None:
        self.executables, self.page_size = executables, page_size
        self.rows, self.host_rows = rows, host_rows
        self.saved = self.evicted = self.poisoned = 0
        self._pool = executables.placed.made(lambda: pool.init_pool(config, run, rows)) if rows else None
        self._free = list(range(rows - 1, -1, -1))
        self._device: collections.OrderedDict[Node, int] = collections.OrderedDict()  # the longest unused first
        self._host: collections.OrderedDict[Node, pool.Saved] = collections.OrderedDict()

    def __contains__(self, node: Node) -> bool:
        return node in self._device or node in self._host

    @property
    def on_device(self) -> int:
        return len(self._device)

    @property
    def on_host(self) -> int:
        return len(self._host)

    def prepare(self, state: TargetState) -> None:
        """Compiles what saving and loading need, so that nobody waits for it later."""
        if self._pool is not None:
            args = (state, self._pool, SCALAR, SCALAR)
            self._compiled("save", pool.save, args, donate=1)
            self._compiled("load", pool.load, args, donate=0)
            self._compiled("check", pool.check, (self._pool, SCALAR))

    def save(self, state: TargetState, slot: int, node: Node) -> bool:
        """Keeps the slot's sequence, which must stand at the node's end, as the node's snapshot; False where there is no room."""
        row = self._make_room()
        if row is None:
            return False
        args = (state, self._pool, np.int32(slot), np.int32(row))
        self._pool = self._call("save", pool.save, args, donate=1)
        self._device[node] = row
        self.saved += 1
        return True

    def usable(self, node: Node) -> bool:
        """Whether the node's snapshot is on the device (it is brought there) and what it should be. One that is not is dropped."""
        if node in self._host and not self._fetch(node):
            return False
        row = self._device.get(node)
        if row is None:
            return False
        args = (self._pool, np.int32(row))
        health = jax.device_get(self._call("check", pool.check, args))
        if health.finite and health.intact and health.length == node.depth * self.page_size:
            return True
        self.poisoned += 1
        self.drop(node)
        return False

    def load(self, state: TargetState, slot: int, node: Node) -> TargetState:
        """Makes the slot the sequence of the node's snapshot, which counts as used by it. `state` is donated."""
        self._device.move_to_end(node)
        args = (state, self._pool, np.int32(slot), np.int32(self._device[node]))
        return self._call("load", pool.load, args, donate=0)

    def drop(self, node: Node) -> None:
        """Forgets the node's snapshot, if it has one."""
        if node in self._device:
            self._free.append(self._device.pop(node))
        self._host.pop(node, None)

    # ---- pieces ----------------------------------------------------------------------------------------------------

    def _make_room(self) -> int | None:
        """A free row of the device's pool, if need be that of a snapshot that is moved to the host or thrown away."""
        if not self._free:
            idle = [node for node in self._device if not node.users]
            victim = next((node for node in idle if not node.leases), idle[0] if idle else None)
            if victim is None:
                return None
            self._spill(victim)
        return self._free.pop()

    def _spill(self, node: Node) -> None:
        row = self._device.pop(node)
        self._free.append(row)
        if not self.host_rows:
            self.evicted += 1
            return
        if len(self._host) >= self.host_rows:
            oldest = next((node for node in self._host if not node.leases), next(iter(self._host)))
            del self._host[oldest]
            self.evicted += 1
        args = (self._pool, np.int32(row))
        self._host[node] = jax.device_get(self._call("read", pool.read, args))

    def _fetch(self, node: Node) -> bool:
        """Moves a snapshot from the host to the device, where it is checked before use; False where there is no room."""
        saved = self._host.pop(node)
        row = self._make_room()
        if row is None:
            self._host[node] = saved
            return False
        if not self._alike(saved):
            self._free.append(row)
            self.poisoned += 1
            return False
        self._pool = self._call("write", pool.write, (self._pool, np.int32(row), saved), donate=0)
        self._device[node] = row
        return True

    def _compiled(self, what: str, function: Any, args: tuple[Any, ...], donate: int | None = None) -> Any:
        key = (f"{what} snapshot", f"rows={self.rows}")
        return self.executables.get(key, function, args, () if donate is None else (donate,))

    def _call(self, what: str, function: Any, args: tuple[Any, ...], donate: int | None = None) -> Any:
        return self._compiled(what, function, args, donate)(*args)

    def _alike(self, saved: pool.Saved) -> bool:
        """Whether a host copy has the dtypes and the layout of a row."""
        assert self._pool is not None
        want = jax.eval_shape(pool.read, self._pool, SCALAR)
        form = lambda tree: [(x.shape, jnp.dtype(x.dtype)) for x in jax.tree.leaves(tree)]  # noqa: E731
        return jax.tree.structure(saved) == jax.tree.structure(want) and form(saved) == form(want)
