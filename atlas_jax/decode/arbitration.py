"""Who drafts a round, lookup or MTP: constants and arithmetic, one definition for the drafter on the device and for `replay`.

Each sequence keeps, for lookup and for MTP by the length of the match, how often a first draft and a later one were right of
late, and each round takes the source that promises more tokens for its time. A sequence whose copies mislead thereby gives
lookup up, from the shortest matches on, and comes back to it once copies would have been right again: a lookup that was not used
is judged as well, by the tokens that came instead.

Functions use operators alone, so that they take arrays of NumPy and of JAX, and numbers.
"""

from __future__ import annotations

from typing import Any

MATCHES = (1, 2, 4, 8, 16)  # kinds of lookup, by the shortest match of each
MTP = len(MATCHES)  # the kinds after them: MTP without a match, with a match of 2 or 3, and with a longer one
KINDS = MTP + 3
# How often a first draft is right, and a later one if those before it are, before a sequence has shown its own rates. Those of
# lookup are counted in tau-bench's transcripts (bench/NOTES.md). Those of MTP are usual ones: copied text is easier for it as well.
FIRST = (0.2, 0.49, 0.69, 0.83, 0.94, 0.65, 0.75, 0.85)
LATER = (0.6, 0.72, 0.82, 0.87, 0.96, 0.70, 0.78, 0.85)
WEIGHT = 4.0  # rounds that these count for
DECAY = 15 / 16  # of what was counted, each time a kind is judged again
DRAFT_COST = 0.05  # of a draft of MTP, in verifies; lookup costs nothing
MIN_MATCH = 2  # of lookup
CHAIN = 3  # drafts of MTP, where its confidence is not known (replays)
LONGEST_CHAIN = 7  # where it is: a chain ends by itself
# Drafts that are less likely than this to be reached and right are left out: about what a further row of a verify costs, in
# tokens. On a GPU it is nearly free; a CPU computes rows one by one.
LEAST = {"cpu": 0.35, "gpu": 0.05}
# The same of a draft of MTP, which takes a step of the head as well, by the head's own probability of it and of all before it.
SURE = {"cpu": 0.6, "gpu": 0.15}


def kind(match: Any) -> Any:
    """The kind of lookup of a match length; -1 without a match."""
    return sum((match >= least) * 1 for least in MATCHES) - 1


def kind_of_mtp(kind: Any) -> Any:
    """The kind of MTP in a round where lookup's is `kind`."""
    return MTP + (kind >= 1) * 1 + (kind >= 2) * 1


def outcome(agreed: Any, failed: Any) -> tuple[Any, Any, Any, Any]:
    """One round's counts of a kind: first drafts right and wrong, later ones right and wrong.

    Args:
        agreed: leading drafts that were right.
        failed: whether a wrong one came after them; if not, nobody knows how it would have gone on.
    """
    first = (agreed >= 1) * 1
    return first, (failed * 1) * (1 - first), agreed - first, (failed * 1) * first


def learn(counts: Any, new: Any) -> Any:
    """Counts after a round's `outcome`."""
    return counts * DECAY + new


def rates(counts: tuple[Any, Any, Any, Any], first: Any, later: Any) -> tuple[Any, Any]:
    """How often a first and a later draft are right, from counts and from what was expected."""
    right, wrong, further, ended = counts
    return (right + WEIGHT * first) / (right + wrong + WEIGHT), (further + WEIGHT * later) / (further + ended + WEIGHT)


def tokens(first: Any, later: Any, drafts: Any) -> Any:
    """Expected tokens of a round of `drafts` >= 1 drafts."""
    later = later - 1e-3  # below 1
    return 1.0 + first * (1.0 - later**drafts) / (1.0 - later)


def worth(first: Any, later: Any, drafts: int, least: float, before: Any = 1.0) -> Any:
    """How many of up to `drafts` drafts are likely enough, when they are reached with probability `before`."""
    return sum((before * first * later**i >= least) * 1 for i in range(drafts))


def prefer_lookup(lookup: Any, mtp: Any, chain: Any) -> Any:
    """Whether lookup's expected tokens are worth more than those of a chain of MTP, which takes longer."""
    return lookup * (1.0 + DRAFT_COST * chain) >= mtp
