"""Sampling values and token history of slots: each row of a verify sees the tokens before it, once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax.decode import sampling
from atlas_jax.decode.request import SamplingParams
from atlas_jax.state.record import Record, record

V = 24


def empty(slots: int) -> Record:
    return record(slots, sampling.sampler_fields(V), **sampling.NEUTRAL)


def filled(params: SamplingParams, prompt=(1, 2), slot=1, slots=3):
    state = empty(slots + 1)
    return state.put(jnp.int32(slot), **sampling.slot_values(params, prompt, V))


def test_row_counts_see_the_drafts_before_a_row_once():
    counts = jnp.asarray(np.random.default_rng(0).poisson(0.5, (2, V)).astype(np.int32))
    tokens = np.array([[5, 7, 7, 3], [0, 0, 23, 0]], np.int32)
    got = np.asarray(sampling.row_counts(counts, jnp.asarray(tokens)))
    for b in range(2):
        for t in range(4):
            wanted = np.asarray(counts[b]) + np.bincount(tokens[b, 1 : t + 1], minlength=V)
            assert (got[b, t] == wanted).all()


def test_count_tokens_adds_the_first_n():
    state = filled(SamplingParams())
    tokens = jnp.array([[4, 4, 9], [1, 2, 3], [8, 8, 8]], jnp.int32)
    state = sampling.count_tokens(state, jnp.array([1, 3, 0]), tokens, jnp.array([3, 1, 0]))
    wanted = np.zeros((4, V), int)
    wanted[1, 4], wanted[1, 9], wanted[3, 1] = 2, 1, 1
    assert (np.asarray(state["counts"]) == wanted).all()


def test_a_new_request_finds_a_slot_without_history(count_traces):
    def put(state, slot, **values):
        return state.put(slot, **values)

    step = jax.jit(put, donate_argnums=0)
    state = empty(3)
    with count_traces() as traces:
        for params, prompt in (
            (SamplingParams(temperature=0.7, seed=5, top_k=100, logit_bias={3: 2.0}), [1, 1, 2]),
            (SamplingParams(temperature=1e-6), [9]),
        ):
            state = step(state, jnp.int32(2), **sampling.slot_values(params, prompt, V))
            if params.seed:
                assert (state["temperature"][2], state["seed"][2], state["top_k"][2]) == (np.float32(0.7), 5, V)
                assert not state["plain"][2] and state["bias"][2, 3] == 2.0
            state = sampling.count_tokens(state, jnp.array([2]), jnp.array([[6]]), jnp.array([1]))
    assert traces["put"] == 1
    assert state["plain"].all() and (state["temperature"] == 0).all() and not state["bias"].any()
    assert np.flatnonzero(state["seen"][2]).tolist() == [9] and state["counts"][2].sum() == 1


PENALISED = [
    SamplingParams(presence_penalty=1.5),
    SamplingParams(frequency_penalty=0.7, repetition_penalty=1.3),
    SamplingParams(temperature=0.9, seed=3, presence_penalty=1.0, top_p=0.9, logit_bias={4: 3.0}),
    SamplingParams(temperature=1.2, seed=2**32 - 1, top_k=7),
    SamplingParams(),
]


@pytest.mark.parametrize("params", PENALISED, ids=range(len(PENALISED)))
@pytest.mark.parametrize("accurate", [0.0, 0.5, 1.0])
def test_speculating_emits_what_plain_decoding_emits(params, accurate):
    """A toy target whose logits are a table over the last token, and drafts of any quality."""
    table = jnp.asarray(np.random.default_rng(1).normal(size=(V, V)).astype(np.float32) * 2)
    pick = jax.jit(sampling.pick, static_argnums=6)
    count = jax.jit(sampling.count_tokens)
    rng = np.random.default_rng(2)

    def run(K, answer=None):
        state, out = filled(params), [2]  # the prompt's last token is read first
        while len(out) < 60:
            drafts = [
                answer[len(out) + i] if answer and rng.random() < accurate else rng.integers(V) for i in range(K - 1)
            ]
            tokens = jnp.asarray([[out[-1], *drafts]], jnp.int32)
            slots, at = jnp.array([1]), jnp.array([len(out)], jnp.int32)
            picks = np.asarray(pick(state, slots, table[tokens], tokens, at, jnp.array([K]), 4))[0]
            n = 1
            while n < K and picks[n - 1] == drafts[n - 1]:
                n += 1
            state = count(state, slots, jnp.asarray(picks[None]), jnp.array([n]))
            out += picks[:n].tolist()
        return out

    plain = run(1)
    for K in (2, 5):
        assert run(K, plain + [0] * K)[:60] == plain[:60]


def test_picks_do_not_depend_on_neighbours():
    state = empty(4)
    for slot, params in enumerate((PENALISED[2], PENALISED[4], PENALISED[3]), start=1):
        state = state.put(jnp.int32(slot), **sampling.slot_values(params, [1], V))
    logits = jax.random.normal(jax.random.key(0), (3, 3, V)) * 2
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, V, (3, 3)), jnp.int32)
    slots, at = jnp.array([1, 2, 3]), jnp.array([10, 200, 7])
    n_rows = jnp.array([3, 3, 3])
    pick = jax.jit(sampling.pick, static_argnums=6)
    together = pick(state, slots, logits, tokens, at, n_rows, 4)
    for b in range(3):
        alone = [x[b : b + 1] for x in (slots, logits, tokens, at, n_rows)]
        assert (pick(state, *alone, 4) == together[b]).all()
    assert (together[1] == jnp.argmax(logits[1], -1)).all()
