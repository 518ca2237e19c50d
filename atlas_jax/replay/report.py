"""What a replay found: figures for each policy, as JSON, tables and bars."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from atlas_jax.replay.files import CostTable
from atlas_jax.replay.simulate import LOOKUP, MTP, Policy, Round, Turn

QUANTILES = (10, 25, 50, 75, 90)
SHOWN = ("p10", "p50", "p90")  # in the table, for its width
BINS = 10  # of shares of a turn, in the histogram
WIDTH = 36  # of the longest bar, in characters


@dataclasses.dataclass(frozen=True)
class Result:
    """One policy over all turns.

    Attributes:
        steps, tokens: rounds, and the tokens that they emitted.
        accepted: drafts accepted, by source.
        rounds: rounds, by source.
        lengths: for each source, rounds by how many drafts they accepted, 0, 1, 2 …
        turn_lookup_share: of each turn, the share of its tokens that came from lookup.
        turn_tokens_per_step: of each turn.
        wall_ms: under the cost table, None without one.
    """

    policy: Policy
    steps: int
    tokens: int
    accepted: dict[str, int]
    rounds: dict[str, int]
    lengths: dict[str, list[int]]
    turn_lookup_share: np.ndarray
    turn_tokens_per_step: np.ndarray
    wall_ms: float | None

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps

    @property
    def lookup_share(self) -> float:
        return self.accepted.get(LOOKUP, 0) / self.tokens

    @property
    def mtp_share(self) -> float:
        return self.accepted.get(MTP, 0) / self.tokens


def summarise(policy: Policy, rounds: Sequence[Sequence[Round]], cost: CostTable | None = None) -> Result:
    """Adds up the rounds of each turn; no turn may be empty."""
    kinds = collections.Counter(step for turn in rounds for step in turn)
    accepted: collections.Counter[str] = collections.Counter()
    count: collections.Counter[str] = collections.Counter()
    lengths: dict[str, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    for step, times in kinds.items():
        accepted[step.source] += times * step.accepted
        count[step.source] += times
        lengths[step.source][step.accepted] += times
    emitted = np.array([sum(step.emitted for step in turn) for turn in rounds], np.int64)
    found = np.array([sum(step.accepted for step in turn if step.source == LOOKUP) for turn in rounds], np.int64)
    return Result(
        policy=policy,
        steps=kinds.total(),
        tokens=int(emitted.sum()),
        accepted=dict(accepted),
        rounds=dict(count),
        lengths={source: [times[i] for i in range(max(times) + 1)] for source, times in lengths.items()},
        turn_lookup_share=found / emitted,
        turn_tokens_per_step=emitted / np.array([len(turn) for turn in rounds]),
        wall_ms=None if cost is None else sum(times * cost.round_ms(step) for step, times in kinds.items()),
    )


def saved(result: Result, base: Result | None) -> float | None:
    """The share of the base's steps that the policy does without; below 0 where it takes more."""
    return None if base is None else 1 - result.steps / base.steps


def to_dict(results: Sequence[Result], turns: Sequence[Turn], setting: dict[str, Any]) -> dict[str, Any]:
    """For JSON. Shares are in 0 … 1; quantiles are over turns, each counted once, however long."""
    plain, mtp = results[0], next((r for r in results if r.policy.name == MTP), None)
    return setting | dict(
        turns=len(turns),
        tokens=plain.tokens,
        policies=[
            dict(
                name=r.policy.name,
                steps=r.steps,
                tokens_per_step=r.tokens_per_step,
                steps_saved=saved(r, plain),
                steps_saved_against_mtp=saved(r, mtp),
                lookup_share=r.lookup_share,
                mtp_share=r.mtp_share,
                rounds=r.rounds,
                rounds_by_accepted=r.lengths,
                wall_ms=r.wall_ms,
                turn_lookup_share=_quantiles(r.turn_lookup_share),
                turn_tokens_per_step=_quantiles(r.turn_tokens_per_step),
            )
            for r in results
        ],
    )


def _quantiles(values: np.ndarray) -> dict[str, float]:
    return {f"p{q}": float(value) for q, value in zip(QUANTILES, np.percentile(values, QUANTILES), strict=True)}


def show(results: Sequence[Result], turns: Sequence[Turn], plots: bool = True) -> RenderableType:
    """Tables for a terminal of 80 columns, and the bars below them."""
    parts: list[RenderableType] = [totals(results, turns), spread(results)]
    if plots:
        parts += [bars("Tokens a step", [(r.policy.name, r.tokens_per_step) for r in results], ".2f")]
        looked = next((r for r in results if r.policy.lookup and not r.policy.mtp), None)
        if looked is not None:
            counts = np.histogram(looked.turn_lookup_share, BINS, (0, 1))[0].tolist()
            names = [f"{100 * i // BINS:>3} – {100 * (i + 1) // BINS} %" for i in range(BINS)]
            title = f"Turns by their share of tokens from lookup ({looked.policy.name})"
            parts.append(bars(title, list(zip(names, counts, strict=True)), ",.0f"))
            lengths = looked.lengths.get(LOOKUP, [])
            title = f"Lookup rounds by drafts accepted ({looked.policy.name})"
            parts.append(bars(title, [(str(i), times) for i, times in enumerate(lengths)], ",.0f"))
    return Group(*parts)


def totals(results: Sequence[Result], turns: Sequence[Turn]) -> Table:
    plain, mtp = results[0], next((r for r in results if r.policy.name == MTP), None)
    timed, drafted = plain.wall_ms is not None, mtp is not None
    caption = f"{plain.tokens:,} tokens in {len(turns):,} turns; shares in %; of tokens that were accepted drafts"
    table = Table(title="Replay", caption=caption, box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    table.add_column("policy", no_wrap=True)
    for name, shown in _columns(timed, drafted):
        if shown:
            table.add_column(name, justify="right")
    for r in results:
        ours, theirs = saved(r, plain), saved(r, mtp)
        cells = (_percent(r.lookup_share), _percent(r.mtp_share), f"{r.tokens_per_step:.2f}", _percent(ours))
        cells += (_percent(theirs), f"{(r.wall_ms or 0) / 1e3:,.2f}")
        table.add_row(
            r.policy.name, *(cell for cell, (_, on) in zip(cells, _columns(timed, drafted), strict=True) if on)
        )
    return table


def _columns(timed: bool, drafted: bool) -> list[tuple[str, bool]]:
    return [
        ("lookup", True),
        ("MTP", drafted),
        ("tokens a step", True),
        ("steps saved", True),
        ("… against MTP", drafted),
        ("wall s", timed),
    ]


def spread(results: Sequence[Result]) -> Table:
    table = Table(
        title="Per turn", caption="p50 is the median turn", box=box.SIMPLE, pad_edge=False, collapse_padding=True
    )
    table.add_column("policy", no_wrap=True)
    for part in ("lookup %", "tokens a step"):
        for name in SHOWN:
            table.add_column(f"{part}\n{name}", justify="right")
    for r in results:
        shares, rates = _quantiles(r.turn_lookup_share), _quantiles(r.turn_tokens_per_step)
        table.add_row(r.policy.name, *(_percent(shares[q]) for q in SHOWN), *(f"{rates[q]:.2f}" for q in SHOWN))
    return table


def bars(title: str, rows: Sequence[tuple[str, float | int]], form: str) -> Table:
    """A bar of text for each value, from 0 on; the longest is `WIDTH` characters."""
    most = max((value for _, value in rows), default=0) or 1
    table = Table(title=title, box=None, show_header=False, pad_edge=False, padding=(0, 1))
    for name, value in rows:
        table.add_row(name, "█" * round(WIDTH * value / most), format(value, form))
    return table


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"
