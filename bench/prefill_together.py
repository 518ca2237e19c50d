"""Prompts computed together in one dispatch: are they bit for bit what they are alone, and how much sooner are they done?

    python bench/prefill_together.py shape:qwen3.5-27b [--weights int4] [--prompts 4] [--tokens 64]

Compares every leaf that a prompt leaves behind (hiddens, recurrent state, convolution inputs, keys and values) with ==, in each
place of the dispatch, and times the prompts together, one by one in dispatches of the same size, and one by one in the smallest.
"""

from __future__ import annotations

import argparse
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import atlas_jax
from atlas_jax import state as states
from atlas_jax.decode.chunks import ALONE
from atlas_jax.models import call
from atlas_jax.settings import compiler_options
from pallas_kernels.ragged import BLOCK, blocks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--weights", help="of random weights: int4, nvfp4, …")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="of each prompt")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    each = blocks(args.tokens)
    T, S = args.prompts * each * BLOCK, args.prompts
    runtime = atlas_jax.load(
        args.model, slots=S, max_length=max(1024, args.tokens), row_group=16, weights=args.weights, prefix_cache=False
    )
    model, params = runtime.loop.model, runtime.params
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, runtime.config.vocab_size, (S, args.tokens)).astype(np.int32)
    state = states.init(runtime.config, runtime.run)
    prefill = functools.partial(call, model, method="prefill")

    def batch(which: list[int], size: int, first: int = 0) -> tuple[Any, ...]:
        """Slots, tokens, begin and n of a dispatch of `size` rows with these prompts, from block `first` on."""
        rows = np.zeros((3, max(1, size // (each * BLOCK))), np.int32)
        tokens = np.zeros(size, np.int32)
        for i, prompt in enumerate(which):
            rows[:, i] = prompt + 1, first + i * each, args.tokens
            tokens[rows[1, i] * BLOCK :][: args.tokens] = prompts[prompt]
        return rows[0], tokens, rows[1], rows[2]

    def compiled(given: Any) -> Any:
        options = compiler_options(runtime.run.row_group)
        return jax.jit(prefill, donate_argnums=1).lower(params, state, *given).compile(options)

    small = min(size for size in (*ALONE, T) if args.tokens <= size)
    runs = {size: compiled(batch([0], size)) for size in {small, T}}
    snapshot, empty = jax.jit(states.snapshot), jax.jit(states.free, donate_argnums=0)

    def left(state: Any, prompt: int) -> list[np.ndarray]:
        return [np.asarray(x) for x in jax.tree.leaves(snapshot(state, jnp.int32(prompt + 1)))]

    def fresh(state: Any) -> Any:
        for slot in range(1, S + 1):
            state = empty(state, jnp.int32(slot))
        return state

    *_, state = runs[T](params, state, *batch([*range(S)], T))
    together = [left(state, prompt) for prompt in range(S)]
    differ = compared = 0
    for prompt in range(S):
        for place in range(S):
            *_, state = runs[T](params, fresh(state), *batch([prompt], T, place * each))
            differ += sum(not np.array_equal(a, b) for a, b in zip(together[prompt], left(state, prompt), strict=True))
            compared += len(together[prompt])
    device = f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
    print(f"{device}; {args.model}: {S} prompts of {args.tokens} tokens")
    print(f"{differ} of {compared} leaves differ between together and alone, over all {S} places")

    def ms(run: Any, given: list[Any], state: Any) -> tuple[float, Any]:
        best = float("inf")
        for _ in range(args.repeats):
            state = jax.block_until_ready(fresh(state))
            began = time.perf_counter()
            for one in given:
                *_, state = run(params, state, *one)
            jax.block_until_ready(state)
            best = min(best, time.perf_counter() - began)
        return 1e3 * best, state

    cases = [(f"together, one dispatch of {T} rows", T, [batch([*range(S)], T)])]
    cases += [(f"one by one, {size} rows each", size, [batch([i], size) for i in range(S)]) for size in {T, small}]
    for what, size, given in cases:
        took, state = ms(runs[size], given, state)
        print(f"{what}: {took:.1f} ms")
    return differ > 0


if __name__ == "__main__":
    raise SystemExit(main())
