"""What every test runs under: the CPU, checked types and shapes, a kept compilation cache, repeatable examples.

Environment variables that change it, all optional:
    JAX_PLATFORMS=cuda              runs on a GPU (and the tests marked `gpu` with it)
    JAX_COMPILATION_CACHE_DIR=...   keeps compiled functions elsewhere than in .cache/jax
    ATLAS_JAX_CACHE=...             keeps packed weights, executables and costs elsewhere than in .cache
    HYPOTHESIS_PROFILE=deep         draws many more examples, at random
"""

import collections
import contextlib
import functools
import inspect
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Before jax is imported, since it reads them then.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ.setdefault("ATLAS_JAX_CACHE", str(ROOT / ".cache"))
# With a bound, the cache's files are read and written under a lock, which pytest's workers need.
os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(1 << 30))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

import hypothesis
import jax
import jaxtyping
import pytest
from beartype import beartype

jax.config.update("jax_num_cpu_devices", 2)  # for tests of several; all others run on the first

hypothesis.settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=50,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile("deep", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


# Types and shapes.
#
# Every annotation of both packages is checked at run time, those of registered dataclasses included. JAX, however,
# rebuilds such a dataclass with whatever a transformation carries: an abstract value, a batch tracer of another rank,
# the shape tuples of a tree.map. So the check is left out where JAX itself calls the constructor.

PACKAGES = ("atlas_jax", "pallas_kernels")


def _check_unless_called_by_jax(cls: type) -> None:
    plain = inspect.unwrap(cls.__init__)
    checked = jaxtyping.jaxtyped(plain, typechecker=beartype)

    @functools.wraps(plain)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        init = plain if caller.partition(".")[0] == "jax" else checked
        init(self, *args, **kwargs)

    cls.__init__ = __init__
    cls.__no_type_check__ = True  # type: ignore[attr-defined]  # the hook adds no check of its own


def _register_dataclass(register: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(register)
    def wrapped(nodetype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if nodetype is None:  # called with the fields only: @register_dataclass(data_fields=...)
            return functools.partial(wrapped, *args, **kwargs)
        registered = register(nodetype, *args, **kwargs)
        if nodetype.__module__.partition(".")[0] in PACKAGES:
            _check_unless_called_by_jax(nodetype)
        return registered

    return wrapped


jax.tree_util.register_dataclass = _register_dataclass(jax.tree_util.register_dataclass)

for _package in PACKAGES:
    assert _package not in sys.modules, f"{_package} was imported before its types could be checked"
jaxtyping.install_import_hook(PACKAGES, "beartype.beartype")


# Traces.

_TRACE_EVENT = "/jax/core/compile/jaxpr_trace_duration"
_counters: list[collections.Counter[str]] = []


def _on_event(event: str, duration_secs: float, **about: Any) -> None:
    if event == _TRACE_EVENT:
        for counter in _counters:
            counter[str(about.get("fun_name"))] += 1


jax.monitoring.register_event_duration_secs_listener(_on_event)


@contextlib.contextmanager
def _count_traces() -> Iterator[collections.Counter[str]]:
    counter: collections.Counter[str] = collections.Counter()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters[:] = [other for other in _counters if other is not counter]


@pytest.fixture(scope="session")
def count_traces() -> Callable[[], contextlib.AbstractContextManager[collections.Counter[str]]]:
    """Counts what `jax.jit` traces, by function name.

    with count_traces() as traces:
        step(state, tokens)
        step(state, tokens)
    assert traces["step"] == 1

    A function jitted inside another is traced, and counted, as part of the outer one.
    """

    def probe() -> int:
        return 0

    with _count_traces() as traces:
        jax.jit(probe)()
    assert traces["probe"] == 1, f"this JAX reports no {_TRACE_EVENT}, so traces cannot be counted"
    return _count_traces


# Surroundings.


@pytest.fixture(scope="session")
def shared() -> pathlib.Path:
    """The folder `shared` beside the checkout, with reference data; without it, the tests that need it are skipped."""
    path = ROOT.parent / "shared"
    if not path.is_dir():
        pytest.skip("needs the folder shared/ beside the checkout, which is not there")
    return path


@pytest.fixture(scope="module", autouse=True)
def _release_executables(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each compiled function holds memory maps, of which a process has only so many."""
    yield
    for value in vars(request.module).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()
    jax.clear_caches()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needs_gpu and jax.default_backend() != "gpu":
        for item in needs_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU (JAX_PLATFORMS=cuda)"))
