"""Lookup on the device against an exhaustive search in Python, over every length of many small sequences."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from atlas_jax.decode.lookup import MAX_MATCH, continuation, find

COLUMNS, DRAFTS = 40, 16


@functools.cache
def looked_up():
    def run(tokens, length):
        found = find(tokens, length)
        return *found, continuation(tokens, length, found.place, DRAFTS)

    return jax.jit(run)


def expected(known: list[int]) -> tuple[int, int | None, list[int] | None]:
    """The best match of a sequence's tail, its end, and what follows, by trying every place and every length."""
    last = len(known) - 1
    best, place = 0, None
    for end in range(last):
        n = 0
        while n < min(MAX_MATCH, end + 1) and known[end - n] == known[last - n]:
            n += 1
        if n and n >= best:
            best, place = n, end
    if place is None:
        return 0, None, None
    draft: list[int] = []
    while len(draft) < DRAFTS:
        draft.append([*known, *draft][place + 1 + len(draft)])
    return best, place, draft


@given(st.integers(1, 4), st.integers(0, 2**32 - 1), st.integers(0, 12))
def test_lookup_equals_an_exhaustive_search(letters, seed, copied):
    """Four sequences a call, of every length, with a copied stretch; what lies past the length is garbage."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, letters, (4, COLUMNS))
    tokens[:, 20 : 20 + copied] = tokens[:, 3 : 3 + copied]
    length = rng.permutation(COLUMNS - 1)[:4]
    match, place, draft = map(np.asarray, looked_up()(jnp.asarray(tokens, jnp.int32), jnp.asarray(length, jnp.int32)))
    for b in range(4):
        want = expected(tokens[b, : length[b] + 1].tolist())
        assert match[b] == want[0]
        if want[0]:
            assert (place[b], draft[b].tolist()) == want[1:]


def test_every_length_of_one_sequence():
    tokens = np.random.default_rng(3).integers(0, 2, COLUMNS)
    for length in range(COLUMNS - 1):
        garbage = np.where(np.arange(COLUMNS) <= length, tokens, tokens[length])
        rows = jnp.asarray([tokens, garbage, tokens, garbage], jnp.int32)
        match, place, draft = map(np.asarray, looked_up()(rows, jnp.full(4, length, jnp.int32)))
        want = expected(tokens[: length + 1].tolist())
        assert set(match.tolist()) == {want[0]}
        if want[0]:
            assert set(place.tolist()) == {want[1]} and all(row.tolist() == want[2] for row in draft)


def test_no_sequence_finds_anothers_tokens():
    rows = jnp.asarray([[1, 2, 3, 4, 1, 2, 0, 0], [5, 6, 7, 8, 1, 2, 9, 9]], jnp.int32)
    rows = jnp.pad(rows, ((0, 2), (0, COLUMNS - 8)))
    match, _, draft = looked_up()(rows, jnp.asarray([5, 5, 0, 0], jnp.int32))
    assert match.tolist() == [2, 0, 0, 0] and draft[0, :4].tolist() == [3, 4, 1, 2]
