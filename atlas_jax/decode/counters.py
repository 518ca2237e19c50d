"""Acceptance counters on the device: integers that every round adds to and only a finished request is read from."""

from __future__ import annotations

import jax.numpy as jnp

from atlas_jax.metrics import CONTEXT_BOUNDS, Event, Source
from atlas_jax.shapes import Array, Bool, Int

Counters = Int[Array, "B contexts sources events places"]  # see `metrics.Acceptance` for what each axis means


def counters_shape(max_rows: int) -> tuple[int, int, int, int]:
    """Of one sequence. A verify of max_rows rows emits up to max_rows tokens: the last place."""
    return len(CONTEXT_BOUNDS) + 1, len(Source), len(Event), max_rows + 1


def count(
    counters: Counters,
    length: Int[Array, " B"],
    n_rows: Int[Array, " B"],
    source: Int[Array, "B drafts"],
    matches: Bool[Array, "B drafts"],
    accepted: Int[Array, " B"],
    emitted: Int[Array, " B"],
) -> Counters:
    """Adds one round of verifies of n_rows rows (0: none ran) at `length` committed tokens; `source` holds members of `Source`,
    `matches`, `accepted` and `emitted` are the accept rule's verdict. Every offered draft is scored, also behind a wrong one.
    """
    places = counters.shape[-1]
    position = jnp.arange(matches.shape[1])
    offered = position < n_rows[:, None] - 1
    right_so_far = jnp.cumprod(matches, axis=1).astype(bool)
    follows = jnp.concatenate([jnp.ones_like(right_so_far[:, :1]), right_so_far[:, :-1]], axis=1)
    by_event = {
        Event.OFFERED: offered,
        Event.MATCHED: offered & matches,
        Event.REACHED: offered & follows & (position < emitted[:, None]),  # what a stop cut off was never reached
        Event.ACCEPTED: offered & (position < accepted[:, None]),
    }
    drafts = jnp.stack([by_event[event] for event in list(Event)[:-1]], axis=1)
    drafts = jnp.pad(drafts, ((0, 0), (0, 0), (0, places - position.size)))
    sources = jnp.arange(len(Source))
    of_draft = jnp.pad(source, ((0, 0), (0, places - position.size)))[:, None] == sources[:, None]
    first = jnp.where(n_rows > 1, source[:, 0], Source.PLAIN) if position.size else jnp.full_like(n_rows, Source.PLAIN)
    rounds = (first[:, None] == sources)[..., None] & (emitted[:, None, None] == jnp.arange(places))
    rounds &= (n_rows > 0)[:, None, None]
    new = jnp.concatenate([of_draft[:, :, None] & drafts[:, None], rounds[:, :, None]], axis=2)
    context = (length[:, None] >= jnp.array(CONTEXT_BOUNDS)).sum(1)
    here = jnp.arange(counters.shape[1]) == context[:, None]
    return counters + (here[:, :, None, None, None] & new[:, None]).astype(jnp.int32)
