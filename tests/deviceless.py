"""Compiles functions for an H200 and a GB10 on a machine that has neither, and reads from the result what decides its speed:
what is captured into a command buffer, what is copied, what is updated in place, and what each kernel loads, spills and needs.

    compiled = compile_for("gb10", step, params, state, donate=(1,), compiler_options=CAPTURE)
    assert_one_command_buffer(compiled)
    assert_in_place(compiled)
    assert_wide_loads(compiled, "gated_delta*")
    assert_fits(compiled)

XLA's CUDA plugin compiles without a driver or a CUDA library. It lies in a folder of its own, `cuda-compile` in the environment,
which `make test` fills from requirements/cuda-compile.txt, and is loaded by a process of its own: programs of the environment
never see it. What only a device can tell stays unknown: XLA does not autotune, so the products that it makes itself are
others than on the card; kernels of ours are the same.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import fnmatch
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import pickle
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import deviceless_worker as worker
import jax
from deviceless_text import Instruction, Thunk, accesses, instructions, only_moves, resources, thunks, unawaited

from pallas_kernels.registry import GPU_OPTIONS

ROOT = pathlib.Path(__file__).resolve().parent.parent
CACHE, CACHED = ROOT / ".cache" / "deviceless", 200  # files
TARGETS = ROOT / "tests" / "data" / "targets"
ARCHITECTURES = {"h200": "sm_90a", "gb10": "sm_121a"}
SHARED_BYTES = {"h200": 232448, "gb10": 101376}  # a block's limit
MB = 1_000_000

# One command buffer for a whole loop: loops are captured only if asked for, and the few operations around one must be enough
# to make a buffer, or not even the loop's body is captured.
CAPTURE = {name: GPU_OPTIONS[name] for name in ("xla_gpu_graph_min_graph_size", "xla_gpu_enable_command_buffer")}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel's PTX and what it tells. Counts are of instructions in the code, not of executions."""

    name: str
    target: str
    ptx: str
    dynamic_shared_bytes: int

    @property
    def loads(self) -> Counter[int]:
        """Loads from global memory, into registers or shared memory, by bytes a thread."""
        return accesses(self.ptx, "ld")

    @property
    def stores(self) -> Counter[int]:
        """Stores to global memory by bytes a thread."""
        return accesses(self.ptx, "st")

    @functools.cached_property
    def _resources(self) -> dict[str, int]:
        # Without its name, so that kernels that differ in nothing else are assembled once.
        ptx = re.sub(
            rf"(?<=entry ){self.name}(?=\()|\b{self.name}(?=_param_)",
            "kernel",
            self.ptx.replace(f"// .globl\t{self.name}\n", ""),
        )
        return resources(_ptxas(ptx, ARCHITECTURES[self.target]))

    @property
    def registers(self) -> int:
        return self._resources["registers"]

    @property
    def spill_bytes(self) -> int:
        """Bytes of registers that the code stores to or loads from local memory."""
        return self._resources["spill_stores"] + self._resources["spill_loads"]

    @property
    def shared_bytes(self) -> int:
        return self._resources["shared"] + self.dynamic_shared_bytes


@dataclasses.dataclass(frozen=True)
class Compiled(worker.Result):
    """An executable for `target`: XLA's figures (see `worker.Result`) and its texts, read."""

    target: str

    @functools.cached_property
    def thunks(self) -> list[Thunk]:
        """What the executable does, in order, loops' bodies included once."""
        return list(thunks(self.thunk_text))

    @property
    def command_buffers(self) -> list[Thunk]:
        return [thunk for thunk in self.thunks if thunk.kind == "kCommandBuffer"]

    @property
    def not_captured(self) -> list[Thunk]:
        """What the host launches one by one."""
        return [thunk for thunk in self.thunks if not thunk.captured and thunk.kind != "kCommandBuffer"]

    @functools.cached_property
    def instructions(self) -> list[Instruction]:
        """Instructions of the optimised HLO outside of fusions: what takes memory, and time."""
        return list(instructions(self.hlo))

    def copies(self, more_than: int = MB) -> list[Instruction]:
        """Instructions that only move data (copies, slices, transposes, conversions, fused or not), by result bytes."""
        return [x for x in self.instructions if x.bytes > more_than and only_moves(x)]

    def kernels(self, pattern: str = "*") -> list[Kernel]:
        """Kernels whose name matches, which is the name of the `pallas_call`, with a number where it occurs again.

        Raises:
            LookupError: there is none; says which there are.
        """
        names = sorted(fnmatch.filter(self.ptx, pattern))
        if not names:
            raise LookupError(f"no kernel is called {pattern!r}; there are {', '.join(sorted(self.ptx))}")
        shared = {thunk.name: thunk.shared_bytes for thunk in self.thunks}
        return [Kernel(name, self.target, self.ptx[name], shared.get(name, 0)) for name in names]

    def pallas_kernels(self) -> list[Kernel]:
        """Kernels that `pallas_call`s made: those that are ours, not XLA's."""
        calls = (x.origin.split("/") for x in self.instructions if x.opcode == "custom-call")
        ours = "|".join(sorted({re.escape(path[-2]) for path in calls if path[-1] == "pallas_call"}))
        return [kernel for kernel in self.kernels() if re.fullmatch(rf"({ours})(_+\d+)?", kernel.name)]


# ---- what a step must be ---------------------------------------------------------------------------------------------


def assert_one_command_buffer(compiled: Compiled) -> None:
    """The host launches one thing: a command buffer that holds all the rest."""
    outside = [f"{thunk.kind} {thunk.name}" for thunk in compiled.not_captured]
    count = len(compiled.command_buffers)
    assert count == 1 and not outside, f"{count} command buffers, and outside of them {len(outside)}: {outside[:20]}"


def assert_in_place(compiled: Compiled, more_than: int = MB) -> None:
    """All donated arrays are updated where they lie, and no other array of more than `more_than` bytes is moved either."""
    alias, donated = compiled.alias_bytes, compiled.donated_bytes
    assert alias == donated, f"{donated} bytes are donated, {alias} of them updated in place"
    copies = [f"{x.name} ({x.opcode}, {x.bytes} bytes, {x.origin})" for x in compiled.copies(more_than)]
    assert not copies, f"copies of more than {more_than} bytes: {copies}"


def assert_wide_loads(compiled: Compiled, pattern: str, share: float = 0.75) -> None:
    """Kernels load at least `share` of their bytes sixteen at a time (the rest are indices, scalars, and short vectors)."""
    for kernel in compiled.kernels(pattern):
        total = sum(width * n for width, n in kernel.loads.items())
        wide = sum(width * n for width, n in kernel.loads.items() if width >= 16)
        assert wide >= share * total > 0, f"{kernel.name}: loads by bytes a thread {dict(sorted(kernel.loads.items()))}"


def assert_fits(
    compiled: Compiled, pattern: str | None = None, shared_bytes: int | None = None, spill_bytes: int = 0
) -> None:
    """Kernels (all of Pallas, or those that match) spill no register, or no more than told, need no more shared memory than a
    block may have, and never let a loop turn while the tensor cores read what its next turn may overwrite."""
    limit = SHARED_BYTES[compiled.target] if shared_bytes is None else shared_bytes
    for kernel in compiled.pallas_kernels() if pattern is None else compiled.kernels(pattern):
        assert kernel.spill_bytes <= spill_bytes, (
            f"{kernel.name} spills {kernel.spill_bytes} bytes ({kernel.registers} registers)"
        )
        assert kernel.shared_bytes <= limit, f"{kernel.name} needs {kernel.shared_bytes} bytes of shared memory"
        turns = unawaited(kernel.ptx)
        assert not turns, f"{kernel.name} does not wait for its products at the ends of loops: lines {turns} of its PTX"


# ---- compiling -------------------------------------------------------------------------------------------------------


@functools.cache
def packages() -> pathlib.Path | None:
    """The folder with XLA's CUDA plugin and ptxas: `cuda-compile` in the environment, or its packages where jax[cuda13] is."""
    folders = pathlib.Path(sys.prefix, "cuda-compile"), pathlib.Path(sysconfig.get_path("purelib"))
    return next((x for x in folders if (x / "jax_plugins" / "xla_cuda13").is_dir()), None)


MISSING = "XLA's CUDA plugin is not installed: `make .venv/.cuda-compile`"


def compile_for(
    target: str,
    function: Callable[..., Any],
    *args: Any,
    donate: tuple[int, ...] = (),
    compiler_options: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
) -> Compiled:
    """Compiles `function` for one device of `target`, "h200" or "gb10"; kept in .cache/deviceless until a source changes.

    Args:
        function: defined at the top of a module, or a `functools.partial` of such a function: another process imports it.
            There, `jax.default_backend()` is "gpu".
        args: pytrees of arrays or `jax.ShapeDtypeStruct`.
        donate: positions of arguments whose memory the function takes over.
        compiler_options: XLA's, or a function (as above) that returns them.

    Raises:
        ValueError: there is no such target, or another process cannot import the function.
        RuntimeError: the compilation failed, with its traceback; or the plugin is not installed.
    """
    folder = packages()
    if folder is None:
        raise RuntimeError(MISSING)
    if target not in ARCHITECTURES:
        raise ValueError(f"no target is called {target!r}; there are {', '.join(sorted(ARCHITECTURES))}")
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    try:
        call = pickle.dumps((function, args, donate, compiler_options))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"a function to compile must stand at the top of a module: {error}") from error
    request = worker.Request((TARGETS / f"{target}.txtpb").read_text(), call)
    key = _digest([request.target.encode(), call, *_versions(), *_sources(function)])
    path = CACHE / f"{key}.pickle"
    if path.exists():
        path.touch()
        return Compiled(**vars(pickle.loads(path.read_bytes())), target=target)
    result = _compiler(folder).compile(request)
    _keep(path, pickle.dumps(result))
    return Compiled(**vars(result), target=target)


class _Compiler:
    """The compiling process, which lives until this one ends."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.scratch = tempfile.TemporaryDirectory(prefix="deviceless-")
        self.log = pathlib.Path(self.scratch.name, "log.txt")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, worker.__file__, folder, pathlib.Path(self.scratch.name, "xla")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
            )
        atexit.register(self.close)

    def compile(self, request: worker.Request) -> worker.Result:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            pickle.dump(request, self.process.stdin)
            self.process.stdin.flush()
            answer = pickle.load(self.process.stdout)
        except (EOFError, OSError) as error:
            _compiler.cache_clear()
            log = self.log.read_text(errors="replace")
            raise RuntimeError(f"the compiling process died; the end of its log:\n{log[-4000:]}") from error
        if isinstance(answer, str):
            raise RuntimeError(f"compiling failed:\n{answer}")
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()  # on which it ends
        self.process.wait()


@functools.cache
def _compiler(folder: pathlib.Path) -> _Compiler:
    return _Compiler(folder)


def _ptxas(ptx: str, architecture: str) -> str:
    """ptxas' report on one PTX text."""
    folder = packages()
    if folder is None:
        raise RuntimeError(MISSING)
    ptxas = folder / "nvidia" / "cu13" / "bin" / "ptxas"
    path = CACHE / f"{_digest([ptx.encode(), architecture.encode(), str(ptxas.stat().st_size).encode()])}.ptxas"
    if not path.exists():
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(ptx)
            file.flush()
            command = [ptxas, "-v", f"-arch={architecture}", file.name, "-o", "/dev/null"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"ptxas: {done.stderr}")
        _keep(path, done.stderr.encode())
    return path.read_text()


def _keep(path: pathlib.Path, content: bytes) -> None:
    """Writes a file of the cache and drops the oldest ones."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=CACHE, delete=False) as file:
        file.write(content)
    pathlib.Path(file.name).replace(path)
    with contextlib.suppress(FileNotFoundError):  # another process may be at it as well
        for old in sorted(CACHE.glob("*.*"), key=lambda x: x.stat().st_mtime, reverse=True)[CACHED:]:
            old.unlink()


def _sources(function: Any) -> Iterable[bytes]:
    """The text of everything that a compilation may depend on, but for installed packages."""
    while isinstance(function, functools.partial):
        function = function.func
    module = sys.modules[function.__module__].__file__
    files = [*(ROOT / "atlas_jax").rglob("*.py"), *(ROOT / "pallas_kernels").rglob("*.py")]
    files += [pathlib.Path(x) for x in (worker.__file__, module) if x]
    return (x.read_bytes() for x in sorted(files))


def _versions() -> Iterable[bytes]:
    return (importlib.metadata.version(name).encode() for name in ("jax", "jaxlib", "flax"))


def _digest(parts: Iterable[bytes]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(hashlib.sha256(part).digest())
    return whole.hexdigest()[:32]
