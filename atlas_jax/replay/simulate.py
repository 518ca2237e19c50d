"""Decodes transcripts on paper: rounds of drafts, judged by the text that followed.

An answer of n tokens is decoded from its first token to its end marker. In a round at position p the tokens before p are
known. The policy proposes drafts for p, p+1 …; the longest prefix of them that equals the transcript is accepted, a
tokens, and one more token is emitted, as a verify does: a + 1 tokens, or fewer where the answer ends. A round is a step.
Every answer starts with a round of its own, though a runtime may get that token from the prompt's prefill.

With a threshold T, a lookup round that accepts fewer than T drafts counts as what the policy falls back on: a round of
MTP, or a plain step of one token, after which lookup is tried again at the next position. No policy can know that in
advance: T >= 1 is what choosing perfectly would give. A policy with `min_match` instead knows the match length alone.

The learned hybrid is the runtime's (`decode.hybrid`): each answer starts with the same expectations, and every round takes the
source that promises more, by `decode.arbitration`. Extended, lookup goes on where a chain of MTP ends; drafts that it would add
behind a wrong chain are not counted as drafted.

Tokens from lookup are accepted drafts of lookup rounds; the token that each round emits besides is the target's own.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from atlas_jax.decode import arbitration as arb
from atlas_jax.errors import RequestError
from atlas_jax.replay.lookup import LookupConfig, LookupIndex
from atlas_jax.replay.transcripts import Transcript

PLAIN, LOOKUP, MTP = SOURCES = ("plain", "lookup", "mtp")
LEARNED = ("learned", "extended")  # what the learned hybrids are called


class Round(NamedTuple):
    """One step: who drafted (`SOURCES`), and how many tokens were drafted, accepted and emitted."""

    source: str
    drafted: int
    accepted: int
    emitted: int


@dataclasses.dataclass(frozen=True)
class Turn:
    """An answer, and what lookup would do at each of its tokens; it does not depend on how a policy came there.

    Attributes:
        match, drafted, accepted: lists with an entry for each token: length of the match, of the draft, and of its right
            part within the answer. Zeros where nothing matches.
    """

    conversation: str
    number: int
    match: list[int]
    drafted: list[int]
    accepted: list[int]

    def __len__(self) -> int:
        return len(self.match)


def look_up(transcripts: Sequence[Transcript], config: LookupConfig) -> list[Turn]:
    """Tries lookup at every token of every answer; answers without tokens are left out."""
    turns = []
    for transcript in transcripts:
        index, known, tokens = LookupIndex(config), 0, transcript.tokens
        for number, (start, stop) in enumerate(transcript.turns):
            turn = Turn(transcript.name, number, [], [], [])
            for place in range(start, stop):
                index.extend(tokens[known:place])
                known = place
                match, draft = index.propose()
                turn.match.append(match)
                turn.drafted.append(len(draft))
                turn.accepted.append(right(draft, tokens[place : min(stop, place + len(draft))]))
            if len(turn):
                turns.append(turn)
    return turns


def right(draft: Sequence[int], truth: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (one, other) in enumerate(zip(draft, truth, strict=False)) if one != other), len(truth))


# ---- MTP -------------------------------------------------------------------------------------------------------------


# `begin` starts a replay: what it returns says how many drafts are right at an index of `turns` and a place in that turn.


class DrawnMtp:
    """Draft i is right with probability `chances[i]` if those before it are: drawn for each place of the transcripts, so
    that every policy has the same luck there.

    The draws know nothing of the text, while a real head is right more often where lookup is too: the hybrid gains less
    from it than from this one.
    """

    def __init__(self, chances: Sequence[float], seed: int = 0) -> None:
        if not chances or not all(0 <= chance <= 1 for chance in chances):
            raise RequestError(f"MTP needs a probability in 0 … 1 for each draft, got {list(chances)}")
        if seed < 0:
            raise RequestError(f"the seed must be 0 or more, got {seed}")
        self._chances, self._seed = np.asarray(chances, np.float64), seed
        self.drafts = len(chances)

    def begin(self, turns: Sequence[Turn]) -> Callable[[int, int], int]:
        generator = np.random.default_rng(self._seed)
        lengths = []
        for turn in turns:
            hits = generator.random((len(turn), self.drafts)) < self._chances
            lengths.append(np.cumprod(hits, axis=1, dtype=np.int64).sum(1).tolist())
        return lambda turn, place: lengths[turn][place]


class RecordedMtp:
    """Accepted lengths of rounds that were recorded, taken in order, and again from the first after the last."""

    def __init__(self, lengths: Sequence[int], drafts: int) -> None:
        if not lengths or drafts < 1 or not all(0 <= length <= drafts for length in lengths):
            raise RequestError("a trace must hold rounds of MTP, none with more drafts accepted than drafted")
        self._lengths, self.drafts = lengths, drafts

    def begin(self, turns: Sequence[Turn]) -> Callable[[int, int], int]:
        following = itertools.cycle(self._lengths)
        return lambda turn, place: next(following)


Mtp = DrawnMtp | RecordedMtp


# ---- policies --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Policy:
    """Who drafts when.

    Attributes:
        lookup, mtp: which sources it has; where both are, lookup goes first.
        threshold: lookup rounds that accept fewer drafts do not count (see the module); 0: all count.
        min_match: lookup is tried only with a match of this length.
        learned: who drafts is decided as the runtime's hybrid decides, up to `drafts` drafts of lookup.
        extend: and lookup may go on where MTP's drafts end.
    """

    name: str
    lookup: bool = False
    mtp: bool = False
    threshold: int = 0
    min_match: int = 1
    learned: bool = False
    extend: bool = False
    drafts: int = 0


def policies(thresholds: Sequence[int], min_matches: Sequence[int], mtp: bool, drafts: int = 6) -> list[Policy]:
    """Plain decoding, lookup, and with `mtp` MTP and the hybrid: by threshold, by the match length asked for, and as learned."""
    out = [Policy("plain"), *([Policy(MTP, mtp=True)] if mtp else [])]
    for hybrid in (False, True) if mtp else (False,):
        name = "hybrid" if hybrid else LOOKUP
        out += [Policy(f"{name}, accepted >= {t}", True, hybrid, threshold=t) for t in thresholds]
        out += [Policy(f"{name}, match >= {m}", True, hybrid, min_match=m) for m in min_matches]
    if mtp:
        out += [
            Policy(f"hybrid, {how}", True, True, 0, arb.MIN_MATCH, True, how == "extended", drafts) for how in LEARNED
        ]
    return out


def simulate(policy: Policy, turns: Sequence[Turn], mtp: Mtp | None = None) -> list[list[Round]]:
    """The rounds of each turn; the tokens that they emit add up to the turn's.

    Raises:
        RequestError: the policy needs MTP, and none is given.
    """
    if policy.mtp and mtp is None:
        raise RequestError(f"{policy.name} needs probabilities or a trace of MTP")
    guess = mtp.begin(turns) if policy.mtp and mtp is not None else None
    out = []
    for number, turn in enumerate(turns):
        rounds, place = [], 0
        if policy.learned:
            assert guess is not None and mtp is not None
            out.append(_learned(policy, turn, lambda place, n=number: guess(n, place), mtp.drafts))
            continue
        while place < len(turn):
            left = len(turn) - place
            accepted = turn.accepted[place]
            if policy.lookup and turn.match[place] >= policy.min_match and accepted >= policy.threshold:
                source, drafted = LOOKUP, turn.drafted[place]
            elif guess is not None and mtp is not None:
                source, drafted, accepted = MTP, mtp.drafts, min(guess(number, place), left)
            else:
                source, drafted, accepted = PLAIN, 0, 0
            rounds.append(Round(source, drafted, accepted, min(accepted + 1, left)))
            place += rounds[-1].emitted
        out.append(rounds)
    return out


def _learned(policy: Policy, turn: Turn, guess: Callable[[int], int], chain: int) -> list[Round]:
    """One answer by the runtime's hybrid, whose chains of MTP have `chain` drafts."""
    counts = np.zeros((arb.KINDS, 4))
    rates = lambda kind: arb.rates(tuple(counts[kind].tolist()), arb.FIRST[kind], arb.LATER[kind])  # noqa: E731
    least = arb.LEAST["gpu"]
    rounds, place = [], 0
    while place < len(turn):
        left, match = len(turn) - place, turn.match[place]
        kind = arb.kind(match)
        looked = max(arb.worth(*rates(max(kind, 0)), policy.drafts, least), 1)
        of_mtp = arb.kind_of_mtp(kind)
        promised, head = arb.tokens(*rates(max(kind, 0)), looked), arb.tokens(*rates(of_mtp), chain)
        if match >= policy.min_match and arb.prefer_lookup(promised, head, chain):
            drafted = min(looked, turn.drafted[place])
            step = Round(LOOKUP, drafted, min(turn.accepted[place], drafted), 0)
        else:
            drafted, accepted, end = chain, min(guess(place), left), place + chain
            if policy.extend and accepted == chain and end < len(turn) and turn.match[end] >= policy.min_match:
                first, later = rates(of_mtp)
                room, after = max(policy.drafts - chain, 0), rates(arb.kind(turn.match[end]))
                more = min(arb.worth(*after, room, least, first * later ** (chain - 1)), turn.drafted[end])
                drafted, accepted = chain + more, chain + min(turn.accepted[end], more)
            step = Round(MTP, drafted, accepted, 0)
        emitted = min(step.accepted + 1, left)
        rounds.append(step._replace(emitted=emitted))
        if kind >= 0:
            told = min(emitted, policy.drafts)
            agreed = min(turn.accepted[place], told)
            counts[kind] = arb.learn(counts[kind], arb.outcome(agreed, agreed < told))
        if step.source == MTP:
            right = min(emitted - 1, chain)
            counts[of_mtp] = arb.learn(counts[of_mtp], arb.outcome(right, right < chain))
        place += emitted
    return rounds
