"""Acceptance counts, their rates and intervals."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from atlas_jax.metrics import Acceptance, wilson


def counted(verifies: list[tuple[list[int], list[int]]], M: int = 4) -> Acceptance:
    """Counts verifies by the definitions: (drafts, the target's token after each row)."""
    counts = {name: np.zeros(M - 1, np.int32) for name in ("offered", "matched", "reached", "accepted")}
    histogram = np.zeros(M + 1, np.int32)
    for drafts, picks in verifies:
        right = True
        emitted = 1
        for i, draft in enumerate(drafts):
            hit = draft == picks[i]
            counts["offered"][i] += 1
            counts["matched"][i] += hit
            counts["reached"][i] += right
            right = right and hit
            counts["accepted"][i] += right
            emitted += right
        histogram[emitted] += 1
    return Acceptance(np.int32(len(verifies)), **counts, histogram=histogram)


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


def test_counts_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="one length"):
        Acceptance(1, np.zeros(3), np.zeros(3), np.zeros(2), np.zeros(3), np.zeros(4))
