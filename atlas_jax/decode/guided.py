"""Sequences whose tokens the host restricts, by a grammar: rounds of two dispatches with the masks made in between."""

from __future__ import annotations

import time

import jax
import numpy as np

from atlas_jax.decode.group import Flight, Group
from atlas_jax.decode.live import Live, Step


class GuidedGroup(Group):
    """A group all of whose sequences have a guide. Of the drafts, those that the guide allows are verified, each row with the
    tokens allowed after the drafts before it: what is picked is what would be picked without drafts.

    A mask depends on all tokens before it, so a round begins when the one before has been read.
    """

    def prepare(self, bucket: int, n_top: int | None) -> None:
        for rows in self.policy(bucket).rows:
            self.loop.guided(self.drafter, rows, n_top, bucket)

    def step(
        self, n_top: int | None, dispatch_s: float | int | None = None, most: int | None = None
    ) -> list[tuple[Live, Step]]:
        """One round. Sequences that ended have left the group then."""
        lives, bucket = [*self.lives], self.bucket(len(self.lives))
        policy = self.policy(bucket)
        K, _ = policy.choose()
        began, slots = time.perf_counter(), self._on_device(lives, bucket)
        draft, verify = self.loop.guided(self.drafter, K, n_top, bucket)
        rows = jax.device_get(self.loop.dispatch(self.drafter, draft, slots)[0])
        n_rows = np.array(rows.n_rows)
        masks = np.zeros((bucket, K, -(-self.loop.config.vocab_size // 32)), np.int32)
        for b, live in enumerate(lives):
            if live.guide and n_rows[b]:
                n_rows[b] = live.guide.masks(rows.tokens[b, 1:].tolist(), int(n_rows[b]), masks[b])
        rows = rows._replace(n_rows=n_rows)
        emitted, finish = jax.device_get(self.loop.dispatch(self.drafter, verify, slots, rows, masks))
        self.loop.last = None
        flight = Flight(lives, policy, K, began, None, None)
        steps = self._take(flight, emitted, finish, time.perf_counter() - began)
        for live, step in steps:
            if live.guide and not live.finish_reason:
                live.guide.take(step.token_ids)
        return steps
