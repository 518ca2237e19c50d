"""Times of products with packed weights on a GPU, beside their floors and what else the machine has for them.

    python -m pallas_kernels.w4a16.bench [--shapes 34816x5120 …] [--no-peers]

Each weight is a stack of layers of some 0.8 GB, so that nothing stays in the L2 cache; layers run one after another in one CUDA
graph, each waiting for the one before, sums of parts included. The floor is the weight's bytes, scales and all, at the copy
bandwidth measured first. The rows are 1 … 64; our kernel runs the same program for 1 to 8 of them. Peers: XLA's own product with
an `int4` array (one scale a column, no groups, which is less work) and PyTorch's `_weight_int4pack_mm` (groups of 128).
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.timing import begin, compiled, normal, row, seconds
from pallas_kernels.w4a16 import api
from pallas_kernels.w4a16.forms import Fp8, Int4, Nvfp4

SHAPES = ((34816, 5120), (5120, 17408), (16384, 5120), (5120, 6144))  # outputs, inputs: a layer of the 27B shape
ROWS = (1, 2, 4, 8, 16, 32, 64)
STACK = 0.8e9  # bytes


def weight(form: str, N: int, K: int, layers: int) -> Any:
    """A stack of random codes and useful scales."""
    bits = lambda seed, *shape: jax.jit(  # noqa: E731
        lambda: jax.random.bits(jax.random.key(seed, impl="rbg"), shape, "uint8")
    )()
    blocks = K // 128
    if form == "fp8":
        codes = bits(0, layers, blocks, N, 128) & 0xBF  # no NaN, nothing huge
        return Fp8(codes, jnp.full((layers, 1, N), 0.01, jnp.float32))
    codes = bits(0, layers, blocks, N, 64)
    if form == "nvfp4":
        return Nvfp4(codes, bits(1, layers, 8 * blocks, N) & 0x3F, jnp.full((layers, N), 0.01, jnp.float32))
    scales = jnp.full((layers, K // int(form.split("g")[1]), N), 0.01, jnp.bfloat16)
    return Int4(codes, scales)


def one_after_another(product: Any, layers: int) -> Any:
    """Runs `product(x, weights, layer)` of all layers, each with the rows that the one before changed by nothing."""

    def run(x: Any, weights: Any) -> Any:
        out = jnp.float32(0)
        for layer in range(layers):
            y = product(x, weights, layer)
            x = x + (y[:, :1] * 1e-30).astype(x.dtype)
            out += y[0, 0].astype(jnp.float32)
        return out

    return run


def bench(form: str, N: int, K: int, bandwidth: float) -> dict[int, float]:
    layers = max(2, int(STACK / (N * K / 2)))
    stack = weight(form, N, K, layers)
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(stack)) / layers
    floor = nbytes / bandwidth * 1e6
    jobs = {M: compiled(one_after_another(api.product, layers), normal(1, M, K), stack) for M in ROWS}
    runs = {M: job.result() for M, job in jobs.items()}  # all of them first: compiling disturbs what is timed
    times = {}
    for M, run in runs.items():
        x = normal(1, M, K)
        times[M] = seconds(run, (x, stack), n=10)[0] / layers * 1e6
        share = f"{floor / times[M]:.0%} of copy, {nbytes / times[M] / 1e6:.2f} TB/s"
        row(f"{N}x{K}, {form}", f"{M}", f"{times[M]:.2f} us", f"{floor:.2f} us", share, f"{times[M] / times[1]:.2f}")
    return times


def bench_xla(N: int, K: int) -> dict[int, float]:
    layers = max(2, int(STACK / (N * K / 2)))
    make = lambda i: jax.jit(lambda: jax.random.bits(jax.random.key(i), (N, K), "uint8").astype(jnp.int4))()  # noqa: E731
    weights = tuple(make(i) for i in range(layers))

    def product(x: Any, weights: Any, layer: int) -> Any:
        w = weights[layer].astype(x.dtype)
        return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    times = {}
    for M in ROWS:
        x = normal(1, M, K)
        run = jax.jit(one_after_another(product, layers)).lower(x, weights).compile()
        times[M] = seconds(run, (x, weights), n=10)[0] / layers * 1e6
    return times


def bench_torch(N: int, K: int) -> dict[int, float]:
    import torch  # pyright: ignore[reportMissingImports]

    layers = max(2, int(STACK / (N * K / 2)))
    weights, scales = [], []
    for _ in range(layers):
        codes = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, device="cuda")
        weights.append(torch.ops.aten._convert_weight_to_int4pack(codes, 8))
        scales.append(torch.full((K // 128, N, 2), 0.01, dtype=torch.bfloat16, device="cuda"))
    times = {}
    for M in ROWS:
        x = torch.randn(M, K, dtype=torch.bfloat16, device="cuda")
        run = lambda x: [torch.ops.aten._weight_int4pack_mm(x, w, 128, s) for w, s in zip(weights, scales, strict=True)]  # noqa: E731
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(x)
        best = float("inf")
        for _ in range(5):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            for _ in range(5):
                graph.replay()
            ended.record()
            torch.cuda.synchronize()
            best = min(best, began.elapsed_time(ended) / 5 / layers * 1e3)
        times[M] = best
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description="Products with packed weights, beside their floors and peers.")
    parser.add_argument("--shapes", nargs="*", default=[f"{N}x{K}" for N, K in SHAPES])
    parser.add_argument("--forms", nargs="*", default=["int4 g128", "int4 g32", "nvfp4", "fp8"])
    parser.add_argument("--no-peers", action="store_true")
    args = parser.parse_args()
    bandwidth = begin("outputs x inputs", "rows", "time", "floor", "share", "over 1 row")
    for name in args.shapes:
        N, K = map(int, name.split("x"))
        ours = {form: bench(form, N, K, bandwidth) for form in args.forms}[args.forms[0]]
        for peer, run in () if args.no_peers else (("XLA int4", bench_xla), ("torch int4pack", bench_torch)):
            try:
                times = run(N, K)
            except Exception as error:  # a peer that is not there, or cannot
                print(f"{peer} is not measured: {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            for M, us in times.items():
                row(f"{N}x{K}, {peer}", f"{M}", f"{us:.2f} us", "", f"ours is {us / ours[M]:.2f} times as fast", "")


if __name__ == "__main__":
    main()
