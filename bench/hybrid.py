"""Hybrid drafting of tiny-agent on held-out conversations, against MTP alone and plain decoding; the outputs must be equal.

    python bench/hybrid.py [--turns N] [--tokens N] [--drafts D …] [--rounds N] [--arms NAME …]

MTP alone runs with each number of drafts, the hybrid with room for 7, of which it takes as many as it trusts; every arm is set
beside MTP alone with the first of the numbers.

Arms take turns prompt by prompt, so that whatever else the machine does meets them alike. Two texts: conversations, where answers
repeat what is in the context, and text without repeats, which is a random prompt continued at a high temperature.
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any

import jax
import numpy as np
from decode import turns
from rich.console import Console
from rich.table import Table

import atlas_jax
from atlas_jax.metrics import Acceptance

LENGTH = 4352


def arms(drafts: list[int]) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {"plain": dict(drafter="none")}
    for count in drafts:
        out[f"mtp, {count} drafts"] = dict(drafter="mtp", drafts=count)
    return out | {
        "hybrid": dict(drafter="hybrid", drafts=7),
        "lookup": dict(drafter="lookup", drafts=7),
        "hybrid, auto": dict(drafter="hybrid", drafts="auto"),
    }


def measure(
    runtime: Any, prompts: list[list[int]], chosen: dict[str, Any], rounds: int, **options: Any
) -> dict[str, Any]:
    """Runs every arm on every prompt, `rounds` times; of each prompt's times the best counts."""
    for arm in chosen.values():  # compiles
        runtime.generate(prompts[0], **arm, **(options | dict(max_tokens=24)))
    times = {name: [[] for _ in prompts] for name in chosen}
    acceptance: dict[str, list[Acceptance]] = {name: [] for name in chosen}
    for _ in range(rounds):
        for i, prompt in enumerate(prompts):
            want = None
            for name, arm in chosen.items():
                answer = runtime.generate(prompt, **arm, **options)
                want = want or answer.token_ids
                if answer.token_ids != want:
                    raise SystemExit(f"{name}: the output differs from {next(iter(chosen))}'s, which must not happen")
                times[name][i].append(answer.timings.tpot_ms * (len(want) - 1))
                acceptance[name].append(answer.acceptance)
    merged = {name: Acceptance.merge(parts) for name, parts in acceptance.items()}
    tokens = merged[next(iter(chosen))].emitted / rounds - len(prompts)
    return {
        name: dict(
            ms=sum(statistics.median(spent) for spent in times[name]) / tokens,
            tokens_a_round=merged[name].tokens_per_step,
            summary=merged[name].summary(),
        )
        for name in chosen
    }


def show(console: Console, title: str, found: dict[str, Any], base: str) -> None:
    table = Table(title=title)
    for column in ("arm", "tokens a round", f"against {base}", "ms a token", f"against {base}"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    of = found[base]
    for name, row in found.items():
        rounds, ms = row["tokens_a_round"] / of["tokens_a_round"] - 1, row["ms"] / of["ms"] - 1
        table.add_row(name, f"{row['tokens_a_round']:.2f}", f"{rounds:+.1%}", f"{row['ms']:.2f}", f"{ms:+.1%}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Hybrid drafting of tiny-agent on this machine.")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--drafts", type=int, nargs="*", default=[3, 1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arms", nargs="*", help="only these, and MTP alone")
    parser.add_argument("--max-prompt", type=int, default=LENGTH, help="leave longer conversations out")
    args = parser.parse_args()
    console = Console(width=110)
    console.print(
        f"{jax.devices()[0].device_kind} ({jax.default_backend()}, {os.cpu_count()} cores), jax {jax.__version__}"
    )
    runtime = atlas_jax.load("tiny-agent", max_length=LENGTH, max_drafts=max(*args.drafts, 7))
    prompts = [runtime.encode(m).tolist() for m in turns(args.turns)]
    prompts = [p for p in prompts if len(p) + args.tokens <= min(LENGTH, args.max_prompt)]
    chosen, base = arms(args.drafts), f"mtp, {args.drafts[0]} drafts"
    if args.arms is not None:
        chosen = {name: arm for name, arm in chosen.items() if name in (base, *args.arms)}
    found = measure(runtime, prompts, chosen, args.rounds, max_tokens=args.tokens)
    show(console, f"{len(prompts)} held-out turns of up to {args.tokens} tokens, greedy", found, base)
    for name, row in found.items():
        console.print(f"{name}: {row['summary']}")
    rng = np.random.default_rng(0)
    vocab = runtime.config.vocab_size
    fresh = [rng.integers(0, vocab - 64, 400).tolist() for _ in range(4)]
    found = measure(
        runtime, fresh, chosen, args.rounds, max_tokens=2 * args.tokens, temperature=1.5, seed=1, ignore_eos=True
    )
    show(console, "Text without repeats: random prompts, temperature 1.5", found, base)


if __name__ == "__main__":
    main()
