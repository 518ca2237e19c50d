"""Replays on small made-up sequences, counted by hand, and lookup against an exhaustive search."""

import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_jax.errors import RequestError
from atlas_jax.replay.files import CostTable, read_cost, read_trace, write_trace
from atlas_jax.replay.lookup import LookupConfig, LookupIndex
from atlas_jax.replay.report import saved, summarise, to_dict
from atlas_jax.replay.simulate import DrawnMtp, Policy, RecordedMtp, Round, look_up, policies, right, simulate
from atlas_jax.replay.transcripts import Transcript

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def propose(tokens: list[int], **sizes: int) -> tuple[int, list[int]]:
    index = LookupIndex(LookupConfig(**sizes))
    index.extend(tokens)
    return index.propose()


def turns_of(*sequences: tuple[list[int], list[int]], **sizes: int):
    made = [
        Transcript(str(i), prompt + answer, [(len(prompt), len(prompt + answer))])
        for i, (prompt, answer) in enumerate(sequences)
    ]
    return look_up(made, LookupConfig(**sizes))


# ---- lookup


def test_the_draft_is_what_followed_the_longest_match():
    assert propose([1, 2, 3, 70, 9, 2, 3, 80, 1, 2, 3]) == (3, [70, 9, 2, 3, 80, 1])
    assert propose([1, 2, 3, 70, 9, 2, 3, 80, 1, 2, 3], drafts=2) == (3, [70, 9])
    assert propose([2, 3, 80, 7, 2, 3]) == (2, [80, 7, 2, 3])  # as far as it is known


def test_ties_go_to_the_newest():
    assert propose([2, 3, 70, 2, 3, 80, 2, 3], drafts=1) == (2, [80])
    assert propose([1, 2, 3, 70, 2, 3, 80, 1, 2, 3], drafts=1, max_match=2) == (2, [80])


def test_only_the_newest_candidates_are_compared():
    assert propose([1, 2, 3, 70, 2, 3, 80, 1, 2, 3], drafts=1, candidates=1) == (2, [80])


def test_a_match_may_overlap_the_tail_but_is_not_the_tail():
    assert propose([5, 5, 5]) == (2, [5])
    assert propose([4, 5, 6]) == (0, [])
    assert propose([4]) == propose([]) == (0, [])


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 3), st.integers(1, 70), st.integers(0, 5))
def test_lookup_equals_an_exhaustive_search(tokens, ngram, candidates, more):
    config = LookupConfig(ngram, candidates, ngram + more, 4)
    index = LookupIndex(config)
    for token in tokens:
        index.extend([token])
    found = []
    for end in range(ngram, len(tokens)):
        lengths = [n for n in range(1, config.max_match + 1) if n <= end and tokens[end - n : end] == tokens[-n:]]
        if lengths and max(lengths) >= ngram:
            found.append((max(lengths), end))
    length, place = max(found[-candidates:], default=(0, 0))
    assert index.propose() == (length, tokens[place : place + 4] if length else [])


def test_sizes_are_checked():
    for sizes in (dict(ngram=0), dict(drafts=0), dict(candidates=-1), dict(ngram=4, max_match=3)):
        with pytest.raises(RequestError, match="must be at least"):
            LookupConfig(**sizes)


# ---- rounds


def test_rounds_of_a_copy():
    (turn,) = turns_of((PROMPT, [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert turn.match == [0, 0, 2, 3, 4, 5, 6, 7, 8]
    assert turn.drafted[:4] == [0, 0, 6, 6] and turn.accepted == [0, 0, 6, 6, 5, 4, 3, 2, 1]
    (rounds,) = simulate(Policy("lookup", lookup=True), [turn])
    assert rounds == [Round("plain", 0, 0, 1), Round("plain", 0, 0, 1), Round("lookup", 6, 6, 7)]
    (rounds,) = simulate(Policy("lookup", lookup=True, min_match=4), [turn])
    assert rounds[-1] == Round("lookup", 6, 5, 5)  # the answer ends within the draft: no further token
    result = summarise(Policy("lookup", lookup=True), [rounds])
    assert (result.tokens, result.steps, result.lookup_share) == (9, 5, 5 / 9)


def test_a_threshold_falls_back_on_one_plain_step():
    (turn,) = turns_of((PROMPT, [1, 2, 3, 50, 4, 5, 6, 51]))
    shares = []
    for threshold in (1, 2, 4):
        (rounds,) = simulate(Policy("", lookup=True, threshold=threshold), [turn])
        shares.append(sum(step.accepted for step in rounds if step.source == "lookup"))
        assert all(step.accepted >= threshold for step in rounds if step.source == "lookup")
        assert sum(step.emitted for step in rounds) == len(turn)
    assert shares == [2, 0, 0]  # 3 after 1 2, and 6 after 4 5


def test_nothing_is_found_in_another_sequence():
    alone, after = turns_of((PROMPT, PROMPT)), turns_of((PROMPT, PROMPT), ([40, 41], PROMPT))
    assert alone[0] == after[0] and max(after[1].match) == 0


def test_later_turns_find_earlier_ones():
    transcript = Transcript("a", [*PROMPT, 20, 21, 22, 23, 30, 20, 21, 22, 23], [(9, 13), (14, 18)])
    first, second = look_up([transcript], LookupConfig())
    assert max(first.match) == 0 and second.match == [0, 0, 2, 3] and (second.number, len(second)) == (1, 4)


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=30), min_size=1, max_size=3), st.integers(0, 99))
def test_every_policy_emits_every_token(answers, seed):
    turns, mtp = turns_of(*([(PROMPT, answer) for answer in answers])), DrawnMtp([0.8, 0.5], seed)
    for policy in policies([1, 2, 4], [2, 4], mtp=True):
        rounds = simulate(policy, turns, mtp)
        assert [sum(step.emitted for step in steps) for steps in rounds] == [len(answer) for answer in answers]
        assert all(0 <= step.accepted <= step.drafted for steps in rounds for step in steps)
        assert all(step.emitted in (step.accepted, step.accepted + 1) for steps in rounds for step in steps)


def test_right():
    assert [right([1, 2], truth) for truth in ([1, 2], [1, 3], [1], [])] == [2, 1, 1, 0]


# ---- MTP


def test_drawn_mtp_has_the_probabilities_it_was_given():
    turns = turns_of((PROMPT, list(range(100, 40100))))
    (rounds,) = simulate(Policy("mtp", mtp=True), turns, DrawnMtp([0.75, 0.5], seed=3))
    accepted = np.array([step.accepted for step in rounds])
    assert abs((accepted >= 1).mean() - 0.75) < 0.01 and abs((accepted >= 2).mean() - 0.375) < 0.01
    assert rounds == simulate(Policy("mtp", mtp=True), turns, DrawnMtp([0.75, 0.5], seed=3))[0]
    assert rounds != simulate(Policy("mtp", mtp=True), turns, DrawnMtp([0.75, 0.5], seed=4))[0]


def test_the_hybrid_asks_mtp_where_nothing_matches():
    turns = turns_of((PROMPT, PROMPT))
    (rounds,) = simulate(Policy("", True, True), turns, DrawnMtp([1.0]))
    assert rounds == [Round("mtp", 1, 1, 2), Round("lookup", 6, 6, 7)]
    with pytest.raises(RequestError, match="needs probabilities or a trace"):
        simulate(Policy("hybrid", True, True), turns)


def test_the_learned_hybrid_gives_lookup_up_where_it_misleads_and_keeps_it_where_it_serves():
    learned = policies([], [], mtp=True, drafts=6)[-2]
    assert learned.learned and not learned.extend
    (copied,) = simulate(learned, turns_of((PROMPT, PROMPT * 9)), DrawnMtp([0.5]))
    assert sum(step.source == "lookup" for step in copied) >= 0.8 * len(copied)
    teasing = [token for i in range(60) for token in (*range(1, 5), 100 + i)]  # five tokens in, every copy goes wrong
    (teased,) = simulate(learned, turns_of((PROMPT, teasing)), DrawnMtp([1.0, 1.0, 1.0]))
    late = teased[len(teased) // 2 :]
    assert sum(step.source == "lookup" and step.accepted == 0 for step in late) == 0


def test_an_extended_chain_goes_on_where_the_text_was_seen():
    learned, extended = policies([], [], mtp=True, drafts=9)[-2:]
    turns = turns_of((PROMPT, [50, *PROMPT, 51, 52, 53]), drafts=9)
    for policy, longest in ((learned, 3), (extended, 7)):
        (rounds,) = simulate(policy, turns, DrawnMtp([1.0, 1.0, 1.0]))
        assert max(step.accepted for step in rounds if step.source == "mtp") == longest
        assert sum(step.emitted for step in rounds) == len(turns[0])


@pytest.mark.parametrize("chances", ([], [1.5], [float("nan")]))
def test_probabilities_are_checked(chances):
    with pytest.raises(RequestError, match="probability"):
        DrawnMtp(chances)


def test_a_trace_that_was_written_replays_the_same_rounds(tmp_path):
    turns = turns_of((PROMPT, list(range(100, 150))), (PROMPT, list(range(100, 151))))
    alone = simulate(Policy("mtp", mtp=True), turns, RecordedMtp([2, 0, 1, 2, 0], 2))
    file = io.StringIO()
    write_trace(file, "plain", turns, simulate(Policy("plain"), turns))
    write_trace(file, "mtp", turns, alone)
    (tmp_path / "t").write_text(file.getvalue())
    trace = read_trace(tmp_path / "t")
    taken = [step.accepted for steps in alone for step in steps if step.emitted > step.accepted]
    guess = trace.begin(turns)
    assert trace.drafts == 2 and [guess(0, 0) for _ in range(len(taken) + 1)] == [*taken, taken[0]]


@pytest.mark.parametrize(
    "line",
    ("", "[]", "{", '{"rounds": [["mtp", 1, 2, 3]]}', '{"rounds": [["mtp", 2, 1, 9]]}', '{"rounds": [["mtp", 1]]}',
     '{"rounds": [["x", 1, 1, 2]]}', '{"rounds": [["mtp", 1, 1.5, 2]]}', '{"rounds": [["lookup", 2, 1, 2]]}',
     '{"rounds": [["mtp", 1, 1, 1]]}'),
)  # fmt: skip
def test_broken_traces_are_refused(tmp_path, line):
    (tmp_path / "t").write_text(line)
    with pytest.raises(RequestError, match=r"needs \{|no round of MTP"):
        read_trace(tmp_path / "t")


# ---- costs and figures


def test_a_round_costs_the_smallest_number_of_rows_that_holds_it():
    table = CostTable({1: 10.0, 2: 11.0, 7: 13.0}, draft_ms=0.5)
    assert table.round_ms(Round("plain", 0, 0, 1)) == 10
    assert table.round_ms(Round("lookup", 3, 1, 2)) == 13
    assert table.round_ms(Round("mtp", 3, 1, 2)) == 14.5
    with pytest.raises(RequestError, match="ends at 7 rows"):
        table.round_ms(Round("lookup", 7, 1, 2))


def test_cost_tables_are_read(tmp_path):
    (tmp_path / "c.json").write_text(json.dumps(dict(step_ms={"1": 10, "4": 12.5}, draft_ms=0.3)))
    assert read_cost("1:10,4:12.5", 0.3) == read_cost(str(tmp_path / "c.json")) == CostTable({1: 10.0, 4: 12.5}, 0.3)
    (tmp_path / "bad.json").write_text("[1]")
    (tmp_path / "worse.json").write_text("{")
    for text in ("1:x", "1:2,", "0:1", "1:nan", "1:-1", f"{tmp_path}/bad.json", f"{tmp_path}/worse.json", "absent"):
        with pytest.raises(RequestError):
            read_cost(text)


def test_figures_of_a_result():
    turns = turns_of((PROMPT, PROMPT), (PROMPT, [30, 31, 32]))
    found = [policy for policy in policies([1], [2], mtp=False) if policy.threshold != 0 or not policy.lookup]
    results = [summarise(policy, simulate(policy, turns), CostTable({1: 1.0, 7: 2.0})) for policy in found]
    plain, lookup = results
    assert (plain.steps, plain.tokens_per_step, plain.wall_ms, lookup.steps, lookup.wall_ms) == (12, 1.0, 12.0, 6, 7.0)
    assert (lookup.lookup_share, lookup.lengths["lookup"]) == (6 / 12, [0, 0, 0, 0, 0, 0, 1])
    assert saved(lookup, plain) == 0.5 and lookup.turn_lookup_share.tolist() == [6 / 9, 0]
    out = json.loads(json.dumps(to_dict(results, turns, {}), allow_nan=False))
    assert out["policies"][1]["turn_tokens_per_step"]["p50"] == 2.0 and out["tokens"] == 12
