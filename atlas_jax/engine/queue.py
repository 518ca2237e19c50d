"""Who is next: jobs that wait for a slot, and prompts that wait for their next chunk."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from atlas_jax.completion import Answer
from atlas_jax.decode.live import Guide, Live
from atlas_jax.engine.api import GenerationRequest
from atlas_jax.engine.ticket import Ticket


@dataclasses.dataclass(eq=False)
class Job:
    """A request on its way through the engine. Times are `time.perf_counter`'s."""

    request: GenerationRequest
    ticket: Ticket
    answer: Answer
    submitted: float
    admitted: float | None = None
    live: Live | None = None
    group: Any = None
    guide: Guide | None = None  # of its grammar

    @property
    def deadline(self) -> float | None:
        seconds = self.request.deadline_s
        return None if seconds is None else self.submitted + seconds

    def until(self, now: float) -> float:
        """Seconds it has waited for a slot."""
        return (now if self.admitted is None else self.admitted) - self.submitted


class WaitingQueue:
    """Jobs without a slot. The next is the one with the highest priority, to which waiting adds; the oldest among equals.

    Not safe for threads by itself.
    """

    def __init__(self, most: int, ageing_s: float | int) -> None:
        self.most, self.ageing_s = most, ageing_s
        self._jobs: dict[Job, None] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter([*self._jobs])

    def __contains__(self, job: Job) -> bool:
        return job in self._jobs

    @property
    def full(self) -> bool:
        return len(self._jobs) >= self.most

    def add(self, job: Job) -> None:
        self._jobs[job] = None

    def remove(self, job: Job) -> None:
        self._jobs.pop(job, None)

    def ranked(self, now: float) -> list[Job]:
        """All, the next one first."""
        rank = lambda job: job.request.priority + (now - job.submitted) / self.ageing_s  # noqa: E731
        return sorted(self._jobs, key=lambda job: (-rank(job), job.submitted))


def next_prompt(prompts: Iterable[Job], turn: int) -> Job:
    """Whose chunk is computed next: by turns the prompt with the least left, so that a short one need not wait for a long one,
    and the one that was admitted first, so that a long one is not put off for ever."""
    lives = {job: job.live for job in prompts}
    if turn % 2:
        return next(iter(lives))
    return min(lives, key=lambda job: live.left if (live := lives[job]) else 0)
