"""`atlas-jax bench verify-cost`: its options, and running it."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

from atlas_jax import draft_head_options
from atlas_jax.errors import RequestError
from atlas_jax.terminal import Progress, note, say, writable

MAX_ROWS = 32  # of a verify, as drafts are limited elsewhere
MAX_RANGE = 64
MODEL = "a model directory, tiny-agent, or shape:NAME"


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", nargs="?", help=MODEL)
    command.add_argument("--shape", metavar="NAME", help="a known shape, with random weights made on the device")
    command.add_argument(
        "--k", default="1..8", metavar="K[,K…]", help="rows of a verify; 1..17 is a range (default: 1..8)"
    )
    command.add_argument("--context", default="1024", metavar="N[,N…]", help="tokens before them (default: 1024)")
    command.add_argument("--batch", default="1", metavar="B[,B…]", help="sequences together (default: 1)")
    command.add_argument("--max-drafts", type=int, metavar="D", help="drafts to compile for (default: what --k needs)")
    command.add_argument("--dtype", choices=("float32", "bfloat16"), help="of weights and activations")
    draft_head_options.add_options(command)
    command.add_argument("--write", metavar="FILE", help="keep the table here instead of beside the compilation cache")
    command.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Raises `AtlasError` for what is wrong in the arguments or the model."""
    rows, contexts, batches = (counts(f"--{name}", getattr(args, name)) for name in ("k", "context", "batch"))
    if (args.model is None) == (args.shape is None):
        raise RequestError("name one model: MODEL, or --shape NAME")
    most = MAX_ROWS - 1 if args.max_drafts is None else args.max_drafts
    if not 0 <= most < MAX_ROWS:
        raise RequestError(f"--max-drafts must lie in 0 … {MAX_ROWS - 1}, got {most}")
    if rows[-1] > most + 1:
        raise RequestError(
            f"--k {rows[-1]} is a verify of more rows than the {most + 1} of {most} drafts, the most allowed here"
        )
    if args.write is not None:
        writable("--write", args.write)
    import jax

    import atlas_jax
    from atlas_jax import costs, verify_cost

    model = args.model or f"shape:{args.shape}"
    with Progress() as progress:
        runtime = atlas_jax.load(
            model,
            dtype=args.dtype,
            slots=max(batches),
            max_length=max(contexts) + verify_cost.ROOM,
            max_drafts=rows[-1] - 1 if args.max_drafts is None else args.max_drafts,
            progress=progress,
            **draft_head_options.given(args),
        )
        speed, measured = verify_cost.measure(runtime, rows, contexts, batches, progress)
    about = dict(device=jax.devices()[0].device_kind, model=model, dtype=runtime.run.dtype, copy_bytes_per_s=speed)
    path: Any = args.write
    if path is None:
        path = costs.table_path(runtime.config, runtime.run, runtime.params)
    failed = ""
    if path is not None:
        try:
            found = [m.cost for m in measured]
            if args.write is None:  # the model's own table keeps what was measured before
                found = costs.merged(found, costs.read_table(path))
            costs.write_table(pathlib.Path(path), found, about)
        except OSError as error:
            failed, path = f"the table could not be kept in {path}: {error.strerror or error}; see --write", None
    if args.json:
        tables = [
            dict(context=m.cost.context, batch=m.cost.batch, draft_ms=m.cost.draft_ms, rows=table(m)) for m in measured
        ]
        say(json.dumps(about | dict(written=path and str(path), measured=tables), allow_nan=False), "\n")
    else:
        show(about, measured)
        note(f"[kept in {path}]" if path else "[not kept: the compilation cache is off; see --write]")
    if failed:  # after what was measured has been shown
        raise RequestError(failed)
    return 0


def table(measured: Any) -> list[dict[str, Any]]:
    """A row for each K: time, its ratios to one and two rows where these were measured, the floor and the ratio to it."""
    step, out = measured.cost.step_ms, []
    for k, ms in step.items():
        ratios = {f"to_k{base}": ms / step[base] if base in step else None for base in (1, 2)}
        floor = measured.floor_ms[k]
        out.append(dict(k=k, step_ms=ms) | ratios | dict(floor_ms=floor, to_floor=ms / floor))
    return out


def show(about: dict[str, Any], measured: list[Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout, highlight=False)
    console.print(
        f"{about['model']} {about['dtype']} on {about['device']}; a copy moves {about['copy_bytes_per_s'] / 1e9:,.0f} GB/s"
    )
    for m in measured:
        cost = m.cost
        caption = "" if cost.draft_ms is None else f"a draft of the MTP head: {cost.draft_ms:.3f} ms"
        title = f"Verify at {cost.context:,} tokens of context, {cost.batch} sequences"
        shown = Table(title=title, caption=caption, box=box.SIMPLE, pad_edge=False, collapse_padding=True)
        for name in ("rows", "ms", "to 1 row", "to 2 rows", "floor ms", "to floor"):
            shown.add_column(name, justify="right")
        for row in table(m):
            ratios = ["–" if row[key] is None else f"{row[key]:.2f}" for key in ("to_k1", "to_k2")]
            shown.add_row(
                str(row["k"]), f"{row['step_ms']:.3f}", *ratios, f"{row['floor_ms']:.3f}", f"{row['to_floor']:.2f}"
            )
        console.print(shown)


def counts(option: str, text: str) -> list[int]:
    """Numbers of 1 or more, in order: "1,4" or "1..17" or both."""
    out: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("..")
        try:
            low, high = int(first), int(last or first)
        except ValueError:
            raise RequestError(f"{option} must be numbers or ranges, as in 1,2,4 or 1..17; got {text[:60]!r}") from None
        if not 1 <= low <= high <= 1 << 20 or high - low >= MAX_RANGE:
            raise RequestError(
                f"{option} must be 1 or more, ranges rising and of {MAX_RANGE} numbers at most; got {text[:60]!r}"
            )
        out.update(range(low, high + 1))
    return sorted(out)
