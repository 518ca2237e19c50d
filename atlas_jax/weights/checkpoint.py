"""A model directory's tensors: one safetensors file, or the shards that an index lists."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from atlas_jax.errors import CheckpointError
from atlas_jax.weights.safetensors import AGAIN, Entry, SafetensorsFile, parse_object, short, some, unreadable

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Checkpoint:
    """All tensors of a model directory, by name in `entries`.

    Raises:
        CheckpointError: nothing is there, a file is damaged, or index and shards disagree.
    """

    def __init__(self, directory: str | pathlib.Path) -> None:
        self.directory = pathlib.Path(directory)
        index = self.directory / INDEX
        if not self.directory.is_dir():
            raise CheckpointError(f"{self.directory}: no such directory; name the folder that holds config.json")
        if index.exists():
            where = _weight_map(index)
            self._files = {name: SafetensorsFile(self.directory / name) for name in sorted(set(where.values()))}
            _agree(index, where, self._files)
        elif (self.directory / SINGLE).exists():
            self._files = {SINGLE: SafetensorsFile(self.directory / SINGLE)}
        else:
            raise CheckpointError(f"{self.directory}: no {SINGLE} and no {INDEX}; {_instead(self.directory)}")
        self._file_of = {tensor: file for file in self._files.values() for tensor in file.entries}
        self.entries: Mapping[str, Entry] = {name: file.entries[name] for name, file in self._file_of.items()}

    @property
    def files(self) -> list[pathlib.Path]:
        """The files that hold the tensors."""
        return [self.directory / name for name in self._files]

    @property
    def unlisted(self) -> list[str]:
        """Safetensors files of the directory that are no part of the checkpoint."""
        return sorted(path.name for path in self.directory.glob("*.safetensors") if path.name not in self._files)

    def read(self, name: str) -> np.ndarray:
        """A tensor as a read-only view of its file.

        Raises:
            CheckpointError: there is no such tensor.
        """
        if name not in self._file_of:
            raise CheckpointError(f"{self.directory}: has no tensor {name!r}; its tensors are {some(self.entries)}")
        return self._file_of[name].read(name)

    def release(self, name: str) -> None:
        """Lets go of the memory that holds the tensor's pages (see `SafetensorsFile.release`)."""
        self._file_of[name].release(name)


def has_weights(directory: pathlib.Path) -> bool:
    return any((directory / name).exists() for name in (INDEX, SINGLE))


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
        CheckpointError: it is missing, is not JSON, is not an object or has a key twice.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    return parse_object(path, text)


def _weight_map(index: pathlib.Path) -> dict[str, str]:
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(file, str) for file in where.values()):
        raise CheckpointError(f"{index}: weight_map must map tensor names to file names; {AGAIN}")
    files = sorted(set(where.values()))
    for file in files:
        # A folder in the name would let a downloaded index read any file of the system.
        plain = file.isprintable() and not file.startswith(".") and not set(file) & set("/\\:")
        if not plain or not file.endswith(".safetensors"):
            raise CheckpointError(f"{index}: {short(file)} does not name a safetensors file beside it; mend weight_map")
    missing = [file for file in files if not (index.parent / file).is_file()]
    if missing:
        raise CheckpointError(f"{index}: lists shards that are not there: {some(missing)}; download them too")
    if (index.parent / SINGLE).exists() and SINGLE not in files:
        raise CheckpointError(f"{index}: does not list {SINGLE}, which lies beside it; remove whichever is out of date")
    return where


def _agree(index: pathlib.Path, where: Mapping[str, str], files: Mapping[str, SafetensorsFile]) -> None:
    held = {(tensor, name) for name, file in files.items() for tensor in file.entries}
    listed = set(where.items())
    for only, what in (
        (listed - held, "lists tensors that are not"),
        (held - listed, "does not list tensors that are"),
    ):
        if only:
            found = some(f"{tensor} in {file}" for tensor, file in sorted(only))
            raise CheckpointError(f"{index}: {what} in a shard: {found}; {AGAIN}")


def _instead(directory: pathlib.Path) -> str:
    names = sorted(p.name for p in directory.iterdir() if p.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf"))
    if not names:
        return "download the weights"
    return f"found {some(names)}: convert them to safetensors, or rename a single such file to {SINGLE}"
