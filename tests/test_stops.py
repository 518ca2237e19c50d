"""Stop strings, wherever the token borders fall."""

import codecs
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_jax.decode.stops import StopMatcher


def run(stop, pieces):
    """(what each push showed, the index of the piece that completed a stop string, all text that was shown)."""
    matcher, shown = StopMatcher(stop), []
    for i, piece in enumerate(pieces):
        shown.append(matcher.push(piece))
        if matcher.stopped:
            return shown, i, "".join(shown)
    return shown, None, "".join(shown) + matcher.flush()


def test_a_stop_string_that_spans_tokens():
    assert run(["</end>"], ["Hi <", "b></", "en", "d> more"]) == (["Hi ", "<b>", "", ""], 3, "Hi <b>")


def test_a_stop_string_inside_one_token():
    assert run(["\n"], ["a", "b\nc", "d"]) == (["a", "b"], 1, "ab")


def test_a_prefix_that_came_to_nothing_is_shown_after_all():
    assert run(["stop!"], ["st", "op", "ped"]) == (["", "", "stopped"], None, "stopped")
    assert run(["stop!"], ["st", "op"]) == (["", ""], None, "stop")


def test_an_overlap_within_the_stop_string():
    assert run(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", ""], 3, "a")
    assert run(["abab!"], ["ab", "ab", "ab", "!"]) == (["", "", "ab", ""], 3, "ab")


@pytest.mark.parametrize("pieces", [["xabc"], ["x", "a", "b", "c"], ["xa", "bc"]])
def test_the_first_complete_string_wins_and_of_those_the_longest(pieces):
    assert run(["abc", "b"], pieces)[2] == "xa"
    assert run(["bc", "abc", "c"], pieces)[2] == "x"


def test_no_stop_strings_hold_nothing_back():
    assert run([], ["a", "", "b"]) == (["a", "", "b"], None, "ab")


def test_nothing_is_shown_after_a_stop():
    matcher = StopMatcher(["."])
    assert matcher.push("a.b") == "a" and matcher.matched == "."
    assert matcher.push("c") == "" and matcher.flush() == ""


def test_a_stop_string_that_begins_inside_a_token_of_split_characters():
    # Byte tokens: the decoder shows a character with its last byte, here the first of the stop string.
    decoder = codecs.getincrementaldecoder("utf-8")()
    data = "ok é→ no".encode()
    pieces = [decoder.decode(data[i : i + 1]) for i in range(len(data))]
    assert "" in pieces
    shown, at, text = run(["é→"], pieces)
    assert text == "ok " and at is not None and not any("é" in s for s in shown)


texts = st.text(alphabet="abé", max_size=30)


@given(texts, st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3), st.lists(st.integers(0, 30)))
def test_any_division_into_tokens_gives_the_same_text(text, stop, cuts):
    borders = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(borders)]
    shown, at, whole = run(stop, pieces)
    ends = [text.find(s) + len(s) for s in stop if s in text]
    first = min(ends, default=None)
    if first is None:
        assert (at, whole) == (None, text)
    else:
        assert at is not None and borders[at] < first <= borders[at + 1]
        begin = min(text.find(s) for s in stop if s in text and text.find(s) + len(s) == first)
        assert whole == text[:begin]
    assert whole == StopMatcher(stop).cut(text)
    # Never more is held back than the longest stop string less one, nor shown than is sure.
    longest = max(map(len, stop), default=1) - 1
    for i, b in enumerate(borders[1 : len(shown) + 1]):
        if i != at:
            assert b - longest <= len("".join(shown[: i + 1])) <= b
