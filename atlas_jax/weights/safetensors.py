"""Reading of one safetensors file.

A file is `length: u64 | header: JSON | data`; the header gives each tensor's dtype, shape and byte range. Nothing in it
is believed before it is checked, and every failure is a `CheckpointError` that names the file and says what to do.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import mmap
import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from atlas_jax.errors import CheckpointError

LONGEST_HEADER_BYTES = 100_000_000  # as in the format's reference implementation
AGAIN = "download the file again, or write the checkpoint anew"


class Dtype(NamedTuple):
    """How one of the format's dtypes is stored: bits an element, and the numpy type to view it as."""

    bits: int
    numpy: np.dtype


DTYPES = {
    "BOOL": Dtype(8, np.dtype(np.bool_)),
    "U8": Dtype(8, np.dtype(np.uint8)),
    "I8": Dtype(8, np.dtype(np.int8)),
    "F8_E5M2": Dtype(8, np.dtype(ml_dtypes.float8_e5m2)),
    "F8_E4M3": Dtype(8, np.dtype(ml_dtypes.float8_e4m3fn)),
    "F8_E8M0": Dtype(8, np.dtype(ml_dtypes.float8_e8m0fnu)),
    "F4": Dtype(4, np.dtype(ml_dtypes.float4_e2m1fn)),
    "U16": Dtype(16, np.dtype("<u2")),
    "I16": Dtype(16, np.dtype("<i2")),
    "F16": Dtype(16, np.dtype("<f2")),
    "BF16": Dtype(16, np.dtype(ml_dtypes.bfloat16)),
    "U32": Dtype(32, np.dtype("<u4")),
    "I32": Dtype(32, np.dtype("<i4")),
    "F32": Dtype(32, np.dtype("<f4")),
    "U64": Dtype(64, np.dtype("<u8")),
    "I64": Dtype(64, np.dtype("<i8")),
    "F64": Dtype(64, np.dtype("<f8")),
    "C64": Dtype(64, np.dtype("<c8")),
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where a tensor lies: bytes `start` up to `stop` of a file."""

    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class SafetensorsFile:
    """One file, mapped into memory. `entries` are its tensors by name, `metadata` its free text.

    Raises:
        CheckpointError: the file is missing, damaged, or has a dtype that is not known.
    """

    def __init__(self, path: str | pathlib.Path) -> None:
        self.path = pathlib.Path(path)
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                if size < 8:
                    raise CheckpointError(f"{self.path}: {size} bytes are no safetensors file; {AGAIN}")
                self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        except OSError as error:
            raise unreadable(self.path, error) from error
        self.entries, self.metadata = _header(self.path, self._map)

    def read(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of the file (F4, two to a byte, is unpacked into a copy).

        Raises:
            CheckpointError: the file has no such tensor.
        """
        if name not in self.entries:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}; its tensors are {some(self.entries)}")
        entry = self.entries[name]
        dtype = DTYPES[entry.dtype]
        if dtype.bits == 4:
            packed = np.frombuffer(self._map, np.uint8, entry.nbytes, entry.start)
            codes = np.stack([packed & 15, packed >> 4], axis=-1)  # the even element is the low half
            return codes.view(dtype.numpy).reshape(entry.shape)
        count = entry.nbytes * 8 // dtype.bits
        return np.frombuffer(self._map, dtype.numpy, count, entry.start).reshape(entry.shape)

    def release(self, name: str) -> None:
        """Lets go of the memory that holds the tensor's pages. Views stay valid: touched pages are read again."""
        entry = self.entries[name]
        start = -(-entry.start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = entry.stop // mmap.PAGESIZE * mmap.PAGESIZE - start
        if length > 0:
            self._map.madvise(mmap.MADV_DONTNEED, start, length)


def some(names: Iterable[str], limit: int = 8) -> str:
    """The first few names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(name if name.isprintable() else short(name) for name in names[:limit]) or "none") + more


def unreadable(path: pathlib.Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions")


def parse_object(path: pathlib.Path, text: bytes, part: str = "") -> dict[str, Any]:
    """The JSON object `text`, which is (`part` of) the file `path`.

    Raises:
        CheckpointError: not JSON, not an object, or a key is there twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [key for key, count in collections.Counter(key for key, _ in pairs).items() if count > 1]
        if twice:
            raise CheckpointError(f"{path}: {part}the key {short(twice[0])} is there twice; {AGAIN}")
        return dict(pairs)

    try:
        out = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {part}not valid JSON ({error}); {AGAIN}") from error
    if not isinstance(out, dict):
        raise CheckpointError(f"{path}: {part}a JSON object is needed, found {short(out)}; {AGAIN}")
    return out


def short(value: Any) -> str:
    """`repr`, cut: a damaged file may hold a name or a number of any length."""
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + " …"


def _header(path: pathlib.Path, data: mmap.mmap) -> tuple[dict[str, Entry], dict[str, str]]:
    length = int.from_bytes(data[:8], "little")
    rest = len(data) - 8
    if length > LONGEST_HEADER_BYTES:
        raise CheckpointError(f"{path}: a header of {length} bytes, where {LONGEST_HEADER_BYTES} are allowed; {AGAIN}")
    if length > rest:
        raise CheckpointError(f"{path}: ends within its header, {rest} bytes of {length} are there; {AGAIN}")
    header = parse_object(path, data[8 : 8 + length], "header: ")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: header: __metadata__ must map names to text; {AGAIN}")
    entries = {name: _entry(path, name, about, 8 + length, len(data)) for name, about in header.items()}
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start < end:
            raise CheckpointError(f"{path}: tensor {short(name)} overlaps the one before it; {AGAIN}")
        if entry.start > end:
            raise CheckpointError(
                f"{path}: {entry.start - end} bytes before tensor {short(name)} belong to none; {AGAIN}"
            )
        end = entry.stop
    if end != len(data):
        raise CheckpointError(f"{path}: {len(data) - end} bytes behind the last tensor belong to none; {AGAIN}")
    return entries, metadata


def _entry(path: pathlib.Path, name: str, about: Any, base: int, size: int) -> Entry:
    complaint = _complaint(about, size - base)
    if complaint:
        raise CheckpointError(f"{path}: tensor {short(name)}: {complaint}; {AGAIN}")
    start, stop = about["data_offsets"]
    return Entry(path, about["dtype"], tuple(about["shape"]), base + start, base + stop)


def _complaint(about: Any, space: int) -> str | None:
    """What is wrong with a tensor's description, given the bytes of data in the file."""
    if not isinstance(about, dict) or set(about) != {"dtype", "shape", "data_offsets"}:
        return f"needs dtype, shape and data_offsets, found {short(about)}"
    dtype, shape, offsets = about["dtype"], about["shape"], about["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        return f"unknown dtype {short(dtype)} (known: {', '.join(DTYPES)})"
    if not _naturals(shape) or len(shape) > 32:
        return f"shape must be at most 32 natural numbers, found {short(shape)}"
    if not _naturals(offsets) or len(offsets) != 2:
        return f"data_offsets must be two natural numbers, found {short(offsets)}"
    # An empty tensor needs no bytes however long its other sides are, but numpy multiplies them.
    if math.prod(max(side, 1) for side in shape) >= 1 << 58:
        return f"shape {shape} is too large"
    start, stop = offsets
    if not start <= stop <= space:
        return f"bytes {start} … {stop} are not within the {space} bytes of data"
    bits = math.prod(shape) * DTYPES[dtype].bits
    if bits != 8 * (stop - start):
        return f"{dtype} {shape} takes {bits / 8:g} bytes, data_offsets span {stop - start}"
    return None


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(x) is int and 0 <= x < 1 << 62 for x in value)
