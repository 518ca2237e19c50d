"""The process in which `deviceless` compiles for GPUs that are not there: XLA reads its flags once a process, and the CUDA
plugin must not reach the tests that run on the CPU.

Started as `python deviceless_worker.py PACKAGES FOLDER`. Reads pickled `Request`s from its input until that ends, and answers
each with a pickled `Result`, or with the text of the exception.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import pickle
import shutil
import sys
import time
import traceback
from typing import Any


@dataclasses.dataclass(frozen=True)
class Request:
    """What to compile: `call` is the pickled (function, arguments, donated positions, compiler options)."""

    target: str  # a GpuTargetConfigProto as text
    call: bytes


@dataclasses.dataclass(frozen=True)
class Result:
    """XLA's own texts and figures about one executable."""

    thunk_text: str
    hlo: str
    ptx: dict[str, str]  # by kernel
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    donated_bytes: int  # of the donated arguments: what `alias_bytes` should be
    arguments: int
    lower_s: float
    compile_s: float
    compile_cpu_s: float  # of all threads


def serve(packages: str, folder: str) -> None:
    """Answers requests; XLA's dumps go to `folder`."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed belongs into the log
    sys.path.insert(0, packages)
    os.environ.update(
        JAX_PLATFORMS="cpu",
        JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",  # or the plugin refuses: there are no CUDA libraries
        JAX_ENABLE_COMPILATION_CACHE="0",  # an executable from the cache leaves no dump
        XLA_FLAGS=f"--xla_dump_to={folder} --xla_dump_emitter_re=ptx",  # all emitters' texts would take gigabytes
    )
    import jax
    from jax._src import xla_bridge

    xla_bridge.discover_pjrt_plugins()
    jax.default_backend = lambda: "gpu"  # what is chosen by platform shall be what a GPU gets
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: Result | str = compile_request(request, pathlib.Path(folder))
        except Exception:
            answer = traceback.format_exc()
        pickle.dump(answer, answers)
        answers.flush()


@functools.cache
def _mesh(target: str) -> Any:
    """A mesh of one device of the described kind."""
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh

    topology = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=target, topology="1x1x1")
    return Mesh(np.array(topology.devices).reshape(1), ("device",))


def compile_request(request: Request, dump: pathlib.Path) -> Result:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    function, args, donate, options = pickle.loads(request.call)
    shutil.rmtree(dump, ignore_errors=True)
    mesh = _mesh(request.target)
    devices: Any = lambda *_: list(mesh.devices.flat)  # noqa: E731
    jax.devices = devices  # the card is asked for its name, and what else a kernel is cut to
    on_device = NamedSharding(mesh, PartitionSpec())
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_device)  # noqa: E731
    args = jax.tree.map(place, args)
    size = lambda x: x.size * x.dtype.itemsize  # noqa: E731
    began = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(function, donate_argnums=donate).lower(*args)
        lowered_at, cpu = time.perf_counter(), time.process_time()
        chosen: Any = options() if callable(options) else options
        compiled: Any = lowered.compile(dict(chosen or {}))
    compiled_at, compiled_cpu = time.perf_counter(), time.process_time()
    memory = compiled.memory_analysis()
    return Result(
        thunk_text=_thunks(dump),
        hlo=compiled.as_text(),
        ptx={name: text for text in map(pathlib.Path.read_text, dump.glob("*.ptx")) for name in _entries(text)},
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        donated_bytes=sum(size(x) for i in donate for x in jax.tree.leaves(args[i])),
        arguments=len(jax.tree.leaves(args)),
        lower_s=lowered_at - began,
        compile_s=compiled_at - lowered_at,
        compile_cpu_s=compiled_cpu - cpu,
    )


def _entries(ptx: str) -> list[str]:
    """Names of the kernels in one PTX text."""
    return [line.split()[-1].rstrip("(") for line in ptx.splitlines() if line.startswith(".visible .entry")]


def _thunks(dump: pathlib.Path) -> str:
    """The thunk sequence as it is executed: XLA writes it a second time if it put any of it into command buffers."""
    texts = {
        path.name.rpartition(".thunk_sequence")[2]: path.read_text() for path in dump.glob("*.thunk_sequence*.txt")
    }
    return texts.get("_after_thunk_passes.txt") or texts[".txt"]


if __name__ == "__main__":
    import deviceless_worker  # under the name by which the other side knows `Request`

    deviceless_worker.serve(*sys.argv[1:])
