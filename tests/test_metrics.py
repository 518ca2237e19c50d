"""Acceptance counts, their rates and intervals."""

import io
import json

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from rich.console import Console

from atlas_jax.decode.counters import count, counters_shape
from atlas_jax.metrics import CONTEXT_BOUNDS, Acceptance, AcceptanceLog, Event, Source, wilson


def counted(verifies: list[tuple[list[int], list[int]]], M: int = 4, context: int = 0, source=Source.MTP) -> Acceptance:
    """Counts verifies by the definitions: (drafts, the target's token after each row)."""
    out = Acceptance.zero(M - 1)
    for drafts, picks in verifies:
        right = True
        emitted = 1
        for i, draft in enumerate(drafts):
            hit = draft == picks[i]
            cell = out.counts[context, source, :, i]
            cell[Event.OFFERED] += 1
            cell[Event.MATCHED] += hit
            cell[Event.REACHED] += right
            right = right and hit
            cell[Event.ACCEPTED] += right
            emitted += right
        out.counts[context, source if drafts else Source.PLAIN, Event.ROUNDS, emitted] += 1
    return out


EXAMPLE = [([1, 2, 3], [1, 2, 3, 4]), ([1, 2, 3], [9, 2, 3, 4]), ([1, 2], [1, 9, 4]), ([], [1])]


def test_rates_by_the_definitions():
    a = counted(EXAMPLE)
    assert (a.steps, a.drafted, a.drafts_accepted, a.emitted) == (4, 8, 4, 8)
    assert a.tokens_per_step == 2.0
    np.testing.assert_allclose(a.unconditional, [2 / 3, 2 / 3, 1])
    np.testing.assert_allclose(a.conditional, [2 / 3, 1 / 2, 1])
    assert a.emitted == a.drafts_accepted + a.steps


def test_to_dict_is_json_without_nan_and_without_unused_places():
    out = json.loads(json.dumps(counted(EXAMPLE, M=8).to_dict(), allow_nan=False))
    assert [p["draft"] for p in out["positions"]] == [1, 2, 3]
    assert out["positions"][1] | dict(unconditional_95=None, conditional_95=None) == dict(
        draft=2, offered=3, matched=2, unconditional=2 / 3, unconditional_95=None,
        reached=2, accepted=1, conditional=0.5, conditional_95=None,
    )  # fmt: skip
    assert out["histogram"] == [0, 2, 1, 0, 1]
    never_reached = counted([([5, 6], [1, 6, 7])]).to_dict()["positions"][1]
    assert never_reached["conditional"] is None and never_reached["unconditional"] == 1.0
    assert counted([([], [1])]).to_dict()["positions"] == []


def test_merge_adds_and_allows_different_lengths():
    a, b = counted(EXAMPLE[:2], M=4), counted(EXAMPLE[2:], M=6)
    assert Acceptance.merge([a, b]).to_dict() == counted(EXAMPLE, M=6).to_dict()
    empty = Acceptance.merge([])
    assert (empty.steps, empty.emitted, empty.tokens_per_step) == (0, 0, 0.0)


@pytest.mark.parametrize(
    ("hits", "trials", "low", "high"),
    [(5, 10, 0.2366, 0.7634), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662)],
)
def test_wilson(hits, trials, low, high):
    np.testing.assert_allclose(wilson(hits, trials), (low, high), atol=5e-5)
    assert wilson(0, 0) == (0.0, 1.0)


def test_the_table_names_both_rates():
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(counted(EXAMPLE).table())
    text = console.export_text()
    assert "66.7" in text and "conditional" in text and "8 tokens in 4 steps (2.00 a step), 4 of 8 drafts" in text


def test_it_reads_as_one_line():
    line = "<Acceptance: 8 tokens in 4 steps (2.00 a step), 4 of 8 drafts accepted, of those reached: "
    line += "draft 1: 2 of 3 (66.7 %), draft 2: 1 of 2 (50.0 %), draft 3: 1 of 1 (100.0 %)>"
    assert repr(counted(EXAMPLE)) == str(counted(EXAMPLE, M=8)) == line
    assert repr(counted([([5, 6], [1, 6, 7])])).endswith("draft 1: 0 of 1 (0.0 %), draft 2: 0 of 0 (– %)>")
    assert repr(Acceptance.zero(3)) == "<Acceptance: 0 tokens in 0 steps (0.00 a step), no drafts>"
    assert "\n" not in str(counted(EXAMPLE).by_source()) + str(counted(EXAMPLE).by_context())


def test_counts_of_another_form_are_refused():
    for shape in ((3,), (8, 4, 5, 1), (1, 4, 5, 6)):
        with pytest.raises(ValueError, match="axes"):
            Acceptance(np.zeros(shape))


def test_parts_by_source_and_context():
    mtp, lookup = counted(EXAMPLE[:3]), counted(EXAMPLE[1:3], context=2, source=Source.LOOKUP)
    both = mtp + lookup + counted(EXAMPLE[3:], context=7)
    parts = both.by_source()
    assert list(parts) == ["plain", "mtp", "lookup"]
    assert parts["mtp"].to_dict()["positions"] == mtp.to_dict()["positions"]
    assert parts["lookup"].to_dict() == lookup.to_dict() and parts["plain"].steps == 1
    contexts = both.by_context()
    assert list(contexts) == ["0 – 1023", "2048 – 4095", "65536 –"]
    assert contexts["2048 – 4095"].to_dict() == lookup.to_dict()
    assert Acceptance.merge(parts.values()).to_dict() == both.to_dict() == Acceptance.merge(contexts.values()).to_dict()
    assert both.to_dict()["sources"]["lookup"]["drafted"] == 5
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(both.parts_table())
    assert "lookup" in (text := console.export_text()) and "2048 – 4095" in text


def test_a_log_keeps_cold_and_warm_apart_and_is_read_in_windows():
    log = AcceptanceLog()
    one, two = counted(EXAMPLE[:2], M=4), counted(EXAMPLE[2:], M=6)
    log.add(one, warm=False)
    before = log.total()
    log.add(two, warm=True)
    assert before.to_dict() == one.to_dict()  # a reading does not change
    assert (log.total() - before).to_dict() == two.to_dict() == log.total(warm=True).to_dict()
    assert log.total(warm=False).to_dict() == one.to_dict()
    assert json.loads(json.dumps(log.to_dict(), allow_nan=False))["warm"]["steps"] == 2
    log.reset()
    assert log.total().steps == 0


@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 3), st.integers(0, 9)), max_size=12)
)
def test_counting_on_the_device_follows_the_definitions(rounds):
    """Rounds of (drafts offered, drafts right before a wrong one, tokens that may be emitted, context and sources)."""
    M = 4
    counters, want = jnp.zeros((2, *counters_shape(M)), jnp.int32), Acceptance.zero(M - 1)
    for offered, right, remaining, seed in rounds:
        rng = np.random.default_rng(seed)
        matches = rng.random(M - 1) < 0.5
        matches[:right] = True
        if right < M - 1:
            matches[right] = False
        matches &= np.arange(M - 1) < offered
        source = rng.integers(1, len(Source), M - 1)
        length = int(rng.integers(0, 1 << 17))
        context = int(np.searchsorted(CONTEXT_BOUNDS, length, side="right"))
        agreed = int(np.cumprod(matches).sum())
        emitted = min(agreed + 1, remaining)
        accepted = min(agreed, emitted)
        for i in range(offered):
            cell = want.counts[context, source[i], :, i]
            cell[Event.OFFERED] += 1
            cell[Event.MATCHED] += matches[i]
            cell[Event.REACHED] += agreed >= i and i < emitted
            cell[Event.ACCEPTED] += i < accepted
        want.counts[context, source[0] if offered else Source.PLAIN, Event.ROUNDS, emitted] += 1
        two = lambda x, other: jnp.array([x, other])  # noqa: E731  # the second sequence does not run
        counters = COUNT(
            counters, two(length, 5), two(offered + 1, 0), two(source, source), two(matches, ~matches),
            two(accepted, 0), two(emitted, 0),
        )  # fmt: skip
    np.testing.assert_array_equal(counters[0], want.counts)
    assert not np.asarray(counters)[1].any()


COUNT = jax.jit(count)
