"""The whole step of a published shape with random weights made on the device, beside the floor: bytes over copy bandwidth.

    python bench/step.py [--shape qwen3.5-27b] [--weights int4|int4+head|nvfp4|…] [--draft-head int4] [--mtp-only]
                         [--rows K …] [--context N] [--drafts D] [--prefill CHUNK …]

Prints, for one sequence: the compile time and the memory of each executable; a verify of K rows whose drafts are random, without
the head; a cycle of D drafts by the MTP head; and the time to the first token of a long prompt, with and without the drafter's
rows. Rounds run several a dispatch, as decoding runs them. The weights are noise, so nothing that depends on text is measured.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import time
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax.config import RunConfig
from atlas_jax.decode import round as rounds
from atlas_jax.decode.drafters import NoDrafter
from atlas_jax.decode.mtp import MtpChain
from atlas_jax.decode.state import RUNNING, init_decode
from atlas_jax.models import HybridModel, call
from atlas_jax.models.draft_head import with_draft_head
from atlas_jax.settings import compiler_options, row_group_on_gpu
from atlas_jax.verify_cost import RandomRows, moved_bytes
from atlas_jax.weights.presets import parameter_shapes, random_params, resolve
from pallas_kernels.timing import copy_bandwidth


class Shape:
    """A shape, its weights and a state whose one slot stands at `context` tokens."""

    def __init__(
        self,
        name: str,
        weights: str | None,
        mtp: bool,
        context: int,
        max_drafts: int,
        draft_head: Literal["exact", "int4"] = "exact",
    ) -> None:
        self.config = resolve(f"shape:{name}").config
        if not mtp:
            self.config = dataclasses.replace(self.config, mtp_num_hidden_layers=0)
        self.run = RunConfig(
            dtype="bfloat16",
            max_length=2 * context,
            max_drafts=max_drafts,
            row_group=row_group_on_gpu(max_drafts + 1),
            layout="stacked",
            draft_head=draft_head if mtp else "exact",
        )
        self.model = HybridModel(self.config, jnp.dtype("bfloat16"), "stacked", self.run.row_group)
        if weights is None:
            shapes = parameter_shapes(self.config, dtype="bfloat16", layout="stacked")
            leaves, tree = jax.tree.flatten(shapes)
            self.params = jax.tree.unflatten(tree, [noise(i, x) for i, x in enumerate(leaves)])
        else:
            self.params = random_params(self.config, dtype="bfloat16", layout="stacked", weights=weights)
        self.params = with_draft_head(self.config, self.run, self.params)
        self.slots = jnp.asarray([1], jnp.int32)
        self.state = standing(init_decode(self.config, self.run), context)

    def compiled(self, drafter: Any, K: int) -> tuple[Any, float, float]:
        """The executable of a dispatch, and the seconds that tracing and compiling took."""
        f = functools.partial(rounds.dispatch, self.model, drafter, K, None, self.run.rounds_per_dispatch)
        began = time.perf_counter()
        lowered = jax.jit(f, donate_argnums=(1,)).lower(self.params, self.state, self.slots, jnp.int32(0))
        traced = time.perf_counter()
        executable = lowered.compile(compiler_options(self.run.row_group))
        return executable, traced - began, time.perf_counter() - traced

    def round_ms(self, executable: Any) -> float:
        """The best of several dispatches, in milliseconds a round."""
        n, finish = self.run.rounds_per_dispatch, self.state.finish
        best = float("inf")
        for _ in range(6):
            began = time.perf_counter()
            for _ in range(3):
                self.state, _, finish = executable(self.params, self.state, self.slots, jnp.int32(n))
            finish.block_until_ready()
            best = min(best, (time.perf_counter() - began) / 3 / n)
        return 1e3 * best

    def prefill_ms(self, tokens: int, chunk: int) -> float:
        """A prompt of `tokens` in chunks, from an empty slot, and the logits of its last token."""

        def prefill(params, target, ids):
            one, begin, n = (jnp.full(1, x, jnp.int32) for x in (1, 0, chunk))
            hidden, _, target = call(self.model, params, target, one, ids, begin, n, method="prefill")
            return call(self.model, params, hidden[-1:], method="draft_logits").argmax(), target

        ids = jnp.asarray(np.random.default_rng(0).integers(0, self.config.vocab_size, chunk), jnp.int32)
        target = self.state.target.put(self.slots, pending=0)
        options = compiler_options(self.run.row_group)
        step = jax.jit(prefill, donate_argnums=1).lower(self.params, target, ids).compile(options)
        best, first = float("inf"), jnp.int32(0)
        for _ in range(3):
            target = target.put(self.slots, base=0)
            began = time.perf_counter()
            for _ in range(tokens // chunk):
                first, target = step(self.params, target, ids)
            first.block_until_ready()
            best = min(best, time.perf_counter() - began)
        self.state = dataclasses.replace(self.state, target=target)
        return 1e3 * best


def noise(seed: int, x: Any) -> jax.Array:
    """Weights of a useful size, made on the device; cheap, since there are many."""
    if x.dtype != jnp.bfloat16:
        return jax.random.uniform(jax.random.key(seed), x.shape, x.dtype)

    @jax.jit
    def make() -> jax.Array:
        bits = jax.random.bits(jax.random.key(seed, impl="rbg"), x.shape, "uint8")
        return ((bits.astype(jnp.float32) - 127.5) * (x.shape[-2] ** -0.5 / 74.0)).astype(jnp.bfloat16)

    return make()


@functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
def standing(state: Any, context: int) -> Any:
    """All slots running at `context` tokens, over keys and values of noise."""
    target = state.target
    pages = type(target.pages)(*(jax.random.normal(jax.random.key(1), x.shape, x.dtype) for x in target.pages))
    every = jnp.arange(1, target.base.shape[0])
    state = dataclasses.replace(state, target=dataclasses.replace(target, pages=pages).put(every, base=context))
    return state.put(every, finish=RUNNING, remaining=10**6, feed_count=1)


def main() -> None:
    parser = argparse.ArgumentParser(description="The whole step of a shape with random weights, beside its floor.")
    parser.add_argument("--shape", default="qwen3.5-27b")
    parser.add_argument(
        "--weights", default="bf16", help="bf16, int4, int4-g32, nvfp4, fp8, fp8-blocks; with +head, the head too"
    )
    parser.add_argument("--draft-head", choices=("exact", "int4"), default="exact", help="that drafts are chosen with")
    parser.add_argument("--mtp-only", action="store_true", help="leave out the verifies without the MTP head")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4, 9])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--prefill", type=int, nargs="*", default=[256, 2048])
    parser.add_argument("--prompt", type=int, default=8192)
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    prefill: dict[tuple[bool, int], float] = {}
    for mtp in (True,) if args.mtp_only else (False, True):
        began = time.perf_counter()
        weights = None if args.weights == "bf16" else args.weights
        most = max(*args.rows, args.drafts + 1, 2) - 1
        shape = Shape(args.shape, weights, mtp, args.context, most, args.draft_head)
        jax.block_until_ready(shape.params)
        size = sum(x.nbytes for x in jax.tree.leaves(shape.params))
        count = len(jax.tree.leaves((shape.params, shape.state))) + 2
        print(
            f"\n{args.shape} in {args.weights}, {'with' if mtp else 'without'} the MTP head: {size / 1e9:.2f} GB of weights, "
            f"{count} arguments"
        )
        print(f"made in {time.perf_counter() - began:.0f} s", flush=True)
        wanted: list[tuple[Any, int]] = [(NoDrafter() if K == 1 else RandomRows(), K) for K in args.rows]
        if mtp:
            wanted = [(NoDrafter(), 1), (MtpChain(), args.drafts + 1)]
        floor = 1e3 * moved_bytes(shape.config, shape.run, shape.params, 1, args.context, 1) / bandwidth
        with concurrent.futures.ThreadPoolExecutor() as pool:
            made = list(pool.map(shape.compiled, *zip(*wanted, strict=True)))
        first = 0.0
        for (drafter, K), (executable, traced, compiled) in zip(wanted, made, strict=True):
            ms = shape.round_ms(executable)
            first = first or ms
            memory = executable.memory_analysis()
            print(
                f"{drafter.name:11} K = {K:2}: {ms:7.3f} ms, {ms / first:.3f}x K = 1, {ms / floor:.3f}x the floor of {floor:.2f} "
                f"(traced in {traced:.0f} s, compiled in {compiled:.0f} s {len(made)} at once), "
                f"{memory.temp_size_in_bytes / 1e6:.0f} MB of temporaries",
                flush=True,
            )
        for chunk in args.prefill:
            prefill[mtp, chunk] = shape.prefill_ms(args.prompt, chunk)
            print(f"prefill of {args.prompt} tokens in chunks of {chunk}: {prefill[mtp, chunk]:.0f} ms", flush=True)
        del shape, made
    for chunk in () if args.mtp_only else args.prefill:
        print(
            f"the drafter's rows add {100 * (prefill[True, chunk] / prefill[False, chunk] - 1):.1f} % at chunks of {chunk}"
        )


if __name__ == "__main__":
    main()
