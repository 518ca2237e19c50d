"""Times of the gated delta rule's kernels on a GPU, beside their floors, the bars and flash-linear-attention.

    python -m pallas_kernels.gated_delta.bench
    python -m pallas_kernels.gated_delta.bench --step --columns 32 64 --warps 2 4    # tunings of the step side by side

A layer of the 27B shape (16 key and 48 value heads of 128x128). A step is timed as the runtime runs it: all layers one after
another in one CUDA graph, `T` new rows with `T` pending ones to fold. Its floor is the state, read and written once, at the copy
bandwidth measured first; that of a prefill is not stated: it is bound by the chain of chunks, which the sequences of a ragged batch
go through side by side. The peer's column holds what was measured earlier on an H200; where `fla` can be imported it is measured
too, without the convolution and the gates, which our step includes.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta import triton, triton_prefill, triton_tile
from pallas_kernels.gated_delta.arg_specs import SHAPES, Shape, prefill_arrays, prefill_specs, step_specs
from pallas_kernels.ragged import BLOCK, blocks
from pallas_kernels.timing import begin, compiled, normal, row, seconds

PEER = {1: 4.94, 2: 5.88, 4: 7.76, 8: 11.84}  # us a layer of fused_recurrent_gated_delta_rule, by rows
BAR = {1: 4.0, 2: 4.2, 4: 4.8, 8: 6.5}
PREFILL_PEER = {2048: 726, 8192: 925, 32768: 3624}  # us of chunk_gated_delta_rule, by tokens
PREFILL_BAR = {2048: 363, 8192: 925, 32768: 3624}


def steps(T: int, B: int, layers: int, **tuning: Any) -> Callable[..., Any]:
    """`layers` steps of B sequences in the slots 1 … B, one after another: mixer, state, projected -> output, state."""

    def run(mixer: Any, state: Any, projected: Any) -> Any:
        many = lambda x: jnp.full(B, x, jnp.int32)  # noqa: E731
        slots, out = jnp.arange(1, B + 1, dtype=jnp.int32), None
        for layer in range(layers):
            out, state = triton.step(mixer, state, layer, slots, many(100), many(T), many(T), projected, T, **tuning)
        return out, state

    return run


def filled(specs: Any) -> Any:
    """Normal values for `specs`, small ones for a state."""
    leaves, tree = jax.tree.flatten(specs)
    return jax.tree.unflatten(tree, [normal(i, *x.shape, dtype=x.dtype, scale=0.1) for i, x in enumerate(leaves)])


def bench_steps(shape: Shape, B: int, rows: Sequence[int], tunings: Sequence[dict[str, Any]], bandwidth: float) -> None:
    layers = shape.layers if B == 1 else 8
    cases = [
        (T, tuning, step_specs(shape._replace(layers=layers), B, T, slots=B + 1)) for tuning in tunings for T in rows
    ]
    jobs = [
        compiled(steps(T, B, layers, **tuning), spec[0], spec[1], spec[6], donate=(1,)) for T, tuning, spec in cases
    ]
    mixer, state = filled(cases[0][2][:2])
    floor = 2 * B * shape.state_bytes / bandwidth * 1e6
    first = 0.0
    for (T, tuning, spec), job in zip(cases, jobs, strict=True):
        args = mixer, state, filled(spec[6])
        time, (_, state, _) = seconds(job.result(), args, lambda out, args: (args[0], out[1], args[2]))
        us = time / layers * 1e6
        first = us if rows[0] == T else first
        bar, peer = (f"{x[T]:.2f}" if B == 1 and T in x else "-" for x in (BAR, PEER))
        row(
            ", ".join([f"step, batch {B}, T = {T}", *(f"{name} {value}" for name, value in tuning.items())]),
            f"{us:.2f} us",
            f"{floor:.2f} us",
            f"{floor / us:.0%} of copy",
            bar if B == 1 else "70 %",
            peer,
            f"{us / first:.2f}x T = {rows[0]}",
        )


class Prefills:
    """`calls` times in one program, one after another: prefills of `batches` ragged batches of sequences with `n_rows`."""

    def __init__(self, shape: Shape, n_rows: tuple[int, ...], batches: int = 1, calls: int = 1) -> None:
        self.shape, self.n_rows, self.calls = shape, n_rows, calls
        state, slots, *rows = prefill_specs(shape, BLOCK * sum(map(blocks, n_rows)), len(n_rows))
        self.state = jax.ShapeDtypeStruct((1, batches * len(n_rows) + 1, *state.shape[2:]), state.dtype)
        self.slots = jax.ShapeDtypeStruct((batches, *slots.shape), slots.dtype)
        self.job = compiled(self._run, self.state, self.slots, *rows, donate=(0,))

    def _run(self, state: Any, slots: Any, *rows: Any) -> Any:
        out = jnp.float32(0)
        for _ in range(self.calls):
            for batch in range(slots.shape[0]):
                y, state = triton_prefill.prefill(state, 0, slots[batch], *rows)
                out += y[-1, 0, 0]
        return out, state

    def us(self) -> float:
        """Microseconds of one pass over all batches."""
        slots = jnp.arange(1, self.state.shape[1], dtype=jnp.int32).reshape(self.slots.shape)
        state = normal(0, *self.state.shape, dtype=self.state.dtype, scale=0.1)
        args = state, slots, *prefill_arrays(self.shape, self.n_rows)[2:]
        time, _ = seconds(self.job.result(), args, lambda out, args: (out[1], *args[1:]), n=5)
        return time / self.calls * 1e6


def bench_prefill(shape: Shape, lengths: tuple[int, ...]) -> None:
    jobs = {T: Prefills(shape, (T,), calls=4) for T in lengths}
    for T, job in jobs.items():
        us, peer = job.us(), PREFILL_PEER[T]
        row(
            f"prefill, {T} tokens", f"{us:.0f} us", "-", "-", f"{PREFILL_BAR[T]}", f"{peer}", f"{peer / us:.2f}x faster"
        )


def bench_ragged(shape: Shape, sequences: int, tokens: tuple[int, ...], together: tuple[int, ...]) -> None:
    """Prompts of so many tokens one by one, and so many `together` in ragged batches."""
    jobs = {(n, S): Prefills(shape, (n,) * S, sequences // S) for n in tokens for S in (1, *together)}
    for n in tokens:
        alone = jobs[n, 1].us()
        row(f"prefill, {sequences} x {n} tokens, one by one", f"{alone:.0f} us", *"-----")
        for S in together:
            us = jobs[n, S].us()
            row(
                f"prefill, {sequences} x {n} tokens, {S} together", f"{us:.0f} us", *"----", f"{alone / us:.2f}x faster"
            )


def bench_peer(shape: Shape, rows: Sequence[int], lengths: tuple[int, ...]) -> None:
    """flash-linear-attention's kernels under CUDA graphs, in this process, where it is installed."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
        from fla.ops.gated_delta_rule import (  # pyright: ignore[reportMissingImports]
            chunk_gated_delta_rule,
            fused_recurrent_gated_delta_rule,
        )
    except ImportError as error:
        print(f"flash-linear-attention is not measured: {error}")
        return
    Hk, Hv, Dk, Dv, _ = shape

    def us(function: Any, T: int, calls: int) -> float:
        new = lambda *s, dtype=torch.bfloat16: torch.randn(*s, dtype=dtype, device="cuda")  # noqa: E731
        repeat = Hv // Hk
        q, k = (new(1, T, Hk, Dk).repeat_interleave(repeat, 2) for _ in range(2))
        args = dict(v=new(1, T, Hv, Dv), g=-new(1, T, Hv, dtype=torch.float32).exp(), beta=new(1, T, Hv).sigmoid())
        state = new(1, Hv, Dk, Dv, dtype=torch.float32) * 0.1
        run = lambda: function(  # noqa: E731
            q=q, k=k, **args, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        stream = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(3):
                run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            for _ in range(calls):
                run()
        times = []
        for _ in range(8):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            graph.replay()
            ended.record()
            torch.cuda.synchronize()
            times.append(began.elapsed_time(ended))
        return min(times) / calls * 1e3

    for T in rows:
        row(f"fla, fused_recurrent, T = {T}", f"{us(fused_recurrent_gated_delta_rule, T, 48):.2f} us")
    for T in lengths:
        row(f"fla, chunk, {T} tokens", f"{us(chunk_gated_delta_rule, T, 4):.0f} us")


def tunings(given: argparse.Namespace) -> list[dict[str, Any]]:
    """All combinations of what was asked for, but those whose warps would have less than a column for each few lanes."""
    names = {"columns": "columns", "warps": "num_warps", "lanes": "lanes", "block": "block"}
    asked = {name: getattr(given, flag) for flag, name in names.items() if getattr(given, flag)}
    every = [dict(zip(asked, values, strict=True)) for values in itertools.product(*asked.values())]
    fits = lambda t: t.get("num_warps", 1) * 32 // t.get("lanes", triton_tile.LANES) <= t.get("columns", 128)  # noqa: E731
    return [tuning for tuning in every if fits(tuning)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", action="store_true", help="leaves the prefill and the peer out")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8], help="of a step of one sequence")
    parser.add_argument("--columns", type=int, nargs="+", help="of a head's state in one program of the step")
    parser.add_argument("--warps", type=int, nargs="+", help="of such a program")
    parser.add_argument("--lanes", type=int, nargs="+", help="that share a column")
    parser.add_argument("--block", type=int, nargs="+", help="journal rows that are loaded together")
    given = parser.parse_args()
    bandwidth = begin("a layer of the 27B shape", "time", "floor", "share", "bar", "peer", "")
    shape, lengths = SHAPES["27b"], (2048, 8192, 32768)
    bench_steps(shape, 1, given.rows, tunings(given), bandwidth)
    bench_steps(shape, 32, (4,), tunings(given), bandwidth)
    if not given.step:
        bench_prefill(shape, lengths)
        bench_ragged(shape, 32, (64, 256), (4, 32))
        bench_peer(shape, given.rows, lengths)


if __name__ == "__main__":
    main()
