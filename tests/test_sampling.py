"""Sampling against numpy, by chi-square, and row by row: a row alone has the bits it has among others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_jax.decode import sampling
from pallas_kernels.rows import by_row_group

V = 24
NAMES = "temperature top_k top_p min_p presence frequency repetition".split()
NEUTRAL = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, presence=0.0, frequency=0.0, repetition=1.0)


def row_values(rows: list[dict]) -> list[np.ndarray]:
    full = [NEUTRAL | row for row in rows]
    return [np.array([row[n] for row in full], np.int32 if n == "top_k" else np.float32) for n in NAMES]


def process(logits, rows=(), counts=None, seen=None, bias=None):
    logits = np.asarray(logits, np.float32)
    R = logits.shape[0]
    counts = np.zeros(logits.shape, np.int32) if counts is None else counts
    seen = np.zeros(logits.shape, bool) if seen is None else seen
    bias = np.zeros(logits.shape, np.float32) if bias is None else bias
    return np.asarray(jax.jit(sampling.process)(logits, counts, seen, bias, *row_values(list(rows) or [{}] * R)))


def reference(logits, counts, seen, bias, v):
    """One row in float64, by sorting."""
    x = logits.astype(np.float64) + bias
    used = seen | (counts > 0)
    x = np.where(used, np.where(x < 0, x * v["repetition"], x / v["repetition"]), x)
    x = x - v["frequency"] * counts - v["presence"] * (counts > 0)
    x = x / (v["temperature"] or 1.0)
    keep = np.ones(len(x), bool)
    if v["top_k"]:
        keep &= x >= np.sort(x)[::-1][min(v["top_k"], len(x)) - 1]
    if v["top_p"] < 1:
        order = np.argsort(-np.where(keep, x, -np.inf), kind="stable")
        p = np.where(keep, np.exp(x - x.max()), 0)[order]
        before = np.cumsum(p) - p
        nucleus = np.zeros(len(x), bool)
        nucleus[order[before < v["top_p"] * p.sum()]] = True
        keep &= nucleus
    if v["min_p"]:
        keep &= np.exp(x - x.max()) >= v["min_p"]
    return np.where(keep, x, -np.inf)


def some_rows(R, seed=0, size=V):
    rng = np.random.default_rng(seed)
    rows = [
        dict(
            temperature=rng.choice([0.0, 0.3, 1.0, 1.7]),
            top_k=int(rng.choice([0, 1, 5, size, size + 9])),
            top_p=rng.choice([1.0, 0.9, 0.5, 0.01]),
            min_p=rng.choice([0.0, 0.05, 0.5]),
            presence=rng.choice([0.0, 1.5, -1.0]),
            frequency=rng.choice([0.0, 0.7, -0.3]),
            repetition=rng.choice([1.0, 1.3, 0.8]),
        )
        for _ in range(R)
    ]
    logits = rng.normal(size=(R, size)).astype(np.float32) * 4
    counts = rng.poisson(0.4, (R, size)).astype(np.int32)
    seen = rng.random((R, size)) < 0.3
    bias = np.where(rng.random((R, size)) < 0.1, rng.normal(size=(R, size)) * 5, 0).astype(np.float32)
    return rows, logits, counts, seen, bias


# ---- process


@pytest.mark.parametrize("seed", range(8))
def test_process_equals_numpy(seed):
    rows, logits, counts, seen, bias = some_rows(16, seed)
    got = process(logits, rows, counts, seen, bias)
    for r, v in enumerate(rows):
        wanted = reference(logits[r], counts[r], seen[r], bias[r], NEUTRAL | v)
        np.testing.assert_array_equal(np.isfinite(got[r]), np.isfinite(wanted), err_msg=str(v))
        np.testing.assert_allclose(got[r], wanted, rtol=2e-6, atol=2e-6)


def test_neutral_values_change_no_bit():
    _, logits, counts, seen, _ = some_rows(8)
    for temperature in (0.0, 1.0):
        assert (process(logits, [dict(temperature=temperature)] * 8, counts, seen) == logits).all()
    # Nor does a neighbour that makes the filters run.
    assert (process(logits, [dict(top_k=2, top_p=0.3)] + [{}] * 7, counts, seen)[1:] == logits[1:]).all()


def test_repetition_divides_positive_and_multiplies_negative_logits_of_prompt_and_answer():
    seen, counts = np.zeros((1, 4), bool), np.zeros((1, 4), np.int32)
    seen[0, :2], counts[0, 2] = True, 3
    got = process([[2.0, -2.0, -1.0, 2.0]], [dict(repetition=2.0)], counts, seen)
    assert got.tolist() == [[1.0, -4.0, -2.0, 2.0]]  # once, however often a token occurred


def test_presence_and_frequency_see_generated_tokens_only():
    seen, counts = np.zeros((1, 3), bool), np.zeros((1, 3), np.int32)
    seen[0, 0], counts[0, 1] = True, 3
    got = process([[1.0, 1.0, 1.0]], [dict(presence=0.5, frequency=0.25)], counts, seen)
    assert got.tolist() == [[1.0, -0.25, 1.0]]


def test_bias_comes_before_penalties_and_temperature():
    seen, bias = np.ones((1, 1), bool), np.full((1, 1), 3.0, np.float32)
    assert process([[-1.0]], [dict(repetition=2.0, temperature=0.5)], None, seen, bias).tolist() == [[2.0]]


def test_ties():
    def kept(logits, **values):
        return np.flatnonzero(np.isfinite(process([logits], [values])[0])).tolist()

    equal = [1.0, 1.0, 1.0, 1.0]
    assert kept([0.0, 2.0, 1.0, 1.0], top_k=2) == [1, 2, 3]  # all that tie with the k-th
    assert kept(equal, top_k=1) == [0, 1, 2, 3]
    assert kept(equal, top_p=0.5) == [0, 1]  # as few as reach p, lowest ids first
    assert kept(equal, top_p=0.51) == [0, 1, 2]
    assert kept(equal, top_p=1e-6) == [0]
    assert kept([0.0, 1.0, 0.0, 0.0], top_k=2, top_p=0.75) == [0, 1, 2]
    assert kept([0.0, -0.0, -1.0], top_k=1) == [0, 1]  # one zero
    assert kept(equal, min_p=1.0) == [0, 1, 2, 3]


def test_top_p_is_taken_after_top_k():
    # Of the two that top-k leaves, the first holds 0.6: enough for p = 0.6, though it is a third of the whole.
    probabilities = np.array([0.3, 0.2, 0.17, 0.17, 0.16])
    got = process([np.log(probabilities)], [dict(top_k=2, top_p=0.59)])
    assert np.isfinite(got[0]).tolist() == [True, False, False, False, False]


@given(
    st.lists(st.floats(-1e4, 1e4, width=32) | st.just(-np.inf), min_size=V, max_size=V),
    st.integers(0, 30),
    st.sampled_from([1e-6, 0.3, 0.999999, 1.0]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([0.0, 1e-5, 1.0, 100.0]),
)
def test_the_likeliest_always_stays(logits, top_k, top_p, min_p, temperature):
    logits[3] = max(*logits, -1e4)
    got = process([logits], [dict(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)])[0]
    first = int(np.argmax(np.float32(logits)))
    assert np.isfinite(got[first]) and got[first] == got.max() and not np.isnan(got).any()


def test_the_tail_stays_at_p_one():
    logits = np.concatenate([[0.0], np.full(4096, -30.0)])[None]
    assert np.isfinite(process(logits, [dict(top_k=5000)])).all()


# ---- draws


def draws(logits, n, seed=7, **values):
    processed = process(np.broadcast_to(np.float32(logits), (1, len(logits))), [values])
    rows = np.broadcast_to(processed, (n, len(logits)))
    return np.asarray(
        jax.jit(sampling.draw)(rows, np.full(n, seed, np.uint32), np.arange(n, dtype=np.int32), np.zeros(n, bool))
    )


def chi_square_bound(freedom):
    """The statistic that chance passes once in a million (Wilson and Hilferty)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 4.75 * spread**0.5) ** 3


def softmax(x):
    p = np.exp(np.float64(x) - np.max(x))
    return p / p.sum()


@pytest.mark.parametrize(
    "values", [{}, dict(temperature=0.5), dict(top_k=4), dict(top_p=0.8), dict(min_p=0.2)], ids=str
)
@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_draws_follow_softmax(values, seed):
    logits = np.array([1.0, 0.5, 2.0, -1.0, 0.0, 1.5, -2.0, 0.7], np.float32)
    processed = process(logits[None], [values])[0]
    n, p = 20_000, softmax(processed)
    seen = np.bincount(draws(logits, n, seed, **values), minlength=len(p))
    assert (seen[p == 0] == 0).all()
    expected = n * p[p > 0]
    statistic = ((seen[p > 0] - expected) ** 2 / expected).sum()
    assert statistic < chi_square_bound(len(expected) - 1)


def test_neighbouring_positions_and_seeds_are_independent():
    n, p = 20_000, 4
    for one, other in (
        (lambda d: d[:-1], lambda d: d[1:]),
        (lambda d: d, lambda d: draws(np.zeros(p), n, seed=8)),
    ):
        d = draws(np.zeros(p), n)
        pairs = np.bincount(one(d) * p + other(d), minlength=p * p)
        expected = pairs.sum() / p**2
        assert ((pairs - expected) ** 2 / expected).sum() < chi_square_bound(p * p - 1)


def test_greedy_rows_take_the_lowest_of_equal_maxima():
    x = jnp.zeros((2, 8)).at[:, jnp.array([3, 5])].set(1.0)
    tokens = sampling.draw(x, jnp.zeros(2, jnp.uint32), jnp.zeros(2, jnp.int32), jnp.ones(2, bool))
    assert tokens.tolist() == [3, 3]


# ---- a row's bits


@pytest.mark.parametrize("size", [V, 1000])
@pytest.mark.parametrize("group", [4, 8])
def test_a_row_alone_equals_rows_together(group, size):
    R = 11
    rows, logits, counts, seen, bias = some_rows(R, 3, size)
    seed, position = np.arange(R).astype(np.uint32), np.arange(R, dtype=np.int32) * 5
    greedy = np.arange(R) % 3 == 0

    def everything(logits, counts, seen, bias, seed, position, greedy, *values):
        processed = sampling.process(logits, counts, seen, bias, *values)
        tokens = sampling.draw(processed, seed, position, greedy)
        return processed, tokens, sampling.log_probabilities(logits, tokens, 5)

    f = jax.jit(functools.partial(by_row_group, everything, group))  # takes the number of rows first
    arrays = (logits, counts, seen, bias, seed, position, greedy, *row_values(rows))
    together = f(jnp.int32(R), *arrays)
    for r in range(R):
        alone = f(jnp.int32(1), *(x[r : r + 1] for x in arrays))
        for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
            assert (np.asarray(a)[0] == np.asarray(b)[r]).all()


def test_log_probabilities_are_those_of_the_raw_distribution():
    logits = np.random.default_rng(0).normal(size=(5, V)).astype(np.float32) * 3
    logits[0, 4] = logits[0, 9] = 20.0
    tokens = np.arange(5, dtype=np.int32)
    chosen, values, ids = (
        np.asarray(x) for x in sampling.log_probabilities(jnp.asarray(logits), jnp.asarray(tokens), 3)
    )
    wanted = np.log(np.stack([softmax(x) for x in logits]))
    np.testing.assert_allclose(chosen, wanted[np.arange(5), tokens], atol=2e-6, rtol=1e-6)
    np.testing.assert_allclose(values, -np.sort(-wanted)[:, :3], atol=2e-6, rtol=1e-6)
    assert ids[0, :2].tolist() == [4, 9]
    assert [x.shape for x in sampling.log_probabilities(jnp.asarray(logits), jnp.asarray(tokens), 0)] == [
        (5,),
        (5, 0),
        (5, 0),
    ]
