"""Packed weights that are kept: equal to those made anew, and never used when stale or damaged."""

import errno
import pathlib
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from atlas_jax.weights import build, cache
from atlas_jax.weights.hf_config import model_config, recipe_in
from atlas_jax.weights.load import load_params

SMALL = pathlib.Path(__file__).parent / "data" / "quantised" / "ct_int4_g32"


class Loads:
    """Loads of one checkpoint with one cache, and how many weights the last made anew."""

    def __init__(self, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, self.cache, self.made = folder / "model", folder / "cache", 0
        shutil.copytree(SMALL, self.model)
        value = build.Prepared.value

        def count(weight):
            self.made += 1
            return value(weight)

        monkeypatch.setattr(build.Prepared, "value", count)

    def __call__(self, layout: str = "layers"):
        self.made = 0
        recipe, config = recipe_in(self.model), model_config(self.model)
        return load_params(self.model, config, dtype="float32", layout=layout, recipe=recipe, cache_folder=self.cache)

    def entries(self) -> list[pathlib.Path]:
        return sorted(self.cache.iterdir())


@pytest.fixture
def load(tmp_path, monkeypatch) -> Loads:
    return Loads(tmp_path, monkeypatch)


def same(a, b) -> bool:
    equal = jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(x, y), a, b)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(jax.tree.leaves(equal))


def test_a_second_load_reads_what_the_first_kept(load):
    first = load()
    assert load.made > 0 and len(load.entries()) == 1
    assert same(load(), first) and load.made == 0
    load("stacked")
    assert load.made > 0 and len(load.entries()) == 2  # loaded in another way


def test_a_changed_checkpoint_is_read_anew(load):
    first = load()
    path = load.model / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    assert not same(load(), first) and load.made > 0 and len(load.entries()) == 2


def damages(entry: pathlib.Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Ways to damage an entry, each a function of the entry."""
    arrays = max((path for path in entry.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)

    def flip(path: pathlib.Path) -> None:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 16
        path.write_bytes(data)

    yield "a bit", lambda: flip(arrays)
    yield "cut", lambda: arrays.write_bytes(arrays.read_bytes()[: arrays.stat().st_size // 2])
    yield "lost", arrays.unlink
    yield "manifest", lambda: (entry / cache.MANIFEST).write_text("{")
    yield "version", lambda: _replace(entry / cache.MANIFEST, f'"version": {cache.VERSION}', '"version": 0')
    yield "sum", lambda: _replace(entry / cache.MANIFEST, "[[[", "[[[7, ")


def _replace(path: pathlib.Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))


def test_a_damaged_entry_is_made_anew(load):
    first = load()
    (entry,) = load.entries()
    for what in [name for name, _ in damages(entry)]:
        dict(damages(entry))[what]()
        with pytest.warns(UserWarning, match="damaged"):
            assert same(load(), first), what
        assert load.made > 0, what
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            assert same(load(), first) and load.made == 0, what


def test_of_several_writers_the_first_is_kept(load):
    """Two processes that find no entry both make one: neither harms the other's, nor says that something failed."""
    first = load()
    (entry,) = load.entries()
    written = entry.stat().st_ino
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        cache.write(entry, {"other": np.zeros(3)})
        with cache._part(load.cache / "another") as part:  # of a process that is still at it
            cache.sweep(load.cache)
            assert part.exists()
            (load.cache / "another").mkdir()
            (load.cache / "another" / "file").touch()
            cache.write(load.cache / "another", {"other": np.zeros(3)})
    assert entry.stat().st_ino == written and sorted(path.name for path in load.entries()) == [
        *sorted([entry.name, "another"])
    ]
    assert same(load(), first) and load.made == 0


def test_an_entry_that_another_process_made_anew_stays(load, monkeypatch):
    load()
    (entry,) = load.entries()
    forms = {"a": 3}

    def damaged_then_made_anew(entry, manifest, forms):
        (entry / cache.MANIFEST).write_text("{}")
        raise cache.Damaged("some bytes")

    monkeypatch.setattr(cache, "_read", damaged_then_made_anew)
    with pytest.warns(UserWarning, match="damaged"):
        assert cache.read(entry, forms) is None
    assert (entry / cache.MANIFEST).read_text() == "{}"


def test_what_a_killed_writer_left_is_removed(load):
    """A writer that is killed midway leaves neither an entry nor, in the long run, its part of one."""
    load.cache.mkdir()
    program = (
        "import pathlib, signal, os\n"
        "import numpy as np\n"
        "from atlas_jax.weights import cache\n"
        "cache._save = lambda folder, arrays: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"cache.write(pathlib.Path({str(load.cache / 'entry')!r}), {{'a': np.zeros(3)}})\n"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == -9
    (left,) = load.entries()
    assert left.suffix == cache.PART
    load()
    (entry,) = load.entries()
    assert entry.suffix == "" and not left.exists()


def test_reading_writes_nothing(load):
    """So that a cache that others may only read works."""
    load()
    (entry,) = load.entries()
    about = {path: path.stat().st_mtime_ns for path in (entry, *entry.rglob("*"))}
    load()
    assert load.made == 0 and about == {path: path.stat().st_mtime_ns for path in (entry, *entry.rglob("*"))}


def test_a_full_disk_is_a_warning_and_leaves_nothing(load, monkeypatch):
    usage = shutil.disk_usage(load.model)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=cache.SPARE + 1000))
    with pytest.warns(UserWarning, match="could not be kept .they take 0.00 GB; 1.07 GB are free"):
        load()
    monkeypatch.undo()

    def full(folder, arrays):
        (folder / "half").parent.mkdir()
        (folder / "half").write_bytes(b"0" * 1000)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache, "_save", full)
    with pytest.warns(UserWarning, match="could not be kept .*No space left"):
        load()
    assert load.entries() == []


def test_a_cache_that_cannot_be_written_is_a_warning(load):
    load.cache.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="could not be kept"):
        assert load() is not None


def test_the_sums_cover_every_byte():
    array = np.arange(100, dtype=np.float32).reshape(4, 25)
    sums = cache.checksums(array)
    for at in (0, 50, 99):
        other = array.copy()
        other.reshape(-1).view(np.uint32)[at] ^= 1
        assert cache.checksums(other) != sums
