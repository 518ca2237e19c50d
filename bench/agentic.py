"""Multi-turn tool-calling conversations, played warm (the prefix cache keeps earlier turns) and cold (it keeps nothing).

    python bench/agentic.py [--conversations FILE.jsonl] [--limit N] [--history own] [--model shape:qwen3.5-27b --acceptance 0.7]

User and tool turns come as recorded, answers from the model; `--history` says which answer later turns find. Warm and cold
answers must be the same tokens. `--acceptance P` drafts from the known answer, each draft right with probability P: what
speculation would do to the speed of a model with random weights. `--soak N` plays N conversations in a row and watches memory.
The conversations are those beside the checkout (shared/data/agentic) or else the fifteen in the package, which tiny-agent was
not trained on (tau-bench, MIT licence).
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import pathlib
import resource
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import atlas_jax
from atlas_jax.cli import MAX_DRAFTS
from atlas_jax.decode.drafters import ScriptedDrafter
from atlas_jax.errors import AtlasError
from atlas_jax.experiment.conversations import HELD_OUT, HELD_OUT_TOOLS, Conversation, read_conversations
from atlas_jax.experiment.figures import by_turn, figures
from atlas_jax.experiment.play import Played, play, warm_up
from atlas_jax.metrics import wilson
from atlas_jax.runtime import Runtime

SHARED = pathlib.Path(__file__).parent.parent.parent / "shared" / "data" / "agentic" / "tau_airline.jsonl"
COLD: dict[str, Any] = dict(
    prefix_cache=False, page_cache_bytes=None, snapshot_interval=None, snapshot_bytes=None, host_snapshot_bytes=0
)


def with_setting(runtime: Runtime, **changes: Any) -> Runtime:
    """The same weights, run otherwise."""
    run = dataclasses.replace(runtime.run, **changes)
    return Runtime(runtime.config, run, runtime.params, runtime.tokenizer)


def report(console: Console, sides: dict[str, list[Played]]) -> None:
    """Tables of what each side took, and of acceptance and speed by turn."""
    table = Table(title="Turns", caption="TTFT and TPOT in ms, p50 / p90")
    for name in (
        "",
        "turns",
        "prompt tokens",
        "cached",
        "replayed",
        "TTFT",
        "TPOT",
        "tokens",
        "tokens a round",
        "wall s",
    ):
        table.add_column(name, justify="right" if name else "left")
    for name, turns in sides.items():
        f = figures(turns)
        times = [f"{f[t]['p50']:.1f} / {f[t]['p90']:.1f}" if f[t] else "–" for t in ("ttft_ms", "tpot_ms")]
        counts = [f"{f[key]:,}" for key in ("turns", "prompt", "cached", "replayed")]
        rate = f["tokens_per_round"]
        table.add_row(
            name, *counts, *times, f"{f['tokens']:,}", "–" if rate is None else f"{rate:.2f}", f"{f['wall_s']:.1f}"
        )
    console.print(table)
    warm, cold = sides["warm"], sides.get("cold")
    table = Table(title="By turn", caption="TTFT and TPOT are means; the ratio is that of the same prompts' TTFT")
    for name in (
        "turn",
        "prompt",
        "replayed",
        "TTFT warm",
        "TTFT cold",
        "ratio",
        "TPOT",
        "draft 1",
        "95 %",
        "tokens a round",
    ):
        table.add_column(name, justify="right")
    ttft, tpot, rate = (dict(by_turn(warm, name)) for name in ("ttft_ms", "tpot_ms", "tokens_per_round"))
    other = dict(by_turn(cold, "ttft_ms")) if cold else {}
    for n in sorted({p.turn for p in warm}):
        here = [p for p in warm if p.turn == n]
        hits, trials = (
            sum(int(getattr(p.acceptance, name)[:1].sum()) for p in here) for name in ("matched", "offered")
        )
        p1 = ("–", "–") if not trials else (f"{hits / trials:.2f}", "–".join(f"{x:.2f}" for x in wilson(hits, trials)))
        cells = [f"{other[n]:.0f}", f"{ttft[n] / other[n]:.2f}"] if other else ["–", "–"]
        mean = lambda name, here=here: f"{np.mean([getattr(p, name) for p in here]):.0f}"  # noqa: E731
        speed = [f"{tpot[n]:.2f}" if n in tpot else "–", *p1, f"{rate[n]:.2f}"]
        table.add_row(str(n), mean("prompt"), mean("replayed"), f"{ttft[n]:.0f}", *cells, *speed)
    console.print(table)


def same(warm: Sequence[Played], cold: Sequence[Played]) -> None:
    for a, b in zip(warm, cold, strict=True):
        if a.token_ids != b.token_ids:
            raise SystemExit(
                f"turn {a.turn} of {a.conversation} is answered differently warm and cold, which must not happen"
            )


def late_ratio(warm: Sequence[Played], cold: Sequence[Played], first: int = 5) -> float | None:
    """Time to first token of turns `first` and later, warm over cold, of the same prompts."""
    pairs = [(a.ttft_ms, b.ttft_ms) for a, b in zip(warm, cold, strict=True) if a.turn >= first]
    return sum(a for a, _ in pairs) / sum(b for _, b in pairs) if pairs else None


def soak(
    console: Console,
    runtime: Runtime,
    conversations: Sequence[Conversation],
    count: int,
    options: dict[str, Any],
    every: int = 10,
) -> dict[str, Any]:
    """Plays `count` conversations in a row, one in `every` also cold, and reads memory on the way.

    Returns: turns played, those compared with cold ones, and how many of these differed; readings of memory in MB, of the
    process and of all arrays on the device.
    """
    cold = with_setting(runtime, **COLD)
    found: dict[str, Any] = dict(conversations=0, turns=0, checks=0, differences=0, resident_mb=[], arrays_mb=[])
    for i in range(count):
        conversation = conversations[i % len(conversations)]
        warm = list(play(runtime, conversation, **options))
        found["turns"] += len(warm)
        found["conversations"] += 1
        if i % every == 0:
            pairs = zip(warm, play(cold, conversation, **options), strict=True)
            found["checks"] += len(warm)
            found["differences"] += sum(a.token_ids != b.token_ids for a, b in pairs)
        if i % max(1, count // 20) == 0 or i == count - 1:
            gc.collect()
            found["arrays_mb"].append(sum(x.nbytes for x in jax.live_arrays()) / 1e6)
            found["resident_mb"].append(resident_mb())
            console.print({name: value[-1] if isinstance(value, list) else value for name, value in found.items()})
    return found


def resident_mb() -> float:
    try:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:  # not Linux: the most it ever was
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Multi-turn conversations, warm and cold.")
    parser.add_argument("--model", default="tiny-agent")
    parser.add_argument("--conversations", type=pathlib.Path)
    parser.add_argument("--limit", type=int, help="conversations (default: 5; all with --soak)")
    parser.add_argument("--turns", type=int, help="of a conversation, at most")
    parser.add_argument("--history", choices=("recorded", "own"), default="recorded")
    parser.add_argument("--drafter")
    parser.add_argument("--drafts", type=int, help="default: 3, or 0 with --drafter none")
    parser.add_argument("--acceptance", type=float, help="synthetic: drafts are right with this probability")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=8192)
    parser.add_argument("--no-cold", action="store_true", help="play warm only")
    parser.add_argument("--soak", type=int, metavar="N", help="play N conversations in a row instead")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    args = parser.parse_args(argv)
    if args.drafts is None:
        args.drafts = 0 if args.drafter == "none" else 3
    if wrong := contradiction(args):
        parser.error(wrong)
    try:
        run(args)
    except AtlasError as error:
        parser.exit(2, f"agentic.py: {error}\n")


def contradiction(args: argparse.Namespace) -> str:
    """What is wrong with the options, before anything is loaded for them; empty where nothing is."""
    for name in ("limit", "turns", "soak", "max_tokens", "max_length"):
        if (value := getattr(args, name)) is not None and value < 1:
            return f"--{name.replace('_', '-')} must be 1 or more, got {value}"
    if not 0 <= args.drafts <= MAX_DRAFTS:
        return f"--drafts must lie in 0 … {MAX_DRAFTS}, got {args.drafts}"
    if args.acceptance is not None and not 0 <= args.acceptance <= 1:
        return f"--acceptance must lie in 0 … 1, got {args.acceptance}"
    if args.acceptance is not None and args.drafter:
        return "--acceptance drafts from the known answer; --drafter names another drafter: leave one of them out"
    if args.soak is not None and (args.acceptance is not None or args.no_cold or args.json):
        return "--soak plays the model's own drafter and prints what it finds; leave out --acceptance, --no-cold and --json"
    return ""


def run(args: argparse.Namespace) -> None:
    console = Console(width=120)
    path = args.conversations or (SHARED if SHARED.exists() else HELD_OUT)
    tools = json.loads(HELD_OUT_TOOLS.read_text()) if path in (SHARED, HELD_OUT) else None
    conversations = read_conversations(path, tools)
    limit = args.limit or (5 if args.soak is None else len(conversations))
    tokenizer = None
    if args.model.startswith("shape:"):  # it has none of its own; tiny-agent's gives it text of the same lengths
        tokenizer = atlas_jax.load("tiny-agent", max_length=64).tokenizer
    base = atlas_jax.load(args.model, max_length=args.max_length, max_drafts=args.drafts)
    base.tokenizer = base.tokenizer or tokenizer
    where = f"{jax.devices()[0].device_kind} ({jax.default_backend()}, {os.cpu_count()} cores), jax {jax.__version__}"
    console.print(
        f"{args.model} on {where}; {path.name}, {args.drafts} drafts, answers of up to {args.max_tokens} tokens"
    )
    options: dict[str, Any] = dict(max_tokens=args.max_tokens, turns=args.turns, drafts=args.drafts)
    options["history"] = args.history
    options |= dict(drafter=args.drafter) if args.drafter else {}
    options |= dict(ignore_eos=True) if base.tokenizer is tokenizer else {}
    if args.soak is not None:
        found = soak(console, base, conversations[:limit], args.soak, options)
        if found["differences"]:
            raise SystemExit("warm and cold answers differ, which must not happen")
        return
    sides: dict[str, list[Played]] = {"warm": [], "cold": []} if not args.no_cold else {"warm": []}
    runtimes = {"warm": base, "cold": with_setting(base, **COLD)}
    plain: dict[str, Any] = dict(drafter="none", drafts=0)
    synthetic: dict[str, Any] = {} if args.acceptance is None else dict(drafter=ScriptedDrafter(args.acceptance))
    for name in sides:
        drafter = dict(drafter=args.drafter) if args.drafter else {}
        warm_up(runtimes[name], drafts=args.drafts, **drafter | synthetic)
    for conversation in conversations[:limit]:
        scripts = None
        if args.acceptance is not None:
            known = play(runtimes["cold"], conversation, **options | plain)
            scripts = [p.token_ids for p in known]
        for name, turns in sides.items():
            turns += play(runtimes[name], conversation, scripts=scripts, **options | synthetic)
    report(console, sides)
    if "cold" in sides:
        same(sides["warm"], sides["cold"])
        ratio = late_ratio(sides["warm"], sides["cold"])
        console.print(
            f"answers alike; turn 5 and later, warm TTFT over cold: {'–' if ratio is None else f'{ratio:.2f}'}"
        )
    if args.json:
        args.json.write_text(json.dumps({name: figures(turns) for name, turns in sides.items()}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
