"""Times of the attention of chunks of prompts on a GPU, beside the library's over the same tokens without pages.

    python -m pallas_kernels.paged_attention.bench_prefill [--kv-dtype float8_e4m3fn] [--unit 64] [--stages 3]

A layer of the 27B shape (24 query and 4 key/value heads of 256), one sequence, bfloat16 unless told, pages of 256 tokens. A chunk
of T tokens behind C others does 2 * 24 * 256 * 2 * T * (C + T / 2) operations: the rate is those over the time. The peer is
cuDNN's attention as `jax.nn` has it, where it takes these heads: causal without a context, and of every key with one.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import triton_prefill
from pallas_kernels.paged_attention.arg_specs import SHAPES, attend_specs
from pallas_kernels.timing import begin, compiled, normal, row, seconds

CHUNKS = ((0, 8192), (6144, 2048), (7936, 256), (32512, 256))  # tokens before, tokens


def library(causal: bool, q: Any, keys: Any, values: Any) -> Any:
    return jax.nn.dot_product_attention(q, keys, values, is_causal=causal, implementation="cudnn")


def peer(context: int, T: int) -> str:
    shape = SHAPES["27b"]
    q = normal(0, 1, T, shape.H, shape.Dh)
    kv = [normal(i, 1, context + T, shape.Hkv, shape.Dh) for i in (1, 2)]
    try:
        run = compiled(functools.partial(library, not context), q, *kv).result()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return f"none: {str(error).splitlines()[0][:60]}"
    return f"{seconds(run, (q, *kv))[0] * 1e6:.0f} us"


def main() -> None:
    parser = argparse.ArgumentParser(description="Times of the attention of chunks of prompts on a GPU.")
    parser.add_argument("--kv-dtype", default="bfloat16", help="of keys and values: bfloat16 or float8_e4m3fn")
    parser.add_argument("--unit", type=int, help="keys at a time")
    parser.add_argument("--stages", type=int, help="of the kernel's pipeline")
    args = parser.parse_args()
    tuning = {k: v for k, v in (("unit", args.unit), ("num_stages", args.stages)) if v}
    begin("tokens behind others", "time", "rate", "cuDNN, no pages")
    shape = SHAPES["27b"]
    for context, T in CHUNKS:
        _, spec, table, *_ = attend_specs(shape, 1, 1, context + T, kv_dtype=jnp.dtype(args.kv_dtype))
        pages = jax.tree.map(lambda x: normal(0, *x.shape).astype(x.dtype), spec)
        table = jnp.arange(1, table.shape[1] + 1, dtype=jnp.int32)[None]
        q, numbers = normal(1, T, shape.H, shape.Dh), [jnp.full(1, x, jnp.int32) for x in (context, 0, T)]

        def attend(q: Any, pages: Any, *rest: Any) -> Any:
            return triton_prefill.attend_ragged(q, pages, 0, *rest, **tuning)

        operands = (q, pages, table, *numbers)
        time, _ = seconds(compiled(attend, *operands).result(), operands)
        rate = 4 * shape.H * shape.Dh * T * (context + T / 2) / time
        row(f"{T} behind {context}", f"{time * 1e6:.0f} us", f"{rate / 1e12:.0f} TFLOP/s", peer(context, T))


if __name__ == "__main__":
    main()
