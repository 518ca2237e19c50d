"""Which pages of the KV pool are in use, and by how many. Host side: the pages themselves lie in `TargetState.pages`."""

from __future__ import annotations

from collections.abc import Iterable

from atlas_jax.errors import StateError


class PagePool:
    """Hands out pages 1 … `total` and counts who holds each; page 0 is the sentinel and never handed out.

    A page is free when nobody holds it. What a freed page holds stays until its next owner writes it, and nobody reads it.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total, 0, -1))  # the lowest numbers first
        self._holders = [0] * (total + 1)

    @property
    def free(self) -> int:
        return len(self._free)

    def holders(self, page: int) -> int:
        return self._holders[page]

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one holder each.

        Raises:
            StateError: so many are not free; none is taken then.
        """
        if not 0 <= count <= self.free:
            raise StateError(f"{count} pages were asked for and {self.free} of {self.total} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """Adds a holder to pages that have one already."""
        for page in pages:
            if not self._holders[page]:
                raise StateError(f"page {page} is free; only pages in use can be shared")
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Takes a holder away from each; the last one frees the page."""
        for page in pages:
            if not self._holders[page]:
                raise StateError(f"page {page} is released more often than it was held")
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)
