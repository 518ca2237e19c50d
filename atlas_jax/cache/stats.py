"""What the prefix cache saved, for one request and in all."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Reuse:
    """One prompt, in tokens, or several added up.

    Attributes:
        prompt: its length.
        matched: tokens from its beginning whose pages the tree held.
        restored: of those, how many came before the snapshot that was restored, and were not computed again.
    """

    prompt: int = 0
    matched: int = 0
    restored: int = 0

    @property
    def replayed(self) -> int:
        """Tokens that were computed: new ones, and those from the snapshot to the end of what matched."""
        return self.prompt - self.restored

    @property
    def granularity_share(self) -> float:
        """Of the computed tokens, the share that snapshots at every token would have saved."""
        return (self.matched - self.restored) / self.replayed if self.replayed else 0.0

    def __add__(self, other: Reuse) -> Reuse:
        return Reuse(self.prompt + other.prompt, self.matched + other.matched, self.restored + other.restored)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self) | dict(replayed=self.replayed, granularity_share=self.granularity_share)


@dataclasses.dataclass(frozen=True)
class CacheStats:
    """The prefix cache since it was made.

    Attributes:
        requests, hits: prompts, and those of them that a snapshot was restored for.
        reuse: their tokens added up.
        pages, pages_cached, pages_free: of the pool; cached are those in the tree, of running sequences too.
        snapshots, snapshots_used: rows on the device; `host_` likewise on the host.
        saved, evicted, poisoned: snapshots taken, thrown away to make room, and dropped because a check failed.
        pages_evicted: pages thrown out of the tree to make room.
    """

    requests: int
    hits: int
    reuse: Reuse
    pages: int
    pages_cached: int
    pages_free: int
    pages_evicted: int
    snapshots: int
    snapshots_used: int
    host_snapshots: int
    host_snapshots_used: int
    saved: int
    evicted: int
    poisoned: int

    @property
    def hit_share(self) -> float:
        """Of all prompt tokens, the share that was restored."""
        return self.reuse.restored / self.reuse.prompt if self.reuse.prompt else 0.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self) | dict(reuse=self.reuse.to_dict(), hit_share=self.hit_share)
