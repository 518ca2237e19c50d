"""Stop strings in text that arrives piece by piece."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Cuts a stream of text before the first stop string, and says how much of it may be shown so far.

    Push the text that each token adds ("" for a token that ends inside a character: only whole characters are text).
    After each push `stopped` says whether that token completed a stop string. Text that may yet turn out to begin one
    is held back, never more than the longest stop string less one character.

    The string that is complete first wins, and of those that end together the longest, so the cut depends on the text
    alone and not on how it was divided into tokens.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.stop = tuple(stop)
        self.matched: str | None = None
        self._held = ""

    @property
    def stopped(self) -> bool:
        return self.matched is not None

    def push(self, text: str) -> str:
        """Takes the next piece; returns the text that may now be shown. After a stop string there is no more."""
        if self.stopped:
            return ""
        text = self._held + text
        if found := self._find(text):
            begin, self.matched = found
            self._held = ""
            return text[:begin]
        shown = len(text) - self._overlap(text)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The text still held back, once no more will come."""
        text, self._held = self._held, ""
        return text

    def cut(self, text: str) -> str:
        """A whole text up to its first stop string, as pushing it in any pieces would show it."""
        found = self._find(text)
        return text[: found[0]] if found else text

    def _find(self, text: str) -> tuple[int, str] | None:
        """Where the first stop string begins, and which it is."""
        found = [(begin + len(stop), begin, stop) for stop in self.stop if (begin := text.find(stop)) >= 0]
        return min(found)[1:] if found else None

    def _overlap(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = max(map(len, self.stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stop):
                return length
        return 0
