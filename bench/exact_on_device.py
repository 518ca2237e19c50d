"""Exactness and speed of decoding on this machine's device: every draft length against plain decoding, with ==.

python bench/exact_on_device.py [MODEL] [--dtype float32|bfloat16] [--kv-dtype float8_e4m3fn] [--tokens N]

Compares tokens and log-probabilities of speculative answers (MTP, forced accept, forced reject) with plain ones, alone and in a
batch of four, and prints the time a token beside; then turns that go on from the prefix cache with the same turns read anew, what
was drafted included. Exits with 1 at the first difference.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax

import atlas_jax
from atlas_jax.decode.drafters import ScriptedDrafter

PROMPTS = ["Hello, I would like to cancel my flight.", "import os\nimport sys\n", "The", "Reservation Q7RW2K " * 40]


def main() -> None:
    parser = argparse.ArgumentParser(description="Exactness and speed of decoding on this machine's device.")
    parser.add_argument("model", nargs="?", default="tiny-agent")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kv-dtype", help="of keys and values: float8_e4m3fn, or as --dtype")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--drafts", type=int, nargs="*", default=[1, 2, 3, 4, 5, 7, 8, 16])
    args = parser.parse_args()
    dtypes = dict(dtype=args.dtype, kv_dtype=args.kv_dtype)
    kept = f"{args.dtype}, keys and values {args.kv_dtype}" if args.kv_dtype else args.dtype
    print(f"{args.model} {kept} on {jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    runtime = atlas_jax.load(args.model, max_length=1024, slots=4, max_drafts=16, prefix_cache=False, **dtypes)
    options: dict[str, Any] = dict(max_tokens=args.tokens, ignore_eos=True, logprobs=True, top_logprobs=3)
    plain = [runtime.generate(p, drafter="none", **options) for p in PROMPTS]
    print(f"plain: {plain[-1].timings.tpot_ms:.2f} ms a token", flush=True)
    for drafts in args.drafts:
        for name, drafter in (("mtp", "mtp"), ("right", ScriptedDrafter(1.0)), ("wrong", ScriptedDrafter(0.0))):
            began, got = time.perf_counter(), plain[0]
            for prompt, want in zip(PROMPTS, plain, strict=True):
                got = runtime.generate(prompt, drafter=drafter, drafts=drafts, script=want.token_ids, **options)
                same(got, want, f"{name}, {drafts} drafts")
            speed = f"{got.timings.tpot_ms:.2f} ms a token, {got.acceptance.tokens_per_step:.2f} a step"
            print(f"{name} {drafts}: equal; {speed}; {time.perf_counter() - began:.0f} s", flush=True)
    together = runtime.generate(PROMPTS, drafter="mtp", drafts=3, **options)
    for got, want in zip(together, plain, strict=True):
        same(got, want, "batch of four, 3 drafts")
    print("batch of four: equal", flush=True)
    warm_turns(args.model, dtypes, options)


def warm_turns(model: str, dtypes: dict[str, Any], options: dict[str, Any]) -> None:
    runtime = atlas_jax.load(model, max_length=1024, page_size=64, prefill_chunk=64, **dtypes)
    ids = runtime.encode(" ".join(PROMPTS) * 8).tolist()
    turns = [ids[:length] for length in (65, 129, 200, 320, 511, 512, 513, 700, 700, 831)]
    runtime.generate(turns[-1], **options)  # compiles
    runtime.loop.cache.reset()
    warm = [runtime.generate(turn, **options) for turn in turns]
    for turn, got in zip(turns, warm, strict=True):
        runtime.loop.cache.reset()
        want = runtime.generate(turn, **options)
        same(got, want, f"a turn of {len(turn)} tokens, {got.restored} of them restored", "cold run")
        if got.acceptance.to_dict() != want.acceptance.to_dict():
            raise SystemExit(f"a turn of {len(turn)} tokens: other drafts than in the cold run")
        first = f"first token after {got.timings.ttft_ms:.1f} ms, cold {want.timings.ttft_ms:.1f} ms"
        print(f"turn of {len(turn)} tokens, {got.restored} restored: equal; {first}", flush=True)


def same(got: Any, want: Any, what: str, other: str = "plain decoding") -> None:
    for name in ("token_ids", "logprobs", "top_logprobs"):
        if getattr(got, name) != getattr(want, name):
            raise SystemExit(f"{what}: {name} differ from {other}")


if __name__ == "__main__":
    main()
