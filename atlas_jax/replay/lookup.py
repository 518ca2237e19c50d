"""Prompt lookup over the tokens of one sequence: the longest match of its tail, and what followed it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

from atlas_jax.errors import RequestError


@dataclasses.dataclass(frozen=True)
class LookupConfig:
    """Sizes, all in tokens but `candidates`.

    Attributes:
        ngram: the shortest match, by which places are found.
        candidates: places that are compared, the newest ones.
        max_match: where comparing stops; of places that match as far, the newest wins.
        drafts: the longest draft.

    Raises:
        RequestError: a size below 1, or a match that could not be as long as it must.
    """

    ngram: int = 2
    candidates: int = 64
    max_match: int = 16
    drafts: int = 6

    def __post_init__(self) -> None:
        for name, size in dataclasses.asdict(self).items():
            if size < 1:
                raise RequestError(f"{name} must be at least 1, got {size}")
        if self.max_match < self.ngram:
            raise RequestError(f"max_match must be at least ngram, {self.ngram}; got {self.max_match}")


class LookupIndex:
    """Where the n-grams of one sequence end. Each sequence has its own, so that no match comes from another.

    `extend` with every token that is known: the prompt, what was accepted, and the newest token, which was emitted but is
    not in the model's state yet; the tail that is looked for ends with it.
    """

    def __init__(self, config: LookupConfig) -> None:
        self.config = config
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = collections.defaultdict(list)

    def extend(self, tokens: Iterable[int]) -> None:
        size = self.config.ngram
        for token in tokens:
            self._tokens.append(token)
            if len(self._tokens) >= size:
                self._ends[tuple(self._tokens[-size:])].append(len(self._tokens) - 1)

    def propose(self) -> tuple[int, list[int]]:
        """The length of the longest match, 0 if there is none, and the draft: what followed it, as far as it is known.

        A match may overlap the tail; the tail itself is none.
        """
        config, tokens, last = self.config, self._tokens, len(self._tokens) - 1
        ends = self._ends.get(tuple(tokens[-config.ngram :]), [])
        longest = place = 0
        for end in ends[-2 : -2 - config.candidates : -1]:  # the newest entry is the tail
            length = config.ngram
            while length < min(config.max_match, end + 1) and tokens[end - length] == tokens[last - length]:
                length += 1
            if length > longest:
                longest, place = length, end
            if length == config.max_match:
                break
        return longest, tokens[place + 1 : place + 1 + config.drafts] if longest else []
