"""Packed weights of quantised checkpoints, kept so that a second load only reads them.

An entry is a folder of orbax checkpoints, one for each weight, and a manifest. Its name follows from the checkpoint's identity
(names, sizes, times of last change, headers and samples of the contents of its files), from how it is loaded, and from the
version of this format. Nothing in it is believed: the arrays must be those that the checkpoint's headers ask for, and their bytes
must have the sums of the manifest; otherwise the entry is dropped and made anew.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import pathlib
import shutil
import uuid
import warnings
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

VERSION = 1  # of the packed forms and of the entries
MANIFEST = "manifest.json"
SAMPLE, EVERY = 1 << 16, 64 << 20  # bytes of a file that its identity looks at
CHUNK = 64 << 20  # bytes that are read at once


class Damaged(Exception):
    """An entry that is not what it should be."""


def identity(files: Iterable[pathlib.Path], how: Mapping[str, Any]) -> str:
    """A digest of files and of how they are loaded; it changes with the files."""
    digest = hashlib.sha256(json.dumps([VERSION, how], sort_keys=True).encode())
    for path in sorted(files):
        about = path.stat()
        digest.update(f"{path.name} {about.st_size} {about.st_mtime_ns} ".encode())
        with path.open("rb") as file:
            first = file.read(8)
            digest.update(first + file.read(min(int.from_bytes(first, "little"), 1 << 27)))
            for at in (*range(0, about.st_size, EVERY), max(about.st_size - SAMPLE, 0)):
                file.seek(at)
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()[:32]


def read(entry: pathlib.Path, forms: Mapping[str, Any]) -> dict[str, Any] | None:
    """The weights of an entry on the device, or None where there is no entry or a damaged one, which is removed.

    Args:
        forms: what each weight must be like, as `jax.eval_shape` says it.
    """
    if not (entry / MANIFEST).exists():
        return None
    try:
        return _read(entry, forms)
    except Exception as error:  # orbax and tensorstore raise what they like at damaged files
        warnings.warn(f"{entry}: the packed weights there are damaged ({error}); they are made anew", stacklevel=2)
        shutil.rmtree(entry, ignore_errors=True)
        return None


def _read(entry: pathlib.Path, forms: Mapping[str, Any]) -> dict[str, Any]:
    manifest = json.loads((entry / MANIFEST).read_text())
    if manifest.get("version") != VERSION or set(manifest["weights"]) != set(forms):
        raise Damaged("they are of another version or model")
    out: dict[str, Any] = {}
    for name, form in forms.items():
        leaves, tree = jax.tree.flatten(form)
        sums = manifest["weights"][name]
        if [_kind(leaf) for leaf in leaves] != [entry[:2] for entry in sums]:
            raise Damaged(f"{name} is of another form")
        arrays = _restore(entry / name, len(leaves))
        for leaf, array, entry_ in zip(leaves, arrays, sums, strict=True):
            if (array.shape, array.dtype) != (leaf.shape, leaf.dtype) or checksums(array) != entry_[2]:
                raise Damaged(f"{name} has other bytes than were written")
        out[name] = jax.tree.unflatten(tree, [jax.block_until_ready(jax.device_put(array)) for array in arrays])
    return out


def write(entry: pathlib.Path, weights: Mapping[str, Any]) -> None:
    """Keeps weights in a new entry. A failure is a warning: the cache is only there to save time."""
    part = entry.with_name(f"{entry.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        part.mkdir(parents=True)
        sums = {}
        for name, weight in weights.items():
            arrays = jax.device_get(jax.tree.leaves(weight))
            _save(part / name, arrays)
            sums[name] = [[*_kind(array), checksums(array)] for array in arrays]
        (part / MANIFEST).write_text(json.dumps({"version": VERSION, "weights": sums}))
        shutil.rmtree(entry, ignore_errors=True)
        os.replace(part, entry)
    except (OSError, ValueError) as error:
        warnings.warn(f"{entry}: the packed weights could not be kept ({error})", stacklevel=2)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def checksums(array: np.ndarray) -> list[int]:
    """The CRC-32 of each 64 MiB of an array."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return list(pool.map(zlib.crc32, (data[at : at + CHUNK] for at in range(0, max(data.size, 1), CHUNK))))


def _kind(leaf: Any) -> list[Any]:
    return [list(leaf.shape), str(leaf.dtype)]


def _save(folder: pathlib.Path, arrays: list[np.ndarray]) -> None:
    import orbax.checkpoint as ocp

    tree = {str(i): array for i, array in enumerate(arrays)}
    args = {key: ocp.SaveArgs(chunk_byte_size=CHUNK) for key in tree}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute(), tree, save_args=args)


def _restore(folder: pathlib.Path, count: int) -> list[np.ndarray]:
    import orbax.checkpoint as ocp

    args = {str(i): ocp.RestoreArgs(restore_type=np.ndarray) for i in range(count)}
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.restore(folder.absolute(), restore_args=args)
    return [tree[str(i)] for i in range(count)]
