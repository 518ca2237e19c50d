"""Executables on disk: found as long as nothing changed that they depend on, and otherwise never."""

import dataclasses
import os
import pathlib
import subprocess
import sys
import uuid
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import CONFIGS, RUN, params_of

from atlas_jax.config import FULL, LINEAR
from atlas_jax.decode import store
from atlas_jax.decode.drafters import NoDrafter
from atlas_jax.decode.executables import Executables
from atlas_jax.decode.store import ExecutableStore
from atlas_jax.runtime import Runtime

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIG = dataclasses.replace(CONFIGS["dense"], layer_types=(LINEAR, FULL))
ARGS = (jnp.arange(4.0), {"b": np.int32(2)})


def counted(folder, about=None):
    """Asks for the executable of one function; returns what it gives, and how often it was compiled."""
    made = []

    def compile(function):
        made.append(function)
        return jax.jit(function).lower(*args).compile()

    def get(what="f", given=ARGS, options=None):
        nonlocal args
        args = given
        x, more = given
        before = len(made)
        run = ExecutableStore(folder, about).get(what, given, options, lambda x, more: x * more["b"], compile)
        assert np.array_equal(run(x, more), np.asarray(x) * more["b"])
        return len(made) - before

    args = ARGS
    return get


def test_found_only_where_everything_is_the_same(tmp_path, monkeypatch):
    about = uuid.uuid4().hex  # nobody's before, so that JAX's own cache has none of it
    get = counted(tmp_path, about)
    assert [get(), get()] == [1, 0]
    others = [
        dict(what="g"),
        dict(options={"a": 1}),
        dict(given=(jnp.arange(5.0), ARGS[1])),
        dict(given=(jnp.arange(4), ARGS[1])),
        dict(given=(ARGS[0], {"b": np.int32(2), "c": np.int32(1)})),
    ]
    assert [get(**other) for other in others] == [1] * len(others)
    assert [get(**other) for other in others] == [0] * len(others)
    assert counted(tmp_path, about + "x")() == 1
    monkeypatch.setattr(store, "_sources", lambda: "edited")
    assert [get(), get()] == [1, 0]


def test_damaged_entries_are_made_anew(tmp_path):
    for i, damage in enumerate((lambda data: data[:-1], lambda data: b"", lambda data: data[:40] + b"x" + data[41:])):
        get = counted(tmp_path / str(i), uuid.uuid4().hex)
        assert get() == 1
        [path] = (tmp_path / str(i)).iterdir()
        path.write_bytes(damage(path.read_bytes()))
        with pytest.warns(UserWarning, match="compiled anew"):
            assert get() == 1
        path.unlink(missing_ok=True)  # JAX's cache may have had it this time
        assert [get("g"), get("g")] == [1, 0]


def test_the_oldest_go_first(tmp_path, monkeypatch):
    get = counted(tmp_path, uuid.uuid4().hex)
    assert get("a") == 1
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    monkeypatch.setattr(store, "MOST_BYTES", 2.5 * size)
    assert [get("b"), get("a"), get("c")] == [1, 0, 1]
    assert [get("a"), get("c"), get("b")] == [0, 0, 1]


def test_one_device_of_several(tmp_path):
    """What is loaded runs on the device that it was compiled for, also where there are others."""
    program = """
import pathlib, sys, uuid, jax, jax.numpy as jnp
from atlas_jax.decode.store import ExecutableStore
store, made = ExecutableStore(pathlib.Path(sys.argv[1]), uuid.uuid4().hex), []
def compile(function):
    made.append(function)
    return jax.jit(function).lower(x).compile()
for device in jax.devices() * 2:
    x = jax.device_put(jnp.arange(4.0), device)
    out = store.get("f", (x,), None, lambda x: 2 * x, compile)(x)
    assert out.tolist() == [0, 2, 4, 6] and out.devices() == {device}, (out, device)
print(len(jax.devices()), len(made))
"""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "2 2\n", done.stderr


def test_a_folder_that_cannot_be_written_costs_a_warning_only(tmp_path):
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="could not be kept"):
        assert counted(tmp_path / "file", uuid.uuid4().hex)() == 1


@dataclasses.dataclass(frozen=True)
class Mine(NoDrafter):
    """Somebody else's drafter."""


def test_a_model_decodes_with_what_another_process_compiled(tmp_path):
    about, said = uuid.uuid4().hex, list[str]()
    params = params_of(CONFIG, RUN)

    def answer():
        runtime = Runtime(CONFIG, RUN, params, progress=said.append)
        runtime.loop.executables.store = ExecutableStore(tmp_path, about)
        said.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return runtime.generate([3, 1, 4, 1, 5] * 4, max_tokens=12, drafter="none", logprobs=True)

    first = answer()
    assert len(said) == 4  # prefill, open, start, dispatch
    again = answer()
    assert (again.token_ids, again.logprobs, said) == (first.token_ids, first.logprobs, [])


def test_what_depends_on_somebody_elses_drafter_is_not_kept(tmp_path):
    executables = Executables(
        Runtime(CONFIG, RUN, params_of(CONFIG, RUN)).loop.model, RUN, store=ExecutableStore(tmp_path, uuid.uuid4().hex)
    )
    for drafter in (Mine(), NoDrafter()):
        executables.get(("twice", drafter), lambda x: 2 * x, (jnp.arange(3.0),), ())
    assert len([*tmp_path.iterdir()]) == 1
