"""Compiles the round of decoding of a published shape, without weights and without a GPU, and reports what came of it.

    python tests/compile_step.py qwen3.5-27b --rows 1 4 --target h200 gb10

`make compile-27b` runs it. Ends with status 1 where a check fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections import Counter

import jax
import jax.numpy as jnp
from deviceless import MB, Compiled, assert_fits, assert_in_place, assert_one_command_buffer, compile_for

from atlas_jax.config import ModelConfig, RunConfig
from atlas_jax.decode import round as rounds
from atlas_jax.decode.drafters import Drafter, drafter_named
from atlas_jax.decode.state import init_decode
from atlas_jax.models import HybridModel
from atlas_jax.settings import compiler_options
from atlas_jax.weights.presets import parameter_shapes, preset_config


def compile_round(
    target: str, config: ModelConfig, run: RunConfig, drafter: Drafter, K: int, sequences: int = 1
) -> Compiled:
    """`Executables.dispatch`, of shapes alone."""
    model = HybridModel(config, dtype=jnp.dtype(run.dtype), layout=run.layout, row_group=run.row_group)
    function = functools.partial(rounds.dispatch, model, drafter, K, None, run.rounds_per_dispatch)
    params = parameter_shapes(config, dtype=run.dtype, layout=run.layout)
    fresh = lambda: dataclasses.replace(init_decode(config, run), drafter=drafter.init(config, run))  # noqa: E731
    state = jax.eval_shape(fresh)
    slots, count = jax.ShapeDtypeStruct((sequences,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    chosen = functools.partial(compiler_options, run.row_group)
    return compile_for(target, function, params, state, slots, count, donate=(1,), compiler_options=chosen)


def compile_prefill(target: str, config: ModelConfig, run: RunConfig, T: int, sequences: int) -> Compiled:
    """`Executables.prefill`, of shapes alone."""
    model = HybridModel(config, dtype=jnp.dtype(run.dtype), layout=run.layout, row_group=run.row_group)
    function = functools.partial(model.apply, method="prefill")
    params = parameter_shapes(config, dtype=run.dtype, layout=run.layout)
    state = jax.eval_shape(lambda: init_decode(config, run).target)
    each, tokens = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (sequences, T))
    chosen = functools.partial(compiler_options, run.row_group)
    return compile_for(target, function, params, state, each, tokens, each, each, donate=(1,), compiler_options=chosen)


def failures(compiled: Compiled) -> list[str]:
    found = []
    for check in (assert_one_command_buffer, assert_in_place, assert_fits):
        try:
            check(compiled)
        except AssertionError as error:
            found.append(str(error))
    return found


def report(compiled: Compiled) -> None:
    kinds = Counter(thunk.kind for thunk in compiled.thunks)
    print(f"  traced and lowered in {compiled.lower_s:.0f} s, compiled in {compiled.compile_s:.0f} s", end=" ")
    print(f"({compiled.compile_cpu_s:.0f} s of CPU, {len(compiled.ptx)} kernels to compile)")
    print(
        f"  {compiled.arguments} arguments; {compiled.alias_bytes / MB:.1f} of {compiled.donated_bytes / MB:.1f} MB",
        end=" ",
    )
    print(f"of state in place; {compiled.temp_bytes / MB:.1f} MB of temporaries")
    print(
        f"  launched by the host: {len(compiled.command_buffers)} command buffers, {len(compiled.not_captured)} others"
    )
    print("  in it:", ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
    for count, bytes_, origin in _grouped(compiled)[:12]:
        print(f"  {count} copies of {bytes_ / MB:.1f} MB: {origin}")
    for kernel in compiled.pallas_kernels():
        print(f"  {kernel.name}: {kernel.registers} registers, {kernel.spill_bytes} bytes spilled,", end=" ")
        print(f"{kernel.shared_bytes} shared; loads by bytes a thread {dict(sorted(kernel.loads.items()))}")


def _grouped(compiled: Compiled) -> list[tuple[int, int, str]]:
    counts = Counter((x.bytes, x.origin or x.name) for x in compiled.copies())
    return sorted(((n, *key) for key, n in counts.items()), key=lambda x: -x[0] * x[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape")
    parser.add_argument("--target", nargs="+", default=["h200", "gb10"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--drafter", default="none")
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--layers", type=int, help="only the first layers")
    given = parser.parse_args()
    config = preset_config(given.shape)
    if given.layers:
        config = dataclasses.replace(config, layer_types=config.layer_types[: given.layers])
    run = RunConfig(
        dtype="bfloat16", slots=given.sequences, max_drafts=max(7, *given.rows), row_group=16, layout="stacked"
    )
    failed = False
    for target in given.target:
        for rows in given.rows:
            print(
                f"{given.shape}, {target}, {rows} rows, {given.sequences} sequences, drafter {given.drafter}",
                flush=True,
            )
            compiled = compile_round(target, config, run, drafter_named(given.drafter), rows, given.sequences)
            report(compiled)
            for message in failures(compiled):
                failed = True
                print(f"  FAILED {message[:600]}")
            sys.stdout.flush()
    return failed


if __name__ == "__main__":
    import compile_step  # not __main__, which the compiling process could not import

    sys.exit(compile_step.main())
