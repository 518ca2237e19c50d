"""`atlas-jax experiment`: its options, and running it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from atlas_jax.errors import RequestError
from atlas_jax.terminal import Progress, note, say, writable

DEFAULT_ARMS = "full,prefill_only,blind,no_refeed,shifted,pre_norm"


def add_options(command: Any, parser_class: Callable[..., Any]) -> None:
    kinds = command.add_subparsers(dest="experiment", required=True, metavar="EXPERIMENT", parser_class=parser_class)
    drafter = kinds.add_parser(
        "drafter-context",
        help="what the drafter must see",
        description="Plays the same conversations with a drafter that sees all of the context, part of it, or the wrong part. "
        "Every arm must answer with the same tokens; only acceptance and speed differ.",
    )
    drafter.add_argument("--model", default="tiny-agent", help="as for generate (default: tiny-agent)")
    drafter.add_argument(
        "--conversations",
        metavar="FILE.jsonl",
        help='a JSON object with "messages" a line (default: fifteen that tiny-agent was not trained on)',
    )
    drafter.add_argument("--tools", metavar="FILE.json", help="tools for conversations that bring none")
    drafter.add_argument("--limit", type=int, metavar="N", help="play no more than N conversations")
    drafter.add_argument(
        "--arms",
        default=DEFAULT_ARMS,
        metavar="ARM[,ARM…]",
        help=f"the first is what the others are compared with; full, prefill_only, blind, no_refeed, shifted, pre_norm, oracle, "
        f"checked, int4_head, or several joined by + (default: {DEFAULT_ARMS})",
    )
    drafter.add_argument("--drafts", type=int, default=3, metavar="D", help="tokens drafted ahead (default: 3)")
    drafter.add_argument("--max-tokens", type=int, default=96, metavar="N", help="of an answer (default: 96)")
    drafter.add_argument(
        "--max-length", type=int, default=8192, metavar="N", help="tokens of a conversation (default: 8192)"
    )
    drafter.add_argument(
        "--history",
        choices=("recorded", "own"),
        default="recorded",
        help="what later turns find of earlier answers (default: recorded)",
    )
    drafter.add_argument("--dtype", choices=("float32", "bfloat16"), help="of weights and activations")
    drafter.add_argument(
        "--out", metavar="FOLDER", help="write experiment.json, turns.csv and charts (SVG) into this folder"
    )
    drafter.add_argument("--json", action="store_true", help="print one JSON object")
    drafter.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The exit code: 1 if an arm changed the output. Raises `AtlasError` for what is wrong in the arguments or the files."""
    import atlas_jax
    from atlas_jax.cli import MAX_DRAFTS, read_objects
    from atlas_jax.experiment import arms as settings
    from atlas_jax.experiment.conversations import HELD_OUT, HELD_OUT_TOOLS, read_conversations
    from atlas_jax.experiment.play import play, warm_up
    from atlas_jax.experiment.report import first_difference, show, to_dict, write

    arms = settings.parse_arms(args.arms)
    if arms[0].scripted:
        raise RequestError(f"the first arm finds the answers that {arms[0].name!r} has to know; name another first")
    for name in ("limit", "drafts", "max_tokens", "max_length"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise RequestError(f"--{name.replace('_', '-')} must be 1 or more, got {getattr(args, name)}")
    if args.drafts > MAX_DRAFTS:
        raise RequestError(f"--drafts must lie in 1 … {MAX_DRAFTS}, got {args.drafts}")
    tools_file = args.tools or (HELD_OUT_TOOLS if args.conversations is None else None)
    tools = None if tools_file is None else read_objects("--tools", str(tools_file), "function")
    conversations = read_conversations(HELD_OUT if args.conversations is None else args.conversations, tools)
    conversations = conversations[: args.limit]
    if args.out is not None:
        writable("--out", args.out, folder=True)
    results: dict[str, list[Any]] = {arm.name: [] for arm in arms}
    with Progress() as progress:
        base = atlas_jax.load(
            args.model,
            dtype=args.dtype,
            max_length=args.max_length,
            max_drafts=args.drafts,
            progress=progress,
        )
        runtimes = settings.runtimes(base, arms)
        drafters: dict[str, Any] = {arm.name: dict(drafter=arm.drafter) if arm.drafter else {} for arm in arms}
        for name, runtime in runtimes.items():
            warm_up(runtime, drafts=args.drafts, **drafters[name])
        for i, conversation in enumerate(conversations, 1):
            scripts = None
            for arm in arms:  # side by side, so that whatever else the machine does meets all of them
                turns = play(
                    runtimes[arm.name],
                    conversation,
                    max_tokens=args.max_tokens,
                    history=args.history,
                    scripts=scripts if arm.scripted else None,
                    drafts=args.drafts,
                    **drafters[arm.name],
                )
                played = list(turns)
                results[arm.name] += played
                scripts = scripts or [p.token_ids for p in played]
            progress.clear()
            note(f"{i} of {len(conversations)} conversations")
            if wrong := first_difference(results):
                print(f"atlas-jax: {wrong}; no arm may change the output", file=sys.stderr)
                return 1
    if not any(results.values()):
        raise RequestError(
            f"no turn of these conversations leaves room for {args.max_tokens} tokens within --max-length {args.max_length}"
        )
    setting = {name: value for name, value in vars(args).items() if name not in ("command", "run", "json")}
    found = to_dict(results, dict(setting=setting, conversations=len(conversations)))
    if args.json:
        say(json.dumps(found, allow_nan=False), "\n")
    else:
        from rich.console import Console

        Console(file=sys.stdout, highlight=False).print(show(found))
    if args.out is not None:
        paths = write(args.out, results, found)
        note("wrote " + ", ".join(map(str, paths)))
    return 0
