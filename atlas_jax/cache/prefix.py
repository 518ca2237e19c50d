"""The prefix cache: what a sequence finds of earlier ones when it is admitted, what it leaves for later ones.

Only what prefill wrote is published: whole pages that chunks ending on the absolute grid have filled, and snapshots at the ends of
such chunks. A later sequence restores a snapshot and goes on with the same chunks, in the same executables, as if it had come
that far by itself; so it ends with the same bits. What decoding wrote (other bits) is never published: the next turn's
prefill computes it again, into pages of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np

from atlas_jax.cache.budget import Budget, budget
from atlas_jax.cache.pages import PagePool
from atlas_jax.cache.snapshots import SnapshotStore
from atlas_jax.cache.stats import CacheStats, Reuse
from atlas_jax.cache.tree import Node, PageTree
from atlas_jax.config import ModelConfig, RunConfig
from atlas_jax.decode.executables import Executables
from atlas_jax.errors import StateError
from atlas_jax.state import TargetState
from atlas_jax.state.pool import finite_pages


class Lease:
    """A conversation's claim: its newest snapshot is the last to go when room is made. See `PrefixCache.end`."""

    def __init__(self) -> None:
        self.node: Node | None = None


@dataclasses.dataclass(eq=False)
class Sequence:
    """An admitted sequence.

    Attributes:
        tokens: what prefill reads: the prompt but for its last token.
        pages: of its positions in order, as many as it may need; it holds each of them once.
        reuse: what was found. The first `reuse.restored` tokens are `base`'s snapshot.
        saves: chunk ends at which snapshots are to be taken.
        node: the deepest node that the sequence has restored or published.
        anchor: the deepest of its nodes with a snapshot.
    """

    tokens: np.ndarray
    pages: list[int]
    reuse: Reuse
    base: Node | None
    saves: frozenset[int]
    node: Node
    anchor: Node | None
    lease: Lease | None
    open: bool = True


class PrefixCache:
    """Says who has which pages of a `TargetState`, and owns the snapshots. Without `run.prefix_cache` it only hands out pages."""

    def __init__(self, config: ModelConfig, run: RunConfig, executables: Executables) -> None:
        self.config, self.run, self.executables = config, run, executables
        self.budget: Budget = budget(config, run)
        self.reset(figures=True)

    def reset(self, figures: bool = False) -> None:
        """Forgets everything, as must happen when the state that the pages lie in is gone; and what was counted, if `figures`. No
        sequence may be open."""
        run, sizes = self.run, self.budget
        before = None if figures else self.snapshots
        if figures:
            self._requests = self._hits = self._pages_evicted = 0
            self._reuse = Reuse()
        self.pages = PagePool(run.live_pages + sizes.spare_pages)
        self.snapshots = SnapshotStore(
            self.config, run, self.executables, sizes.snapshots, sizes.host_snapshots, run.page_size
        )
        if before is not None:
            for name in ("saved", "evicted", "poisoned"):
                setattr(self.snapshots, name, getattr(before, name))
        self.tree = PageTree(self.pages, run.page_size, self.snapshots.drop)

    def stats(self) -> CacheStats:
        return CacheStats(
            requests=self._requests,
            hits=self._hits,
            reuse=self._reuse,
            pages=self.pages.total,
            pages_cached=len(self.tree),
            pages_free=self.pages.free,
            pages_evicted=self._pages_evicted,
            snapshots=self.snapshots.rows,
            snapshots_used=self.snapshots.on_device,
            host_snapshots=self.snapshots.host_rows,
            host_snapshots_used=self.snapshots.on_host,
            saved=self.snapshots.saved,
            evicted=self.snapshots.evicted,
            poisoned=self.snapshots.poisoned,
        )

    # ---- one sequence ----------------------------------------------------------------------------------------------

    def admit(self, prompt: np.ndarray, history: int, most_tokens: int, lease: Lease | None = None) -> Sequence:
        """Finds what is known of a prompt, and gives the sequence pages for up to `most_tokens` tokens.

        A hit is the minimum over its parts: the deepest node of the prompt's whole pages that has a sound snapshot. `history`
        says how many tokens of the prompt a later one will share; the last snapshot is taken before it.
        """
        tokens = prompt[:-1].astype(np.int32)
        found = self.tree.match(tokens) if self.run.prefix_cache else []
        poisoned = self.snapshots.poisoned
        base = next((node for node in reversed(found) if self.snapshots.usable(node)), None)
        depth = base.depth if base else 0
        if self.snapshots.poisoned > poisoned:  # what lies between a sound snapshot and a bad one may be bad as well
            self.tree.remove(found[depth])
            found = found[:depth]
        shared = [node.page for node in found[:depth]]
        reuse = Reuse(prompt.size, len(found) * self.run.page_size, depth * self.run.page_size)
        self.pages.hold(shared)
        if base:
            base.users += 1
            self.tree.use(base)
        try:
            pages = shared + self.allocate(most_tokens, depth)
        except StateError:
            self.pages.release(shared)
            if base:
                base.users -= 1
            raise
        self._requests, self._hits, self._reuse = self._requests + 1, self._hits + bool(base), self._reuse + reuse
        saves = frozenset(self._saves(reuse.restored, tokens.size, history))
        return Sequence(tokens, pages, reuse, base, saves, base or self.tree.root, base, lease)

    def known(self, prompt: np.ndarray) -> int:
        """How many tokens of a prompt `admit` would restore, if their snapshot is sound."""
        found = self.tree.match(prompt[:-1].astype(np.int32)) if self.run.prefix_cache else []
        return self.run.page_size * next((node.depth for node in reversed(found) if node in self.snapshots), 0)

    def first_rows(self, prompt: np.ndarray) -> int:
        """Tokens of the first chunk that would be left to compute."""
        start, total = self.known(prompt), prompt.size - 1
        return min(self._next(start), total) - start

    def will_save(self, sequence: Sequence, prompt: np.ndarray) -> bool:
        """Whether a sequence is to leave a snapshot further on in what a prompt has in common with it than what is known."""
        known = self.known(prompt)
        alike = lambda end: np.array_equal(sequence.tokens[:end], prompt[:end])  # noqa: E731
        return any(known < end < prompt.size and alike(end) for end in sequence.saves)

    def scratch(self, tokens: np.ndarray) -> Sequence:
        """A sequence that prefills all of `tokens`, finds nothing and leaves nothing."""
        pages = self.allocate(tokens.size)
        return Sequence(tokens, pages, Reuse(), None, frozenset(), self.tree.root, None, None)

    def allocate(self, most_tokens: int, have: int = 0) -> list[int]:
        """Pages for a sequence of up to `most_tokens` tokens that has its first `have` pages, held for the caller. If need be the
        tree gives up all of its own; there are then enough for as many sequences as there are slots, unless `kv_pages` says
        otherwise.

        Raises:
            StateError: too few are left.
        """
        # drafter rows may lie as far as the longest draft beyond the last token
        most = min(most_tokens + self.run.max_drafts, self.run.max_length)
        need = -(-most // self.run.page_size) - have
        self._pages_evicted += self.tree.free(need)
        return self.pages.allocate(need)

    def chunks(self, sequence: Sequence) -> Iterator[tuple[int, int]]:
        """Where the chunks that are left to prefill begin and end: on the absolute grid, but for the end of the last."""
        start, total = sequence.reuse.restored, sequence.tokens.size
        while start < total:
            end = min(self._next(start), total)
            yield start, end
            start = end

    def publish(self, sequence: Sequence, end: int, state: TargetState, slot: int) -> None:
        """Takes note that the chunk up to `end` was prefilled in `slot`: its whole pages and perhaps a snapshot can be shared."""
        if not self.run.prefix_cache or not self._on_grid(end):
            return
        node = sequence.node = self.tree.insert(sequence.node, sequence.tokens[:end], sequence.pages)
        if end not in sequence.saves:
            return
        old = sequence.anchor
        if old:
            old.users -= 1  # the new snapshot may take its place
        if node in self.snapshots or self.snapshots.save(state, slot, node):
            sequence.anchor = node
        if sequence.anchor:
            sequence.anchor.users += 1

    def close(self, sequence: Sequence, failed_in: tuple[TargetState, int] | None = None) -> None:
        """Ends a sequence: its pages are its no more. `failed_in` are state and slot of one whose numbers were not finite: pages
        of the tree that it stood on and that hold such numbers are thrown away, with all that was built on them."""
        if not sequence.open:
            return
        sequence.open = False
        if sequence.anchor:
            sequence.anchor.users -= 1
        if failed_in:
            state, slot = failed_in
            args = (state, np.int32(slot))
            finite = jax.device_get(self.executables.get(("check pages",), finite_pages, args, ())(*args))
            bad = next((n for n in self.tree.match(sequence.tokens) if not finite[n.depth - 1]), None)
            if bad:
                self.tree.remove(bad)
        elif sequence.lease:
            self.renew(sequence.lease, sequence.anchor)
        self.pages.release(sequence.pages)

    def renew(self, lease: Lease, node: Node | None) -> None:
        """Lets a conversation's claim be on `node`, and no more on the one before."""
        if lease.node:
            lease.node.leases -= 1
        lease.node = node
        if node:
            node.leases += 1

    def end(self, lease: Lease) -> None:
        """Gives up a conversation's claim."""
        self.renew(lease, None)

    # ---- pieces ----------------------------------------------------------------------------------------------------

    def _next(self, start: int) -> int:
        """The first point of the grid past `start`: a multiple of the chunk, or of the interval between snapshots."""
        return min((start // step + 1) * step for step in (self.run.prefill_chunk, self.budget.interval))

    def _on_grid(self, end: int) -> bool:
        return end % self.run.prefill_chunk == 0 or end % self.budget.interval == 0

    def _saves(self, start: int, total: int, history: int) -> Iterator[int]:
        """Grid points in (start, total] for snapshots: every interval, and the last that a prompt with this history will pass.
        They end pages too."""
        last, end = 0, self._next(start)
        while end <= total:
            if end % self.run.page_size == 0:
                regular = end % self.budget.interval == 0
                if regular:
                    yield end
                if end <= history:
                    last = 0 if regular else end
            end = self._next(end)
        if last:
            yield last
