"""Packed weights of quantised checkpoints, kept so that a second load only reads them.

An entry is a folder of orbax checkpoints, one for each weight, and a manifest. Its name follows from the checkpoint's identity
(names, sizes, times of last change, headers and samples of the contents of its files), from how it is loaded, and from the
version of this format. Nothing in it is believed: the arrays must be those that the checkpoint's headers ask for, and their bytes
must have the sums of the manifest; otherwise the entry is dropped and made anew.

An entry is written under another name, in a folder whose lock the writer holds, and appears whole. What a writer that was killed
left behind is known by its lock, which nobody holds, and is removed by the next one. Of several that write the same entry the first
to end is kept.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
import uuid
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

VERSION = 2  # of the packed forms and of the entries
MANIFEST, LOCK, PART = "manifest.json", "lock", ".part"
SAMPLE, EVERY = 1 << 16, 64 << 20  # bytes of a file that its identity looks at
CHUNK = 64 << 20  # bytes that are written and read as one
SPARE = 1 << 30  # bytes that are left to others on the disk
AT_ONCE = 4  # weights that are read, or written, side by side; the host holds as many


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
    if not entry.exists():
        return None
    manifest = _manifest(entry)
    try:
        return _read(entry, json.loads(manifest), forms)
    except Exception as error:  # orbax and tensorstore raise what they like at damaged files
        warnings.warn(f"{entry}: the packed weights there are damaged ({error}); they are made anew", stacklevel=2)
        if _manifest(entry) == manifest:  # another process may have made it anew already
            _remove(entry)
        return None


def _manifest(entry: pathlib.Path) -> bytes:
    try:
        return (entry / MANIFEST).read_bytes()
    except OSError:
        return b""


def _read(entry: pathlib.Path, manifest: dict[str, Any], forms: Mapping[str, Any]) -> dict[str, Any]:
    if manifest.get("version") != VERSION or set(manifest["weights"]) != set(forms):
        raise Damaged("they are of another version or model")
    for name, form in forms.items():
        if [_kind(leaf) for leaf in jax.tree.leaves(form)] != [about[:2] for about in manifest["weights"][name]]:
            raise Damaged(f"{name} is of another form")

    def weight(name: str) -> Any:
        leaves, tree = jax.tree.flatten(forms[name])
        arrays = _restore(entry / name, leaves)
        for array, (*_, sums) in zip(arrays, manifest["weights"][name], strict=True):
            if checksums(array) != sums:
                raise Damaged(f"{name} has other bytes than were written")
        # Waiting bounds what is in flight: the copies to the device read the arrays' memory.
        return jax.block_until_ready(jax.tree.unflatten(tree, [jax.device_put(array) for array in arrays]))

    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(forms, pool.map(weight, forms), strict=True))


def write(entry: pathlib.Path, weights: Mapping[str, Any]) -> None:
    """Keeps weights in a new entry. A failure is a warning: the cache is only there to save time."""

    def keep(name: str) -> list[Any]:
        arrays = jax.device_get(jax.tree.leaves(weights[name]))
        _save(part / name, arrays)
        return [[*_kind(array), checksums(array)] for array in arrays]

    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        sweep(entry.parent)
        if entry.exists():
            return
        size = sum(x.nbytes for x in jax.tree.leaves(dict(weights)))
        if (free := shutil.disk_usage(entry.parent).free) < size + SPARE:
            raise OSError(
                f"they take {size / 1e9:.2f} GB; {free / 1e9:.2f} GB are free, of which {SPARE / 1e9:.0f} stays so"
            )
        with _part(entry) as part, concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            sums = dict(zip(weights, pool.map(keep, weights), strict=True))
            (part / MANIFEST).write_text(json.dumps({"version": VERSION, "weights": sums}))
            if not entry.exists():
                os.replace(part, entry)
    except Exception as error:  # as above
        if not entry.exists():
            warnings.warn(f"{entry}: the packed weights could not be kept ({error})", stacklevel=2)


def sweep(folder: pathlib.Path) -> None:
    """Removes what writers that were killed left behind."""
    for part in folder.glob(f"*{PART}"):
        with contextlib.suppress(OSError), (part / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def _part(entry: pathlib.Path) -> Iterator[pathlib.Path]:
    """A new folder beside an entry, whose lock this process holds; it is removed at the end, unless it has another name by then."""
    part = _beside(entry)
    part.mkdir()
    try:
        with (part / LOCK).open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _beside(entry: pathlib.Path) -> pathlib.Path:
    return entry.with_name(f"{entry.name}.{uuid.uuid4().hex[:8]}{PART}")


def _remove(entry: pathlib.Path) -> None:
    """At once, as far as others see: whoever reads it meanwhile finds it damaged, but nobody finds a half of it later."""
    gone = _beside(entry)
    with contextlib.suppress(OSError):
        os.replace(entry, gone)
    shutil.rmtree(gone, ignore_errors=True)


def checksums(array: np.ndarray) -> list[int]:
    """The CRC-32 of each 64 MiB of an array."""
    data = _bytes(array)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return list(pool.map(zlib.crc32, (data[at : at + CHUNK] for at in range(0, max(data.size, 1), CHUNK))))


def _kind(leaf: Any) -> list[Any]:
    return [list(leaf.shape), str(leaf.dtype)]


def _checkpointer() -> Any:
    import orbax.checkpoint as ocp

    # Codes are as good as random: compressing them takes minutes and saves nothing.
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))


def _save(folder: pathlib.Path, arrays: list[np.ndarray]) -> None:
    """Each array as a row of bytes: its chunks are contiguous, whatever its shape."""
    import orbax.checkpoint as ocp

    tree = {str(i): _bytes(array) for i, array in enumerate(arrays)}
    args = {key: ocp.SaveArgs(chunk_byte_size=CHUNK) for key in tree}
    with _checkpointer() as checkpointer:
        checkpointer.save(folder.absolute(), tree, save_args=args)


def _restore(folder: pathlib.Path, leaves: Sequence[Any]) -> list[np.ndarray]:
    import orbax.checkpoint as ocp

    args = {str(i): ocp.RestoreArgs(restore_type=np.ndarray) for i in range(len(leaves))}
    with _checkpointer() as checkpointer:
        tree = checkpointer.restore(folder.absolute(), restore_args=args)
    return [tree[str(i)].view(leaf.dtype).reshape(leaf.shape) for i, leaf in enumerate(leaves)]


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
