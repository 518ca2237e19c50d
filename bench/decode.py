"""Decoding of tiny-agent on this machine: compile time, time to first token, time a token by draft length, host share, context.

    python bench/decode.py [--turns N] [--tokens N] [--repeats N] [--skip-compile] [--prefill-only]

Speculation is compared with plain decoding compiled for single rows (`row_group=1`), not only with the padded executable.
The conversations were kept out of tiny-agent's training (tau-bench, MIT licence; see atlas_jax/data/README.md).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import atlas_jax
from atlas_jax.experiment.conversations import HELD_OUT, read_conversations
from atlas_jax.metrics import Acceptance

MODEL = "tiny-agent"
DRAFTS = range(9)
START = f"""
import atlas_jax, json
r = atlas_jax.load({MODEL!r}, prefix_cache=False)
out = [r.generate(list(range(5, 300)), max_tokens=4, drafter=d).timings.compile_s for d in ("none", "mtp")]
print(json.dumps(sum(out)))
"""


def turns(count: int) -> list[list[dict[str, Any]]]:
    """Message lists of held-out conversations, each ending where the assistant speaks; spread over lengths."""
    found = [turn.messages for c in read_conversations(HELD_OUT)[:5] for turn in c.turns if len(turn.messages) > 1]
    step = max(1, len(found) // count)
    return found[::step][:count]


def compile_times() -> tuple[float, float]:
    """Seconds spent compiling in a new process, with an empty and then a filled compilation cache."""
    with tempfile.TemporaryDirectory() as folder:
        env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"} | {"ATLAS_JAX_CACHE": folder}
        run = lambda: subprocess.run([sys.executable, "-c", START], env=env, capture_output=True, text=True, check=True)  # noqa: E731
        cold, warm = (float(run().stdout.splitlines()[-1]) for _ in range(2))
    return cold, warm


def median(values: list[float]) -> float:
    return statistics.median(values)


def empty_dispatch_s(runtime: Any, options: dict[str, Any]) -> float:
    """Seconds that a dispatch of no rounds takes, its results read: what the host adds to the device's work."""
    loop, (drafter, drafts) = runtime.loop, runtime.drafting(options)
    state, slots = (
        dataclasses.replace(loop.state, drafter=drafter.init(loop.config, loop.run)),
        jax.numpy.ones(1, jax.numpy.int32),
    )
    run = loop.executables.dispatch(drafter, drafts + 1, None, loop.params, state, slots)
    times = []
    for _ in range(50):
        began = time.perf_counter()
        state, *results = run(loop.params, state, slots, jax.numpy.int32(0))
        jax.device_get(results)
        times.append(time.perf_counter() - began)
    loop.state = dataclasses.replace(state, drafter=())
    return median(times)


def measure(runtime: Any, prompts: list[Any], tokens: int, **options: Any) -> dict[str, Any]:
    """Time a token over all prompts (the first run of each is left out: it compiles), and acceptance."""
    runtime.generate(prompts[0], max_tokens=4, **options)
    loop = runtime.loop
    read_s, dispatches = loop.read_s, loop.dispatches
    answers = [runtime.generate(p, max_tokens=tokens, **options) for p in prompts]
    host_s = loop.read_s - read_s + (loop.dispatches - dispatches) * empty_dispatch_s(runtime, options)
    decoded = sum(len(a.token_ids) - 1 for a in answers)
    decode_s = sum(a.timings.tpot_ms * (len(a.token_ids) - 1) for a in answers) / 1e3
    acceptance = Acceptance.merge(a.acceptance for a in answers)
    return dict(
        tpot=1e3 * decode_s / max(decoded, 1),
        acceptance=acceptance,
        host=host_s / decode_s,
        round_ms=1e3 * decode_s / max(acceptance.steps - len(answers), 1),
        ids=[a.token_ids for a in answers],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Decoding of tiny-agent on this machine.")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5, help="of each time to first token")
    parser.add_argument("--skip-compile", action="store_true")
    parser.add_argument("--prefill-only", action="store_true", help="stop after the times to first token")
    args = parser.parse_args()
    console = Console(width=110)
    console.print(
        f"{MODEL} on {jax.devices()[0].device_kind} ({jax.default_backend()}, {os.cpu_count()} cores), jax {jax.__version__}"
    )

    if not args.skip_compile:
        cold, warm = compile_times()
        console.print(f"compiling plain and speculative decoding: {cold:.1f} s cold, {warm:.1f} s with a filled cache")

    runtime = atlas_jax.load(MODEL, max_length=4352, max_drafts=8, prefix_cache=False)
    table = Table(title="Time to first token")
    for name in ("prompt tokens", "ms", "ms a prompt token", "added by the drafter's rows"):
        table.add_column(name, justify="right")
    text = runtime.encode(turns(1)[0]).tolist()
    blind = dataclasses.replace(runtime.run, drafter_context="blind")
    sides = [runtime, atlas_jax.Runtime(runtime.config, blind, runtime.params)]
    for count in (128, 1024, 4096):
        prompt = (text * (count // len(text) + 1))[:count]
        asked = lambda r, prompt=prompt: r.generate(prompt, max_tokens=1, drafter="none").timings.ttft_ms  # noqa: E731
        times = [[asked(r) for r in sides] for _ in range(args.repeats + 1)][1:]  # the first compile
        ttft, without = (median([row[side] for row in times]) for side in (0, 1))
        table.add_row(str(count), f"{ttft:.0f}", f"{ttft / count:.3f}", f"{ttft / without - 1:.1%}")
    console.print(table)
    if args.prefill_only:
        return

    single = atlas_jax.load(MODEL, max_length=4352, max_drafts=0, row_group=1, prefix_cache=False)

    prompts = [runtime.encode(m).tolist() for m in turns(args.turns)]
    prompts = [p for p in prompts if len(p) + args.tokens <= 4352]
    base = measure(single, prompts, args.tokens, drafter="none")
    table = Table(title=f"{len(prompts)} held-out turns of up to {args.tokens} tokens, greedy")
    for name in ("drafts", "tokens a round", "ms a round", "ms a token", "against one-row", "host share"):
        table.add_column(name, justify="right")
    table.add_row("one-row", "1.00", f"{base['round_ms']:.2f}", f"{base['tpot']:.2f}", "1.00", f"{base['host']:.1%}")
    last = None
    for drafts in DRAFTS:
        drafter = dict(drafter="none") if drafts == 0 else dict(drafter="mtp", drafts=drafts)
        row = measure(runtime, prompts, args.tokens, **drafter)
        if last is not None and row["ids"] != last["ids"]:
            raise SystemExit("speculation changed the output, which must not happen")
        last = row
        table.add_row(
            str(drafts),
            f"{row['acceptance'].tokens_per_step:.2f}",
            f"{row['round_ms']:.2f}",
            f"{row['tpot']:.2f}",
            f"{base['tpot'] / row['tpot']:.2f}",
            f"{row['host']:.1%}",
        )
    console.print(table)
    if last is not None:
        console.print(last["acceptance"].table())

    table = Table(title="Time a token by context")
    for name in ("context", "one-row ms", "against 256", "3 drafts ms", "against 256"):
        table.add_column(name, justify="right")
    first: list[float] = []
    for context in (256, 1024, 4096):
        prompt = (text * (context // len(text) + 1))[: context - 32]
        options = dict(ignore_eos=True)
        one = measure(single, [prompt] * 3, 64, drafter="none", **options)["tpot"]
        row = measure(runtime, [prompt] * 3, 64, drafter="forced-reject", drafts=3, **options)["tpot"]
        first = first or [one, row]
        table.add_row(str(context), f"{one:.2f}", f"{one / first[0]:.2f}", f"{row:.2f}", f"{row / first[1]:.2f}")
    console.print(table)
    console.print("(3 drafts with every draft rejected: the cost of a round, whatever is accepted)")


if __name__ == "__main__":
    main()
