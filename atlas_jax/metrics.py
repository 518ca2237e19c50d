"""How often drafts are accepted: counted on the device, read here."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rich.table import Table

CONTEXT_BOUNDS = tuple(1024 << i for i in range(7))  # tokens of context, which part the counts into len + 1 ranges


class Source(enum.IntEnum):
    """Where a draft came from; a round's source is that of its first draft, PLAIN if it has none."""

    PLAIN = 0
    MTP = 1
    LOOKUP = 2
    CUSTOM = 3

    @classmethod
    def of(cls, drafter: str) -> Source:
        """The source of a drafter's drafts that does not name them itself."""
        return {"mtp": cls.MTP, "lookup": cls.LOOKUP}.get(drafter, cls.CUSTOM)


class Event(enum.IntEnum):
    """What is counted: the first four by draft (place i is draft i + 1), ROUNDS by tokens emitted (place i is i tokens)."""

    OFFERED = 0
    MATCHED = 1
    REACHED = 2
    ACCEPTED = 3
    ROUNDS = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Acceptance:
    """Counts of one request, or of several added up.

    Attributes:
        counts: integers [contexts, sources, events, places], with contexts as CONTEXT_BOUNDS parts them and room for two
            places more than there are drafts, so that a round's tokens 0, 1, 2 … have each their own.
    """

    counts: np.ndarray

    def __post_init__(self) -> None:
        axes = (len(CONTEXT_BOUNDS) + 1, len(Source), len(Event))
        shape = np.shape(self.counts)
        if len(shape) != 4 or shape[:3] != axes or shape[3] < 2:
            raise ValueError(f"counts have axes {axes} and at least 2 places, got {shape}")

    @classmethod
    def zero(cls, drafts: int = 0) -> Acceptance:
        """Nothing counted, with room for that many drafts."""
        return cls(np.zeros((len(CONTEXT_BOUNDS) + 1, len(Source), len(Event), drafts + 2), np.int64))

    @classmethod
    def merge(cls, parts: Iterable[Acceptance]) -> Acceptance:
        """The sum; parts may differ in how many drafts they count."""
        return sum(parts, cls.zero())

    def __add__(self, other: Acceptance) -> Acceptance:
        a, b = self._alike(other)
        return Acceptance(a + b)

    def __sub__(self, earlier: Acceptance) -> Acceptance:
        """What was counted since `earlier`: a window between two readings of one total."""
        a, b = self._alike(earlier)
        return Acceptance(a - b)

    def _alike(self, other: Acceptance) -> list[np.ndarray]:
        places = max(self.counts.shape[-1], other.counts.shape[-1])
        pad = lambda x: np.pad(x.astype(np.int64), [(0, 0)] * 3 + [(0, places - x.shape[-1])])  # noqa: E731
        return [pad(self.counts), pad(other.counts)]

    # ---- parts -----------------------------------------------------------------------------------------------------

    def by_source(self) -> dict[str, Acceptance]:
        """The counts of each source that drafted: "mtp", "lookup", …; "plain" are rounds without a draft."""
        return {source.name.lower(): part for source in Source if (part := self._only(1, source)).counts.any()}

    def by_context(self) -> dict[str, Acceptance]:
        """The counts of each range of context lengths that occurred, by the tokens committed before the round."""
        bounds = (0, *CONTEXT_BOUNDS)
        names = [f"{low} – {high - 1}" for low, high in itertools.pairwise(bounds)] + [f"{bounds[-1]} –"]
        return {name: part for i, name in enumerate(names) if (part := self._only(0, i)).counts.any()}

    def _only(self, axis: int, index: int) -> Acceptance:
        out, part = np.zeros_like(self.counts), (slice(None),) * axis + (index,)
        out[part] = self.counts[part]
        return Acceptance(out)

    # ---- totals ----------------------------------------------------------------------------------------------------

    def _total(self, event: Event) -> np.ndarray:
        return self.counts[:, :, event].sum((0, 1), dtype=np.int64)

    @property
    def histogram(self) -> np.ndarray:
        """Verifies by the tokens they emitted, 0, 1, 2 …"""
        return self._total(Event.ROUNDS)

    @property
    def steps(self) -> int:
        """Verifies."""
        return int(self.histogram.sum())

    @property
    def offered(self) -> np.ndarray:
        """Drafts that were verified, at each place: index i is draft i + 1, which row i of a verify judges."""
        return self._total(Event.OFFERED)[:-2]

    @property
    def matched(self) -> np.ndarray:
        """Of those offered, how many equal the target's token after the rows before them, right or wrong as these were."""
        return self._total(Event.MATCHED)[:-2]

    @property
    def reached(self) -> np.ndarray:
        """Offered drafts whose predecessors were all accepted."""
        return self._total(Event.REACHED)[:-2]

    @property
    def accepted(self) -> np.ndarray:
        """Drafts that became output; so were all before them."""
        return self._total(Event.ACCEPTED)[:-2]

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
        return self.emitted / self.steps if self.steps else 0.0

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
        parts = dict(sources=self.by_source(), contexts=self.by_context())
        return self._figures() | {
            kind: {name: part._figures() for name, part in found.items()} for kind, found in parts.items()
        }

    def _figures(self) -> dict[str, Any]:
        return dict(
            steps=self.steps,
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

    def parts_table(self, title: str = "Acceptance by source and context") -> Table:
        """One row a source and one a range of context lengths: rounds, tokens of each, and the rates of the first two drafts."""
        from rich import box
        from rich.table import Table

        table = Table(title=title, caption=self.summary(), box=box.SIMPLE, pad_edge=False, collapse_padding=True)
        for name in ("", "steps", "tokens a step", "draft 1", "draft 2", "… after a right one"):
            table.add_column(name, justify="right" if name else "left", no_wrap=True)
        for parts in (self.by_source(), self.by_context()):
            for name, part in parts.items():
                rates = [*part.unconditional[:2], *part.conditional[1:2]] + [math.nan] * 3
                cells = (_percent(None if math.isnan(rate) else float(rate)) for rate in rates[:3])
                table.add_row(name, str(part.steps), f"{part.tokens_per_step:.2f}", *cells)
            table.add_section()
        return table

    def __repr__(self) -> str:
        places = [self._position(i) for i in range(self._places())]
        rates = [
            f"draft {p['draft']}: {p['accepted']} of {p['reached']} ({_percent(p['conditional'])} %)" for p in places
        ]
        return f"<Acceptance: {self.summary()}{', of those reached: ' if rates else ''}{', '.join(rates)}>"

    def summary(self) -> str:
        drafts = f"{self.drafts_accepted} of {self.drafted} drafts accepted" if self.drafted else "no drafts"
        return f"{self.emitted} tokens in {self.steps} steps ({self.tokens_per_step:.2f} a step), {drafts}"

    def _places(self) -> int:
        return len(_trimmed(self.offered))

    def _position(self, i: int) -> dict[str, Any]:
        offered, matched, reached, accepted = (
            int(getattr(self, name)[i]) for name in ("offered", "matched", "reached", "accepted")
        )
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


class AcceptanceLog:
    """Acceptance of the requests that ran so far, cold and warm apart. A reading is a value that later requests do not
    change, so a window is the difference of two: `before = log.total(); …; log.total() - before`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        with self._lock:
            self._totals = {False: Acceptance.zero(), True: Acceptance.zero()}

    def add(self, acceptance: Acceptance, *, warm: bool) -> None:
        """Counts a request; `warm` says whether part of its prompt came out of the prefix cache."""
        with self._lock:
            self._totals = self._totals | {warm: self._totals[warm] + acceptance}

    def total(self, *, warm: bool | None = None) -> Acceptance:
        """All requests since the last reset, or the warm or the cold ones."""
        totals = self._totals
        return totals[False] + totals[True] if warm is None else totals[warm]

    def to_dict(self) -> dict[str, Any]:
        return dict(cold=self.total(warm=False).to_dict(), warm=self.total(warm=True).to_dict())


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
