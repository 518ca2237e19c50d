"""Law 1 and law 2 at the level of state: K rows at once, in any batch, equal K single rows bit for bit, and what was
rejected leaves no trace. Everything here is compared with ==."""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, seed
from hypothesis import strategies as st
from models import CONFIGS, RUN, Steps, assert_same, steps
from safetensors.numpy import load_file

from atlas_jax.errors import StateError
from atlas_jax.state.target import commit_guard, verify_guard
from atlas_jax.weights.hf_config import model_config, recipe_in
from atlas_jax.weights.load import load_params
from pallas_kernels.linear import linear

FAMILIES = [(family, dtype) for family in CONFIGS for dtype in ("float32", "bfloat16")]


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


TOKENS = np.random.default_rng(0).integers(0, 96, 120)


def without_drafter(snapshot):
    """A snapshot's leaves but for the drafter's layer, which these tests do not feed."""
    return dataclasses.replace(snapshot, kv=jax.tree.map(lambda x: x[:-1], snapshot.kv))


@pytest.mark.parametrize(
    ("family", "dtype", "counts"),
    [
        ("dense", "float32", (2, 5, 9)),
        ("moe", "float32", (5,)),
        long("dense", "bfloat16", (2, 5, 9)),
        *(long(*case, (2, 5, 9)) for case in FAMILIES if case[0] != "dense"),
    ],
)
def test_rows_together_equal_rows_alone(family, dtype, counts):
    s = steps(family, dtype)
    logits, state = s.feed(s.init(), 1, TOKENS[:41])
    expected = s.snapshot(state, jnp.int32(1))
    for K in counts:
        got, state = s.feed(s.init(), 2, TOKENS[:41], K)
        np.testing.assert_array_equal(got, logits)
        assert_same(without_drafter(s.snapshot(state, jnp.int32(2))), without_drafter(expected))


MORE = [pytest.param(K, marks=pytest.mark.long) for K in (5, 6, 7)]


@pytest.mark.parametrize("K", [1, 2, 3, 4, 8, 9, 17, *MORE])
def test_every_row_count(K):
    s = steps("dense")
    logits, state = s.feed(s.init(), 1, TOKENS[:50])
    got, other = s.feed(s.init(), 3, TOKENS[:50], K)
    np.testing.assert_array_equal(got, logits)
    assert_same(s.snapshot(other, jnp.int32(3)), s.snapshot(state, jnp.int32(1)))


QUANTISED = [
    pytest.param(family, weights, marks=pytest.mark.long)
    for family, weights in (
        ("dense", "int4"),
        ("moe", "int4"),
        ("dense", "nvfp4"),
        ("moe", "fp8"),
        ("dense", "int4-g32"),
    )
]


@pytest.mark.parametrize("row_group", [16, 64])
@pytest.mark.parametrize(("family", "weights"), QUANTISED)
def test_quantised_rows_together_equal_rows_alone(family, weights, row_group):
    """Kernels leave out the rows that pad a bucket, and take as many instructions as there can be rows."""
    s = steps(family, "bfloat16", weights, row_group=row_group)
    logits, state = s.feed(s.init(), 1, TOKENS[:51])
    expected = s.snapshot(state, jnp.int32(1))
    for K in (2, 4, 8, 9, 16):
        got, state = s.feed(s.init(), 2, TOKENS[:51], K)
        np.testing.assert_array_equal(got, logits)
        assert_same(without_drafter(s.snapshot(state, jnp.int32(2))), without_drafter(expected))
    rows = np.stack([TOKENS[:4]] * 4)
    got, _, _ = s.verify(s.init(), [1, 2, 3, 4], rows, [4, 0, 2, 3])
    for b, n in enumerate((4, 0, 2, 3)):
        np.testing.assert_array_equal(np.asarray(got)[b, :n], logits[:n])
    got, _, _ = s.verify(s.init(), [1, 2, 3, 4], np.stack([TOKENS[:16]] * 4), [16, 9, 16, 1])  # 64 rows
    for b, n in enumerate((16, 9, 16, 1)):
        np.testing.assert_array_equal(np.asarray(got)[b, :n], logits[:n])


REFERENCES = [pytest.param(x, marks=pytest.mark.long) for x in ("parity_small", "qwen3_5", "qwen3_5_moe", "qwen3_next")]


@pytest.mark.parametrize("name", REFERENCES)
def test_reference_models_in_bfloat16(name, request):
    """Checkpoints as they are published, every number of rows up to 17, eight sequences at once."""
    small = pathlib.Path(__file__).parent / "data" / name
    directory = small if small.is_dir() else request.getfixturevalue("shared") / "data" / "parity" / name
    config, run = model_config(directory), dataclasses.replace(RUN, dtype="bfloat16", slots=8)
    params = load_params(directory, config, dtype=run.dtype, layout=run.layout, recipe=recipe_in(directory))
    s = Steps(config, run, params)
    tokens = load_file(directory / "expected.safetensors")["input_ids"][0].astype(np.int32)[:52]
    logits, state = s.feed(s.init(), 1, tokens)
    expected = without_drafter(s.snapshot(state, jnp.int32(1)))
    for K in range(2, 18) if jax.default_backend() == "gpu" else (4, 17):
        got, state = s.feed(s.init(), 2, tokens, K)
        np.testing.assert_array_equal(got, logits)
        assert_same(without_drafter(s.snapshot(state, jnp.int32(2))), expected)
    for B in (1, 3, 8):
        counts = [4, 0, 3, 1, 2, 4, 4, 1][:B]
        got, _, _ = s.verify(s.init(), np.arange(1, B + 1), np.stack([tokens[:4]] * B), counts)
        for b, n in enumerate(counts):
            np.testing.assert_array_equal(np.asarray(got)[b, :n], logits[:n])


def test_a_product_does_not_know_a_rows_place():
    """What row groups rest on, and a new compiler might break: equal bits wherever a row stands, whatever is beside it."""
    rng = np.random.default_rng(0)
    for group in (4, 8, 16, 64) if jax.default_backend() == "gpu" else (4, 8, 16):
        for D, N in ((64, 97), (256, 1024)):
            x, weight = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((group, D), (D, N)))
            product = jax.jit(linear)
            together = np.asarray(product(x, weight))
            for shift in range(1, group):
                np.testing.assert_array_equal(
                    np.asarray(product(jnp.roll(x, shift, 0), weight)), np.roll(together, shift, 0)
                )


@pytest.mark.parametrize("row_group", [1, long(8)])
def test_every_row_group(row_group):
    """Bits differ between row groups, but not within one."""
    if row_group == 1 and jax.default_backend() == "gpu":
        pytest.skip("one row at a time is for CPUs: a GPU's library has other products for it")
    s = steps("dense", row_group=row_group)
    logits, state = s.feed(s.init(), 1, TOKENS[:30])
    for K in (3, 9):
        got, other = s.feed(s.init(), 3, TOKENS[:30], K)
        np.testing.assert_array_equal(got, logits)
        assert_same(s.snapshot(other, jnp.int32(3)), s.snapshot(state, jnp.int32(1)))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [case if case in (("dense", "bfloat16"), ("moe", "float32")) else long(*case) for case in FAMILIES],
)
def test_neighbours_do_not_matter(family, dtype):
    """Four sequences of different lengths with different row and accept counts in one call, zero rows among them."""
    s = steps(family, dtype)
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, 96, 40) for _ in range(4)]
    state, done = s.init(), [0, 0, 0, 0]
    seen = [[], [], [], []]
    while min(done) < 30:
        n_rows = [int(min(rng.integers(0, 6), 40 - d)) for d in done]
        keep = [int(rng.integers(0, n + 1)) for n in n_rows]
        rows = np.stack([np.pad(t[d : d + 5], (0, 5 - len(t[d : d + 5]))) for t, d in zip(texts, done, strict=True)])
        for b in range(4):  # what will be rejected is wrong
            rows[b, keep[b] :] = rng.integers(0, 96, 5 - keep[b])
        logits, hidden, state = s.verify(state, [1, 2, 3, 4], rows, n_rows)
        state = s.commit(state, jnp.arange(1, 5), jnp.asarray(keep), hidden)
        for b in range(4):
            seen[b].append(np.asarray(logits)[b, : keep[b]])
            done[b] += keep[b]
    for b in range(4):
        logits, alone = s.feed(s.init(), 1, texts[b][: done[b]])
        np.testing.assert_array_equal(np.concatenate(seen[b]), logits)
        assert_same(
            without_drafter(s.snapshot(state, jnp.int32(b + 1))), without_drafter(s.snapshot(alone, jnp.int32(1)))
        )


def test_a_used_slot_is_as_good_as_new():
    s = steps("moe")
    logits, clean = s.feed(s.init(), 1, TOKENS[:20])
    state = s.free(s.init(garbage=3), jnp.int32(1))
    for K in (1, 4):
        got, state = s.feed(s.free(state, jnp.int32(1)), 1, TOKENS[:20], K)
        np.testing.assert_array_equal(got, logits)
        assert_same(without_drafter(s.snapshot(state, jnp.int32(1))), without_drafter(s.snapshot(clean, jnp.int32(1))))


def test_other_slots_are_not_touched():
    """Canaries in every slot and page that a call does not own."""
    s = steps("dense")
    state = s.free(s.init(garbage=4), jnp.int32(2))
    before = jax.tree.map(jnp.array, state)  # a copy: the state is donated
    _, after = s.feed(state, 2, TOKENS[:40], 5)
    of = lambda state, name: np.asarray(getattr(state, name))  # noqa: E731
    pages = np.setdiff1d(np.arange(1, of(before, "page_table").max() + 1), of(before, "page_table")[2])
    for got, want in zip(after.pages, before.pages, strict=True):
        np.testing.assert_array_equal(np.asarray(got)[:, pages], np.asarray(want)[:, pages])
    for name in ("h", "conv", "journal_k", "journal_u", "journal_decay"):
        np.testing.assert_array_equal(of(after, name)[:, [1, 3, 4]], of(before, name)[:, [1, 3, 4]])
    for name in ("rows", "base", "pending", "hidden", "ok"):
        np.testing.assert_array_equal(of(after, name)[[1, 3, 4]], of(before, name)[[1, 3, 4]])


def test_nothing_accepted_is_a_full_rollback():
    s = steps("next")
    _, state = s.feed(s.init(), 1, TOKENS[:10], 3)
    before = s.snapshot(state, jnp.int32(1))
    for _ in range(3):
        _, hidden, state = s.verify(state, [1], [[7] * 5], [5])
        state = s.commit(state, jnp.array([1]), jnp.array([0]), hidden)
        assert_same(without_drafter(s.snapshot(state, jnp.int32(1))), without_drafter(before))


HISTORY = st.lists(
    st.one_of(
        st.tuples(st.just("verify"), st.integers(0, 5), st.integers(0, 5)),
        st.tuples(st.sampled_from(["settle", "snapshot", "restore", "fork"]), st.integers(0, 1), st.just(0)),
    ),
    min_size=1,
    max_size=14,
)


@pytest.mark.parametrize("draw", range(10 if jax.default_backend() == "gpu" else 1))
@pytest.mark.parametrize("family", ["dense", long("moe")])
def test_any_history_equals_a_fresh_run(family, draw):
    """Drafts of any length, any accept count, settling, snapshots, restores and forks between two slots, in any order. A GPU goes
    through a thousand of them, fifty at a time."""
    s = steps(family)

    @seed(draw)
    @given(HISTORY, st.integers(0, 2**31))
    def check(history, number):
        rng = np.random.default_rng(number)
        state = s.free(s.free(s.init(garbage=number % 7), jnp.int32(1)), jnp.int32(2))
        texts: list[list[int]] = [[], []]
        saved = None
        for what, a, b in history:
            if what == "verify":
                rows = rng.integers(0, 96, (2, 5))
                keep = [min(a, b), (a + b) % (a + 1)]
                _, hidden, state = s.verify(state, [1, 2], rows, [a, a])
                state = s.commit(state, jnp.array([1, 2]), jnp.asarray(keep), hidden)
                for text, row, n in zip(texts, rows, keep, strict=True):
                    text += row[:n].tolist()
            elif what == "settle":
                state = s.settle(state, jnp.array([1 + a]))
            elif what == "snapshot":
                saved = s.snapshot(state, jnp.int32(1 + a)), list(texts[a])
            elif what == "restore" and saved is not None:
                state = s.restore(state, jnp.int32(1 + a), saved[0])
                texts[a] = list(saved[1])
            elif what == "fork":
                state = s.fork(state, jnp.int32(1 + a), jnp.int32(2 - a))
                texts[1 - a] = list(texts[a])
        for slot, text in zip((1, 2), texts, strict=True):
            fresh = s.free(s.init(), jnp.int32(1))
            if text:
                _, fresh = s.feed(fresh, 1, text)
            got, want = s.snapshot(state, jnp.int32(slot)), s.snapshot(fresh, jnp.int32(1))
            assert int(got.length) == len(text)
            assert_same(without_drafter(got), without_drafter(want))

    check()


def test_a_wrong_accept_count_poisons_its_slot_only():
    s = steps("dense")
    _, hidden, state = s.verify(s.init(), [1, 2, 3], [[1] * 4] * 3, [4, 2, 3])
    state = s.commit(state, jnp.array([1, 2, 3]), jnp.array([-1, 3, 3]), hidden)
    assert np.asarray(state.ok).tolist() == [True, False, False, True, True]
    assert np.asarray(state.length).tolist() == [0, 0, 0, 3, 0]


def test_guards_name_the_numbers():
    s = steps("dense")
    state = s.init()
    with pytest.raises(StateError, match=r"slots must lie in 1 … 4 .*\[0\]"):
        verify_guard(state, [0], [[1]], [1], 96)
    with pytest.raises(StateError, match=r"slots must lie in 1 … 4 .*\[5\]"):
        verify_guard(state, [5], [[1]], [1], 96)
    with pytest.raises(StateError, match="once a call"):
        verify_guard(state, [2, 2], [[1], [1]], [1, 1], 96)
    with pytest.raises(StateError, match=r"18 rows.*at most 17"):
        verify_guard(state, [1], [[1] * 18], [18], 96)
    with pytest.raises(StateError, match=r"0 … 2, got \[3\]"):
        verify_guard(state, [1], [[1, 1]], [3], 96)
    with pytest.raises(StateError, match="0 … 95"):
        verify_guard(state, [1], [[96]], [1], 96)
    with pytest.raises(StateError, match="at most 160 tokens"):
        verify_guard(state.put(jnp.arange(5), base=state.base + 159), [1], [[1, 1]], [2], 96)
    _, _, state = s.verify(state, [1], [[1, 2]], [2])
    for n in (-1, 3):
        with pytest.raises(StateError, match=rf"rows of the last verify \[2\], got \[{n}\]"):
            commit_guard(state, [1], [n])
    verify_guard(state, [1], [[1, 2]], [2], 96)
    commit_guard(state, [1], [0])


def test_prefill_equals_single_steps_closely():
    """Prefill is another arithmetic (matrix form), so this is a tolerance: 1e-4 on state, as parity asks."""
    s = steps("dense")
    for count in (1, 2, 3, 4, 31, 32, 33, 64, 77):
        _, one = s.feed(s.init(), 1, TOKENS[:count])
        want = s.snapshot(one, jnp.int32(1))
        state = s.free(s.init(garbage=5), jnp.int32(1))
        for i in range(0, count, 32):
            part = TOKENS[i : min(i + 32, count)]
            _, _, state = s.prefill(state, 1, np.pad(part, (0, 32 - len(part))), len(part))
        got = s.snapshot(state, jnp.int32(1))
        for name in ("h", "conv", "hidden"):
            np.testing.assert_allclose(getattr(got, name), getattr(want, name), atol=1e-4, err_msg=name)
        for a, b in zip(got.kv, want.kv, strict=True):
            np.testing.assert_allclose(a[:-1], b[:-1], atol=1e-4)
