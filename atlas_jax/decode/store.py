"""Executables kept on disk, so that a later process neither traces nor compiles them.

JAX's own compilation cache finds an executable by its program, which has to be traced first: most of a start with a warm cache.
Here it is found by what the program is made from: the sources of both packages, versions, device, model, run configuration, and
the arguments' forms. An edited source therefore finds nothing, also where it would have made the same program.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import pickle
import platform
import sys
import threading
import uuid
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import serialize_executable

from atlas_jax.settings import xla_flags

VERSION = 1  # of the entries
MOST_BYTES = 4 << 30  # of all entries; those that were not used for longest go first
PACKAGES = ("jax", "jaxlib", "flax", "numpy")  # beside ours, what makes programs
NO_PROGRAMS = ("serve", "engine", "experiment", "replay", "text", "train")  # parts of our package
HIT = "/jax/compilation_cache/cache_hits"  # the event

_thread = threading.local()
_lock = threading.Lock()


class ExecutableStore:
    """Entries for one model and one way of running it.

    Args:
        folder: of all entries.
        about: whatever the programs depend on beside their arguments; its `repr` must say all of it.
    """

    def __init__(self, folder: pathlib.Path, about: Any) -> None:
        self.folder = folder
        self._about = _digest(_surroundings(), repr(about))
        _watch_hits()

    def get(
        self,
        what: Any,
        args: tuple[Any, ...],
        options: Any,
        function: Callable[..., Any],
        compile: Callable[[Callable[..., Any]], Any],
    ) -> Any:
        """The executable of a function for the forms of `args`, from disk, or as `compile` makes it of the function that it is
        given. `repr(what)` and `repr(options)` must say all that the program depends on besides."""
        key = _digest(self._about, repr(what), _forms(args), repr(options), str(_devices(args)))
        path = self.folder / f"{key}.executable"
        if (made := _read(path, _devices(args))) is not None:
            return made

        def named(*args: Any) -> Any:
            return function(*args)

        # A name of its own keeps JAX's cache from finding an equal program of other sources: XLA writes CPU executables that were
        # read from a cache in a form that cannot be read again, so that what is found there could not be kept here.
        named.__name__ = named.__qualname__ = f"atlas_{key[:16]}"
        _thread.hit = False
        made = compile(named)
        if not _thread.hit:
            self._write(path, made)
        return made

    def _write(self, path: pathlib.Path, made: Any) -> None:
        partial = path.with_suffix(f".{uuid.uuid4().hex}.part")
        try:
            body = pickle.dumps(serialize_executable.serialize(made))
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(hashlib.sha256(body).digest() + body)
            partial.replace(path)
        except Exception as error:  # full disks, programs that hold constants: the executable is there all the same
            with contextlib.suppress(OSError):
                partial.unlink()
            warnings.warn(f"{path}: an executable could not be kept: {error}", stacklevel=2)
        self._prune()

    def _prune(self) -> None:
        with _lock, contextlib.suppress(OSError):  # other processes prune as well
            entries = sorted(((p.stat(), p) for p in self.folder.glob("*.executable")), key=lambda x: -x[0].st_mtime)
            total = 0
            for about, path in entries:
                total += about.st_size
                if total > MOST_BYTES:
                    path.unlink(missing_ok=True)


def _devices(args: tuple[Any, ...]) -> list[Any]:
    """Where the arguments are."""
    found = {device for x in jax.tree.leaves(args) if isinstance(x, jax.Array) for device in x.devices()}
    return sorted(found or {jax.devices()[0]}, key=lambda device: device.id)


def _read(path: pathlib.Path, devices: list[Any]) -> Any | None:
    """An entry, ready to be called; None where there is none, or a damaged one, which is removed."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    try:
        checksum, body = data[:32], data[32:]
        if hashlib.sha256(body).digest() != checksum:
            raise ValueError("it has other bytes than were written")
        # Without devices it would be loaded for all there are, and fail when it is called.
        made = serialize_executable.deserialize_and_load(*pickle.loads(body), execution_devices=devices)
    except Exception as error:  # whatever JAX and XLA raise
        warnings.warn(f"{path}: this executable cannot be used ({error}); it is compiled anew", stacklevel=2)
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return made


def _forms(args: tuple[Any, ...]) -> str:
    leaves, tree = jax.tree.flatten(args)
    return repr(([str(jax.typeof(x) if not isinstance(x, jax.ShapeDtypeStruct) else x) for x in leaves], str(tree)))


def _digest(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)} {part}".encode())
    return digest.hexdigest()


def _surroundings() -> str:
    """What every program depends on."""
    device = jax.devices()[0]
    options = {
        name: value for name, value in sorted(jax.config.values.items()) if "cache" not in name and "log" not in name
    }
    flags = ""
    if device.platform == "cpu":
        with contextlib.suppress(OSError):
            lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
            flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    versions = [sys.version, *(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)]
    where = [device.platform, device.device_kind, device.client.platform_version, jax.device_count()]
    return repr([VERSION, versions, where, platform.machine(), flags, options, xla_flags(), _sources()])


def _sources() -> str:
    """A digest of both packages, but for what makes no programs."""
    digest = hashlib.sha256()
    here = pathlib.Path(__file__).resolve().parents[2]
    for package in ("atlas_jax", "pallas_kernels"):
        for path in sorted((here / package).rglob("*.py")):
            if path.relative_to(here).parts[1] in NO_PROGRAMS:
                continue
            digest.update(f"{path.relative_to(here)} ".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _on_event(event: str, **_: Any) -> None:
    if event == HIT:
        _thread.hit = True


@functools.cache
def _watch_hits() -> None:
    jax.monitoring.register_event_listener(_on_event)
