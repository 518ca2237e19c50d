"""How many rows the next dispatch verifies: a fixed number, or the one that promises most tokens a second.

Decisions are made on the host between dispatches, from what dispatches before have returned anyway: nothing waits for them. As
decoding is exact, they change the speed alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from atlas_jax.metrics import Source

PRIOR = 0.6  # acceptance that is expected at a place of which nothing is known
PRIOR_ROUNDS = 2.0  # rounds that an expectation counts for
DECAY = 0.97  # of what was counted, a round
HYSTERESIS = 1.05  # another number of rows must promise this much more
LEAVING = 1.01  # and plain decoding this much
TRIAL_ROUNDS = 2  # of a dispatch that tries another number of rows
TRIALS = 4  # of each number of rows at most, until its time has been taken twice
FIRST_PROBE, LAST_PROBE = 256, 4096  # tokens of plain decoding between two trials of drafting; each failure doubles it
SMOOTHING = 0.3  # weight of a new time


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a dispatch of B sequences did, by round: rows verified (0: the sequence did not run), who drafted, tokens emitted; and
    seconds a round, None where the device was not what took them."""

    rows: int
    n_rows: np.ndarray  # [rounds, B]
    source: np.ndarray  # [rounds, B], members of `Source`
    emitted: np.ndarray  # [rounds, B]
    round_s: float | None
    keys: Sequence[int] = ()  # which sequence each column is; without, the first is 0


@runtime_checkable
class KPolicy(Protocol):
    """What decides on the rows of each dispatch."""

    @property
    def rows(self) -> tuple[int, ...]:
        """The numbers of rows that it may choose, which are compiled beforehand."""
        ...

    def choose(self) -> tuple[int, int | None]:
        """Rows of the next dispatch, and the rounds it should be limited to, if any."""
        ...

    def observe(self, outcome: Outcome) -> None: ...

    def forget(self, key: int) -> None:
        """A sequence has ended."""
        ...


@dataclasses.dataclass(frozen=True)
class FixedK:
    """Always the same."""

    rows: tuple[int]

    def choose(self) -> tuple[int, int | None]:
        return self.rows[0], None

    def observe(self, outcome: Outcome) -> None:
        pass

    def forget(self, key: int) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class WidestK:
    """For sequences each of which has a fixed number of drafts: of the numbers of rows that are `compiled`, the smallest that has
    room for the `widest` of them. Where there is none, the largest: some then get fewer drafts than they asked for."""

    compiled: Callable[[], tuple[int, ...]]
    widest: Callable[[], int]

    @property
    def rows(self) -> tuple[int, ...]:
        return self.compiled()

    def choose(self) -> tuple[int, int | None]:
        rows, widest = self.compiled(), self.widest()
        return next((k for k in rows if k >= widest), rows[-1]), None

    def observe(self, outcome: Outcome) -> None:
        pass

    def forget(self, key: int) -> None:
        pass


class Rates:
    """How many drafts are accepted, by who drafted and by place: of rounds that accepted i - 1 drafts and had room for i, how many
    accepted i. What a drafter left out counts as not accepted."""

    def __init__(self, places: int, prior: Rates | None = None) -> None:
        self.rounds = np.zeros(len(Source))
        self.reached, self.accepted = np.zeros((2, len(Source), places))
        self.prior = prior

    def add(self, rows: int, rounds: Sequence[tuple[int, int]]) -> None:
        """Takes in rounds of `rows` rows, each with its source and the drafts it accepted."""
        for counts in (self.rounds, self.reached, self.accepted):
            counts *= DECAY ** len(rounds)
        for source, accepted in rounds:
            self.rounds[source] += 1
            self.reached[source, : min(accepted + 1, rows - 1)] += 1
            self.accepted[source, :accepted] += 1

    def shares(self) -> np.ndarray:
        """Of rounds, by source."""
        before = self.prior.shares() if self.prior else np.eye(len(Source))[Source.CUSTOM]
        return (self.rounds + PRIOR_ROUNDS * before) / (self.rounds.sum() + PRIOR_ROUNDS)

    def conditional(self) -> np.ndarray:
        """[sources, places]; a place that was not reached is taken to be like the one before it."""
        before = self.prior.conditional() if self.prior else None
        out = np.zeros_like(self.reached)
        for i in range(out.shape[1]):
            expected = before[:, i] if before is not None else out[:, i - 1] if i else np.full(len(Source), PRIOR)
            out[:, i] = (self.accepted[:, i] + PRIOR_ROUNDS * expected) / (self.reached[:, i] + PRIOR_ROUNDS)
        return out

    def tokens(self) -> np.ndarray:
        """Expected of a round of 1, 2, 3 … rows."""
        chained = np.cumsum(np.cumprod(self.conditional(), axis=1), axis=1)
        return 1.0 + np.concatenate([[0.0], self.shares() @ chained])


@dataclasses.dataclass
class Memory:
    """What is known beyond one batch of requests: the seconds that rounds take, by rows, and how drafts did on the whole."""

    rates: Rates
    round_s: dict[int, float] = dataclasses.field(default_factory=dict)
    expected_s: dict[int, float] = dataclasses.field(default_factory=dict)  # by a cost table, until measured here
    timed: dict[int, int] = dataclasses.field(default_factory=dict)
    rows: int | None = None  # chosen last
    gap: int = FIRST_PROBE

    def time(self, rows: int, seconds: float) -> None:
        """Takes a measured time in. Whatever else slows or speeds the machine (context, other work) is taken to scale all rows'."""
        count = self.timed[rows] = self.timed.get(rows, 0) + 1
        old = self.round_s.get(rows)
        if old is None or count == 2:  # the first run of an executable also loads it
            self.round_s[rows] = seconds if old is None else min(old, seconds)
            return
        new = old + SMOOTHING * (min(seconds, 2 * old) - old)
        self.round_s = {k: s * new / old for k, s in self.round_s.items()}

    def seconds(self, rows: int) -> float | None:
        """Of a round; None if nobody knows."""
        if rows in self.round_s or rows not in self.expected_s:
            return self.round_s.get(rows)
        known = [k for k in self.round_s if k in self.expected_s]
        scale = self.round_s[known[0]] / self.expected_s[known[0]] if known else 1.0
        return scale * self.expected_s[rows]


class AutoK:
    """The number of rows with the most expected tokens a second, plain decoding (1 row) included.

    Each number of rows is tried for a few rounds, unless a cost table says what it takes. While plain decoding is the
    best, drafting is tried again after a while, and ever more rarely if it goes on losing.
    """

    def __init__(self, rows: Sequence[int], memory: Memory) -> None:
        self.rows = tuple(sorted(rows))
        self.memory = memory
        self._rates: dict[int, Rates] = {}  # of the sequences that run
        self._trials = {k: 0 for k in self.rows if memory.seconds(k) is None}
        self._current = memory.rows if memory.rows in self.rows else None
        self._settled = True  # the current number of rows has been observed
        self._plain_tokens = 0
        self._speeds: dict[int, float] = {}  # as of the last rounds with drafts

    def choose(self) -> tuple[int, int | None]:
        untimed = [k for k, n in self._trials.items() if n < TRIALS and self.memory.timed.get(k, 0) < 2]
        if untimed:
            rows = min(untimed, key=self._trials.__getitem__)
            self._trials[rows] += 1
            return rows, TRIAL_ROUNDS
        speeds = self._speeds = self._speeds or self.speeds()
        best = max(self.rows, key=speeds.__getitem__)
        if self._current is None:
            self._current = best
        elif self._settled and speeds[best] > (HYSTERESIS if best > 1 else LEAVING) * speeds[self._current]:
            self._current, self._settled = best, False
            if best > 1:
                self.memory.gap = FIRST_PROBE
        self.memory.rows = self._current
        if self._current == 1 and self._plain_tokens >= self.memory.gap and len(self.rows) > 1:
            self._plain_tokens, self.memory.gap = 0, min(2 * self.memory.gap, LAST_PROBE)
            return max(self.rows[1:], key=speeds.__getitem__), TRIAL_ROUNDS
        return self._current, None

    def speeds(self) -> dict[int, float]:
        """Expected tokens a second of all running sequences, by rows; 0 where the time is not known yet."""
        live = [rates.tokens() for rates in self._rates.values()] or [self.memory.rates.tokens()]
        tokens = np.sum(live, axis=0)
        times = {rows: self.memory.seconds(rows) for rows in self.rows}
        return {rows: float(tokens[rows - 1]) / s if s else 0.0 for rows, s in times.items()}

    def observe(self, outcome: Outcome) -> None:
        for b, key in enumerate(outcome.keys or range(outcome.emitted.shape[1])):
            emitted = outcome.emitted[:, b]
            rates = self._rates.setdefault(key, Rates(self.rows[-1] - 1, self.memory.rates))
            if outcome.rows == 1:
                self._plain_tokens += int(emitted.sum())
                continue
            rounds = [(s, n - 1) for s, n in zip(outcome.source[:, b].tolist(), emitted.tolist(), strict=True) if n]
            rates.add(outcome.rows, rounds)
            self.memory.rates.add(outcome.rows, rounds)
            self._speeds = {}
        if outcome.round_s is not None:
            self.memory.time(outcome.rows, outcome.round_s)
        self._settled |= outcome.rows == self._current

    def forget(self, key: int) -> None:
        self._rates.pop(key, None)
        self._speeds = {}
