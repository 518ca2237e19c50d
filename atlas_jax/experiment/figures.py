"""Figures of an arm and the differences between arms, with their uncertainty."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from atlas_jax.experiment.play import Played
from atlas_jax.metrics import Acceptance

Ratio = Callable[[Played], tuple[float, float]]


def _place(hits: str, trials: str, i: int) -> Ratio:
    def counts(p: Played) -> tuple[float, float]:
        of = getattr(p.acceptance, trials)
        return (float(getattr(p.acceptance, hits)[i]), float(of[i])) if i < of.size else (0.0, 0.0)

    return counts


# Each is a quotient of two sums over turns.
RATIOS: dict[str, Ratio] = {
    "p1": _place("matched", "offered", 0),
    "p2_uncond": _place("matched", "offered", 1),
    "p2_cond": _place("accepted", "reached", 1),
    "tokens_per_round": lambda p: (float(p.acceptance.emitted), float(p.acceptance.steps)),
    "tpot_ms": lambda p: (p.tpot_ms * (len(p.token_ids) - 1), float(max(len(p.token_ids) - 1, 0))),
    "ttft_ms": lambda p: (p.ttft_ms, 1.0),
}


def ratio(turns: Sequence[Played], name: str) -> float | None:
    """None where nothing was counted."""
    above, below = np.sum([RATIOS[name](p) for p in turns], axis=0) if turns else (0.0, 0.0)
    return float(above / below) if below else None


def figures(turns: Sequence[Played]) -> dict[str, Any]:
    """What an arm came to; n are rounds. For JSON."""
    acceptance = Acceptance.merge(p.acceptance for p in turns)
    times = {
        name: {f"p{q}": float(np.percentile(values, q)) for q in (50, 90)} if values else None
        for name, values in (
            ("ttft_ms", [p.ttft_ms for p in turns]),
            ("tpot_ms", [p.tpot_ms for p in turns if len(p.token_ids) > 1]),
        )
    }
    return dict(
        turns=len(turns),
        n=acceptance.steps,
        **{name: ratio(turns, name) for name in ("p1", "p2_uncond", "p2_cond", "tokens_per_round")},
        mean={name: ratio(turns, name) for name in ("ttft_ms", "tpot_ms")},
        **times,
        wall_s=sum(p.wall_s for p in turns),
        tokens=sum(len(p.token_ids) for p in turns),
        prompt=sum(p.prompt for p in turns),
        cached=sum(p.cached for p in turns),
        replayed=sum(p.replayed for p in turns),
        differed=None if all(p.differed is None for p in turns) else sum(p.differed or 0 for p in turns),
        acceptance=acceptance.to_dict(),
    )


@dataclasses.dataclass(frozen=True)
class Difference:
    """An arm's ratio less the reference's, and its standard deviation; that is None for a single conversation."""

    value: float
    sd: float | None

    @property
    def sds(self) -> float | None:
        """The difference in standard deviations."""
        return self.value / self.sd if self.sd else None


def difference(turns: Sequence[Played], reference: Sequence[Played], name: str) -> Difference | None:
    """By the jackknife over conversations (Quenouille and Tukey): rounds of one conversation are not independent of each other,
    and both arms play the same ones, so what is left out of one is left out of the other. None where a ratio is not defined."""
    names = sorted({p.conversation for p in (*turns, *reference)})
    sums = np.zeros((2, len(names), 2))
    for side, part in enumerate((turns, reference)):
        for p in part:
            sums[side, names.index(p.conversation)] += RATIOS[name](p)
    total = sums.sum(1)
    if not total[:, 1].all():
        return None
    value = _less(total)
    rest = total[:, None] - sums
    rest = rest[:, rest[:, :, 1].all(0)]
    if rest.shape[1] < 2:
        return Difference(value, None)
    parts = _less(rest)
    return Difference(value, float(np.sqrt((parts.size - 1) * parts.var())))


def _less(sums: np.ndarray) -> Any:
    """The first side's quotient less the second's; the last axis holds the two sums of a quotient."""
    ratios = sums[..., 0] / sums[..., 1]
    out = ratios[0] - ratios[1]
    return out if out.ndim else float(out)


def by_turn(turns: Sequence[Played], name: str) -> list[tuple[int, float]]:
    """A ratio for each turn number that has one."""
    numbers = sorted({p.turn for p in turns})
    values = [(n, ratio([p for p in turns if p.turn == n], name)) for n in numbers]
    return [(n, value) for n, value in values if value is not None]
