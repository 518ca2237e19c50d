"""How often drafts are accepted: counted on the device, read here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rich.table import Table

_COUNTS = ("offered", "matched", "reached", "accepted")


@dataclasses.dataclass(frozen=True, eq=False)
class Acceptance:
    """Counts of one request, or of several added up. Index i of an array is draft i+1, which row i of a verify judges.

    Attributes:
        steps: verifies.
        offered: drafts that were verified at this place.
        matched: of those, how many equal the target's token after the rows before them, right or wrong as these were.
        reached: offered drafts whose predecessors were all accepted.
        accepted: drafts that became output; so were all before them.
        histogram: verifies by the tokens they emitted, 0, 1, 2 …
    """

    steps: int | np.integer
    offered: np.ndarray
    matched: np.ndarray
    reached: np.ndarray
    accepted: np.ndarray
    histogram: np.ndarray

    def __post_init__(self) -> None:
        shapes = {np.shape(getattr(self, name)) for name in _COUNTS}
        if len(shapes) > 1 or len(shapes.pop()) != 1 or np.ndim(self.histogram) != 1:
            raise ValueError("offered, matched, reached and accepted must be vectors of one length, histogram a vector")

    @classmethod
    def merge(cls, parts: Iterable[Acceptance]) -> Acceptance:
        """The sum; parts may differ in how many drafts they count."""
        parts = list(parts)

        def total(name: str) -> np.ndarray:
            rows = [np.asarray(getattr(part, name), np.int64) for part in parts]
            out = np.zeros(max((row.size for row in rows), default=0), np.int64)
            for row in rows:
                out[: row.size] += row
            return out

        return cls(sum(int(part.steps) for part in parts), *(total(name) for name in (*_COUNTS, "histogram")))

    @property
    def drafted(self) -> int:
        """Drafts offered, at any place."""
        return int(self.offered.sum())

    @property
    def drafts_accepted(self) -> int:
        return int(self.accepted.sum())

    @property
    def emitted(self) -> int:
        """Tokens emitted: accepted drafts and the target's own token of each verify."""
        return int(np.arange(self.histogram.size) @ self.histogram)

    @property
    def tokens_per_step(self) -> float:
        return self.emitted / int(self.steps) if self.steps else 0.0

    @property
    def unconditional(self) -> np.ndarray:
        """matched / offered at each place, NaN where nothing was offered: what a place is worth by itself."""
        return _rates(self.matched, self.offered)

    @property
    def conditional(self) -> np.ndarray:
        """accepted / reached at each place, NaN where nothing was reached: how often a draft right so far goes on."""
        return _rates(self.accepted, self.reached)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; rates that have no denominator are None, places that were never offered are left out."""
        return dict(
            steps=int(self.steps),
            drafted=self.drafted,
            accepted=self.drafts_accepted,
            emitted=self.emitted,
            tokens_per_step=self.tokens_per_step,
            positions=[self._position(i) for i in range(self._places())],
            histogram=_trimmed(self.histogram),
        )

    def table(self, title: str = "Acceptance by draft position") -> Table:
        """One row a place: both rates in percent with their 95 % intervals."""
        from rich import box
        from rich.table import Table

        table = Table(title=title, caption=self.summary(), box=box.SIMPLE, pad_edge=False, collapse_padding=True)
        for name in ("draft", "offered", "unconditional", "95 %", "reached", "conditional", "95 %"):
            table.add_column(name, justify="right", no_wrap=True)
        for i in range(self._places()):
            p = self._position(i)
            rates = [
                (_percent(p[name]), "–".join(map(_percent, p[f"{name}_95"])))
                for name in ("unconditional", "conditional")
            ]
            table.add_row(str(p["draft"]), str(p["offered"]), *rates[0], str(p["reached"]), *rates[1])
        return table

    def summary(self) -> str:
        drafts = f"{self.drafts_accepted} of {self.drafted} drafts accepted" if self.drafted else "no drafts"
        return f"{self.emitted} tokens in {self.steps} steps ({self.tokens_per_step:.2f} a step), {drafts}"

    def _places(self) -> int:
        return len(_trimmed(self.offered))

    def _position(self, i: int) -> dict[str, Any]:
        offered, matched, reached, accepted = (int(getattr(self, name)[i]) for name in _COUNTS)
        return dict(
            draft=i + 1,
            offered=offered,
            matched=matched,
            unconditional=matched / offered if offered else None,
            unconditional_95=list(wilson(matched, offered)),
            reached=reached,
            accepted=accepted,
            conditional=accepted / reached if reached else None,
            conditional_95=list(wilson(accepted, reached)),
        )


def wilson(hits: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval of a rate, 95 % by default; (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    rate, spread = hits / trials, z * z / trials
    centre = (rate + spread / 2) / (1 + spread)
    half = z * math.sqrt(rate * (1 - rate) / trials + spread / (4 * trials)) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def _rates(hits: np.ndarray, trials: np.ndarray) -> np.ndarray:
    return np.where(trials > 0, hits / np.maximum(trials, 1), np.nan)


def _trimmed(counts: np.ndarray) -> Sequence[int]:
    """Without the zeros at the end."""
    return counts[: np.flatnonzero(counts).max(initial=-1) + 1].tolist()


def _percent(rate: float | None) -> str:
    return "–" if rate is None else f"{100 * rate:.1f}"
