"""Times of the products of chunks of prompts with packed weights, and with experts, on a GPU.

    python -m pallas_kernels.w4a16.bench_prefill [--rows 128 256 512 2048] [--tokens 256 2048]

Layers run one after another in one CUDA graph, each waiting for the one before. Beside the product of a packed weight stands the
library's with a plain one in bfloat16, which has nothing to decode. Experts are those of the 35B-A3B shape, 256 of which each token
has 8, drawn at random; their floor is the weights' bytes at the copy bandwidth measured first, and the peer XLA's `ragged_dot`,
which is run for few tokens only: it computes every row with every expert.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.linear import api as linear
from pallas_kernels.timing import begin, compiled, normal, row, seconds
from pallas_kernels.w4a16 import api
from pallas_kernels.w4a16.bench import SHAPES, one_after_another, weight
from pallas_kernels.w4a16.forms import Int4

EXPERTS, CHOSEN = 256, 8
EXPERT_SHAPES = ((1024, 2048), (2048, 512))  # outputs, inputs: gates beside ups, and downs
LAYERS = 4


def dense(form: str, N: int, K: int, rows: list[int]) -> None:
    """A packed weight, and a plain one with the library."""
    packed, plain = weight(form, N, K, LAYERS), normal(2, LAYERS, K, N, scale=0.01)

    def library(x: Any, w: Any, layer: int) -> Any:
        return jax.lax.dot_general(x, w[layer], (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    ways = (api.product, packed), (library, plain)
    jobs = {
        (R, i): compiled(one_after_another(f, LAYERS), normal(1, R, K), w)
        for R in rows
        for i, (f, w) in enumerate(ways)
    }
    for R in rows:
        x = normal(1, R, K)
        ours, theirs = (seconds(jobs[R, i].result(), (x, w), n=5)[0] / LAYERS * 1e6 for i, (_, w) in enumerate(ways))
        rate = 2 * R * N * K / ours / 1e6
        row(f"{N}x{K}, {form}", f"{R}", f"{ours:.0f} us", f"{rate:.0f} TFLOP/s", f"{theirs:.0f} us in bfloat16")


def experts(N: int, K: int, tokens: list[int], bandwidth: float) -> None:
    """Packed and plain experts, and XLA's product with the plain ones."""
    bits = lambda *shape: jax.jit(lambda: jax.random.bits(jax.random.key(0, impl="rbg"), shape, "uint8"))()  # noqa: E731
    lead = (LAYERS, EXPERTS)
    packed = Int4(bits(*lead, K // 128, N, 64), jnp.full((*lead, K // 128, N), 0.01, jnp.bfloat16))
    plain = jax.jit(lambda: jax.random.normal(jax.random.key(1, impl="rbg"), (*lead, K, N), jnp.bfloat16))()
    rng = np.random.default_rng(0)
    for count in tokens:
        R = CHOSEN * count
        sizes = jnp.asarray(np.bincount(rng.integers(0, EXPERTS, R), minlength=EXPERTS), jnp.int32)
        ways = [("int4 g128", packed, None), ("bfloat16", plain, None)]
        ways += [("bfloat16, XLA", plain, "reference")] if count <= 256 else []
        for name, w, how in ways:

            def product(x: Any, given: Any, layer: int, how: str | None = how) -> Any:
                return linear.grouped(x, given[0], given[1], layer, implementation=how)

            x = normal(1, R, K)
            run = compiled(one_after_another(product, LAYERS), x, (w, sizes)).result()
            us = seconds(run, (x, (w, sizes)), n=5)[0] / LAYERS * 1e6
            floor = sum(leaf.nbytes for leaf in jax.tree.leaves(w)) / LAYERS / bandwidth * 1e6
            rate = 2 * R * N * K / us / 1e6
            row(f"{EXPERTS} of {N}x{K}, {name}", f"{R}", f"{us:.0f} us", f"{rate:.0f} TFLOP/s", f"floor {floor:.0f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description="Products of chunks of prompts, beside the library's.")
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 256, 512, 2048])
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--forms", nargs="*", default=["int4 g128", "nvfp4"])
    args = parser.parse_args()
    bandwidth = begin("outputs x inputs", "rows", "time", "rate", "beside")
    for N, K in EXPERT_SHAPES:
        experts(N, K, args.tokens, bandwidth)
    for form in args.forms:
        for N, K in SHAPES:
            dense(form, N, K, args.rows)


if __name__ == "__main__":
    main()
