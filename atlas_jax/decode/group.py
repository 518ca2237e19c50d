"""Sequences that share dispatches: launched one dispatch ahead, read one behind."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax.decode.k_policy import KPolicy, Outcome
from atlas_jax.decode.live import Live, Step
from atlas_jax.decode.protocol import Drafter

if TYPE_CHECKING:
    from atlas_jax.decode.loop import Loop

SMOOTHING = 0.3  # weight of a new time


@dataclasses.dataclass(eq=False)
class Flight:
    """A dispatch that was launched and not read yet. `before` is the one that the device ran right before it, None if it did
    something else: then nobody knows when this one began."""

    lives: list[Live]
    policy: KPolicy
    rows: int
    launched: float
    before: Flight | None
    results: Any
    ended: float | None = None


class Group:
    """Sequences with one drafter and one way to choose the number of rows.

    Args:
        policy: makes the policy for a number of sequences.
        buckets: the numbers of sequences that dispatches are compiled for, ascending; the last is the most that may join.
    """

    def __init__(
        self, loop: Loop, drafter: Drafter, policy: Callable[[int], KPolicy], buckets: tuple[int, ...]
    ) -> None:
        self.loop, self.drafter, self.buckets = loop, drafter, buckets
        self.lives: list[Live] = []
        self._policy = policy
        self._policies: dict[int, KPolicy] = {}
        self._flying: collections.deque[Flight] = collections.deque()
        self._slots: tuple[tuple[int, ...], Any] = ((), None)  # those of the last dispatch, on the device
        self._round_s: dict[tuple[int, int], float] = {}  # by bucket and rows

    def policy(self, bucket: int) -> KPolicy:
        if bucket not in self._policies:
            self._policies[bucket] = self._policy(bucket)
        return self._policies[bucket]

    def bucket(self, sequences: int) -> int:
        return next(b for b in self.buckets if b >= sequences)

    @property
    def logged(self) -> bool:
        """Whether anyone wants log-probabilities."""
        return any(live.request.params.logprobs for live in self.lives)

    @property
    def widest(self) -> int:
        """The most rows that one of its sequences can use."""
        return 1 + max((live.request.drafts or 0 for live in self.lives), default=0)

    def prepare(self, bucket: int, n_top: int | None) -> None:
        """Compiles what dispatches of so many sequences need."""
        for rows in self.policy(bucket).rows:
            self.loop.dispatcher(self.drafter, rows, n_top, bucket)

    def join(self, live: Live) -> None:
        """Takes in a sequence whose prompt is computed."""
        assert live.started
        self.lives.append(live)

    def leave(self, live: Live) -> None:
        """Lets a sequence go between two rounds. What dispatches under way still emit of it is dropped."""
        if live in self.lives:
            self.lives.remove(live)
        for policy in self._policies.values():
            policy.forget(live.key)
        if not self.lives:
            self._flying.clear()

    def step(
        self, n_top: int | None, dispatch_s: float | int | None = None, most: int | None = None
    ) -> list[tuple[Live, Step]]:
        """Launches what there is room for and reads the oldest dispatch. Sequences that ended have left the group then.

        Args:
            n_top: likeliest tokens to log; None logs nothing.
            dispatch_s: about how long a dispatch may take.
            most: rounds of a dispatch at most.
        """
        # A stop string is found on the host, which may then have to take back part of the last round: no round may follow it.
        eager = any(live.request.params.stop for live in self.lives)
        while len(self._flying) < (1 if eager else 2):
            self._launch(n_top, dispatch_s, 1 if eager else most)
        return self._read()

    # ---- pieces ----------------------------------------------------------------------------------------------------

    def _launch(self, n_top: int | None, dispatch_s: float | int | None, most: int | None) -> None:
        lives, bucket = [*self.lives], self.bucket(len(self.lives))
        policy = self.policy(bucket)
        rows, limit = policy.choose()
        rounds = [self.loop.run.rounds_per_dispatch, limit, most]
        if dispatch_s is not None:
            known = self._round_s.get((bucket, rows))
            rounds.append(max(1, int(dispatch_s / known)) if known else 1)
        if not all(live.emitted for live in lives):
            rounds.append(1)  # the first token need not wait for others
        slots = self._on_device(lives, bucket)
        run = self.loop.dispatcher(self.drafter, rows, n_top, bucket)
        count = np.int32(min(r for r in rounds if r is not None))
        launched, before = time.perf_counter(), self.loop.last
        results = self.loop.dispatch(self.drafter, run, slots, count)
        flight = self.loop.last = Flight(lives, policy, rows, launched, before, results)
        self._flying.append(flight)

    def _on_device(self, lives: list[Live], bucket: int) -> Any:
        slots = tuple(live.slot for live in lives) + (0,) * (bucket - len(lives))
        if slots != self._slots[0]:
            self._slots = slots, jnp.asarray(np.asarray(slots, np.int32))
        return self._slots[1]

    def _read(self) -> list[tuple[Live, Step]]:
        flight = self._flying.popleft()
        asked = time.perf_counter()
        emitted, finish = jax.device_get(flight.results)
        began = flight.ended = time.perf_counter()
        before, flight.before = flight.before, None
        taken = None
        if before and before.ended is not None:
            taken = began - max(flight.launched, before.ended)
            if began - asked < 0.2 * taken:
                taken = None  # a host that found the results ready does not know when they were
        return self._take(flight, emitted, finish, taken)

    def _take(self, flight: Flight, emitted: Any, finish: Any, taken: float | None) -> list[tuple[Live, Step]]:
        """Learns from what a dispatch emitted, in `taken` seconds, and parts it among its sequences."""
        began = time.perf_counter()
        here = [b for b, live in enumerate(flight.lives) if live.finish_reason is None]
        outcome = _outcome(flight, here, emitted, taken)
        flight.policy.observe(outcome)
        if outcome.round_s is not None:
            at = self.bucket(len(flight.lives)), flight.rows
            old = self._round_s.get(at, outcome.round_s)
            self._round_s[at] = old + SMOOTHING * (outcome.round_s - old)
        steps: list[tuple[Live, Step]] = []
        for b in here:
            live = flight.lives[b]
            step, keep = live.read(b, emitted, int(finish[b]))
            if keep is not None:
                self.loop.cut(live, keep)
            if live.finish_reason:
                self.leave(live)
            if step.token_ids or live.finish_reason:
                steps.append((live, step))
        self.loop.read_s += time.perf_counter() - began
        return steps


def _outcome(flight: Flight, here: list[int], emitted: Any, seconds: float | None) -> Outcome:
    ran = int((emitted.n_rows > 0).any(1).sum())
    n_rows, source, counts = (x[:ran, here] for x in (emitted.n_rows, emitted.source, emitted.counts))
    keys = tuple(flight.lives[b].key for b in here)
    return Outcome(flight.rows, n_rows, source, counts, seconds / ran if seconds and ran else None, keys)
