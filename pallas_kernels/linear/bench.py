"""Times of products with narrow plain weights on a GPU, beside the library's and their floors.

    python -m pallas_kernels.linear.bench [--rows 1 16 64]

Shapes are those of a layer: decay and write strength of the 27B, the router and the shared expert's gate of the 35B-A3B. Layers run
one after another in one CUDA graph, each waiting for the one before, sums of parts included; the floor is the weight's bytes at
the copy bandwidth, which one kernel's launch (some 2 us) hides.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax.numpy as jnp

from pallas_kernels.linear.api import linear
from pallas_kernels.timing import begin, compiled, normal, row, seconds

SHAPES = {"decay and write strength": (5120, 96), "router": (2048, 256), "gate of the shared expert": (2048, 1)}
LAYERS = 48


def one_after_another(implementation: str | None) -> Any:
    """Runs all layers of a stack, each with rows that the one before changed by nothing."""

    def run(x: Any, weights: Any) -> Any:
        for layer in range(LAYERS):
            y = linear(x, weights, layer, implementation=implementation)
            x = x + (jnp.mean(y, axis=1, keepdims=True) * 1e-30).astype(x.dtype)
        return x

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description="Products with narrow plain weights, beside the library's.")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    args = parser.parse_args()
    bandwidth = begin("inputs x outputs", "rows", "ours", "the library's", "floor")
    for name, (K, N) in SHAPES.items():
        stack = normal(2, LAYERS, K, N, scale=0.01)
        for rows in args.rows:
            given = normal(1, rows, K), stack
            jobs = [compiled(one_after_another(how), *given) for how in ("triton", "reference")]
            runs = [job.result() for job in jobs]
            ours, theirs = (seconds(run, given)[0] / LAYERS * 1e6 for run in runs)
            floor = stack.nbytes / LAYERS / bandwidth * 1e6
            row(f"{K}x{N}, {name}", f"{rows}", f"{ours:.2f} us", f"{theirs:.2f} us", f"{floor:.2f} us")


if __name__ == "__main__":
    main()
