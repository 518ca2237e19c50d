"""What an experiment found: tables, JSON, CSV and charts."""

from __future__ import annotations

import csv
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from atlas_jax.errors import RequestError
from atlas_jax.experiment.charts import line_chart
from atlas_jax.experiment.figures import RATIOS, Difference, by_turn, difference, figures
from atlas_jax.experiment.play import Played

Results = dict[str, list[Played]]  # by arm; the first is the reference
RATES = ("p1", "p2_uncond", "p2_cond")
COMPARED = (*RATES, "tokens_per_round", "tpot_ms")


def to_dict(results: Results, setting: dict[str, Any]) -> dict[str, Any]:
    """For JSON: figures of each arm over all turns and over warm ones, differences to the first arm, and acceptance by turn."""
    reference, *_ = results

    def compared(select: Any) -> dict[str, Any]:
        parts = {name: select(turns) for name, turns in results.items()}
        return {
            name: figures(turns)
            | dict(
                differences={
                    what: dict(value=d.value, sd=d.sd, sds=d.sds)
                    for what in RATIOS
                    if name != reference and (d := difference(turns, parts[reference], what))
                },
                by_turn={what: by_turn(turns, what) for what in (*COMPARED, "ttft_ms")},
            )
            for name, turns in parts.items()
        }

    return setting | dict(
        reference=reference, all=compared(list), warm=compared(lambda turns: [p for p in turns if p.warm])
    )


def show(found: dict[str, Any]) -> RenderableType:
    """Tables of what `to_dict` gives."""
    parts: list[RenderableType] = []
    for which in ("all", "warm"):
        arms = found[which]
        if arms[found["reference"]]["turns"]:
            parts += [_figures(f"{which.capitalize()} turns", arms)]
            parts += [_differences(f"{which.capitalize()} turns less {found['reference']}", arms)] * (len(arms) > 1)
    return Group(*parts)


def _figures(title: str, arms: dict[str, Any]) -> Table:
    first = next(iter(arms.values()))
    caption = (
        f"{first['turns']} turns, {first['tokens']} tokens; {first['cached']} of {first['prompt']} prompt tokens cached; "
        "p2 c.: after a right draft 1"
    )
    table = Table(title=title, caption=caption, box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for name in ("arm", "n", "p1", "p2", "p2 c.", "tokens a round", "TTFT p50 ms", "TPOT p50 ms", "wall s"):
        table.add_column(name, justify="left" if name == "arm" else "right")
    for name, f in arms.items():
        rates = ("–" if f[r] is None else f"{f[r]:.3f}" for r in RATES)
        times = ("–" if f[t] is None else f"{f[t]['p50']:.2f}" for t in ("ttft_ms", "tpot_ms"))
        table.add_row(name, str(f["n"]), *rates, _number(f["tokens_per_round"]), *times, f"{f['wall_s']:.1f}")
    return table


def _differences(title: str, arms: dict[str, Any]) -> Table:
    caption = "in brackets: in standard deviations, by the jackknife over conversations"
    table = Table(title=title, caption=caption, box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for name in ("arm", "p1", "p2", "p2 c.", "tokens a round", "TPOT ms"):
        table.add_column(name, justify="left" if name == "arm" else "right")
    for name, f in list(arms.items())[1:]:
        cells = []
        for what in COMPARED:
            d = f["differences"].get(what)
            sds = "" if d is None or d["sds"] is None else f" ({d['sds']:+.1f})"
            cells.append("–" if d is None else f"{d['value']:+.3f}{sds}")
        table.add_row(name, *cells)
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def write(folder: str | pathlib.Path, results: Results, found: dict[str, Any]) -> list[pathlib.Path]:
    """Writes experiment.json, turns.csv and the charts into a folder, which is made. Returns the paths.

    Raises:
        RequestError: they cannot be written there.
    """
    folder = pathlib.Path(folder)
    files = {"experiment.json": json.dumps(found, allow_nan=False, indent=1) + "\n", **charts(found)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        with open(folder / "turns.csv", "w", newline="", encoding="utf-8") as file:
            write_turns(file, results)
    except OSError as error:
        raise RequestError(f"{folder}: {error.strerror or error}") from None
    return [folder / name for name in (*files, "turns.csv")]


def write_turns(file: Any, results: Results) -> None:
    """A line of CSV for each turn of each arm; counts of each draft position stand in columns of their own."""
    places = max((p.acceptance.offered.size for turns in results.values() for p in turns), default=0)
    counts = [f"{name}_{i + 1}" for name in ("offered", "matched", "reached", "accepted") for i in range(places)]
    own = ("conversation", "turn", "prompt", "cached", "finish_reason", "ttft_ms", "tpot_ms", "wall_s", "differed")
    writer = csv.writer(file)
    writer.writerow(["arm", *own, "tokens", "rounds", *counts])
    for name, turns in results.items():
        for p in turns:
            values = []
            for what in ("offered", "matched", "reached", "accepted"):
                row = getattr(p.acceptance, what)
                values += [*row.tolist(), *[0] * (places - row.size)]
            writer.writerow([name, *(getattr(p, x) for x in own), len(p.token_ids), p.acceptance.steps, *values])


def charts(found: dict[str, Any]) -> dict[str, str]:
    """SVG images by file name, of warm turns where there are any."""
    arms = found["warm"] if found["warm"][found["reference"]]["turns"] else found["all"]
    kind = "warm turns" if arms is found["warm"] else "all turns"
    out = {}
    for rate in ("unconditional", "conditional"):
        series = {
            name: [(p["draft"], p[rate], *p[f"{rate}_95"]) for p in f["acceptance"]["positions"] if p[rate] is not None]
            for name, f in arms.items()
        }
        title = f"Acceptance by draft position, {rate}, {kind}, with 95 % intervals"
        out[f"acceptance_{rate}.svg"] = line_chart(title, "draft", "rate", series, whole=True)
    for what, name, whole in (("p1", "acceptance of draft 1", True), ("tpot_ms", "ms a token", False)):
        series = {arm: f["by_turn"][what] for arm, f in arms.items()}
        file = {"p1": "acceptance_by_turn.svg", "tpot_ms": "tpot_by_turn.svg"}[what]
        out[file] = line_chart(f"{name[0].upper()}{name[1:]} by turn, {kind}", "turn", name, series, whole=whole)
    return out


def first_difference(results: Results) -> str | None:
    """What is wrong if the arms did not answer alike: exact decoding means that they must."""
    (reference, wanted), *others = results.items()
    for name, turns in others:
        for p, want in zip(turns, wanted, strict=True):
            if (p.conversation, p.turn, p.token_ids) != (want.conversation, want.turn, want.token_ids):
                same = sum(1 for _ in _common(p.token_ids, want.token_ids))
                return f"arm {name} answered turn {p.turn} of {p.conversation} differently from {reference}, from token {same} on"
    return None


def _common(a: Sequence[int], b: Sequence[int]) -> Any:
    for x, y in zip(a, b, strict=False):
        if x != y:
            return
        yield x


__all__ = ["COMPARED", "Difference", "Results", "charts", "first_difference", "show", "to_dict", "write", "write_turns"]
