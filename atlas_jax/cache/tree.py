"""The radix tree: sequences of tokens, a page an edge, and the pages that hold their keys and values."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator

import numpy as np

from atlas_jax.cache.pages import PagePool


class Node:
    """A page of tokens after those of `parent`. Equal tokens from the beginning on are one node.

    Attributes:
        page: where the keys and values of its tokens lie; the tree is one of the page's holders.
        depth: pages from the root to the end of this one.
        users: running sequences whose newest snapshot is this node's.
        leases: open sessions whose newest snapshot is this node's.
    """

    __slots__ = ("children", "depth", "key", "leases", "page", "parent", "users")

    def __init__(self, parent: Node | None, key: bytes, page: int) -> None:
        self.parent, self.key, self.page = parent, key, page
        self.depth: int = parent.depth + 1 if parent else 0
        self.children: dict[bytes, Node] = {}
        self.users = self.leases = 0

    def path(self) -> list[Node]:
        """The nodes from below the root to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class PageTree:
    """Nodes in the order of their last use. A node counts as used whenever one below it is, so leaves go first.

    `on_remove` is told of each node that leaves the tree.
    """

    def __init__(self, pool: PagePool, page_size: int, on_remove: Callable[[Node], None]) -> None:
        self.pool, self.page_size, self.on_remove = pool, page_size, on_remove
        self.root = Node(None, b"", 0)
        self._recency: collections.OrderedDict[Node, None] = collections.OrderedDict()  # the longest unused first

    def __len__(self) -> int:
        return len(self._recency)

    def __contains__(self, node: Node) -> bool:
        return node is self.root or node in self._recency

    def __iter__(self) -> Iterator[Node]:
        return iter(self._recency)

    def match(self, tokens: np.ndarray) -> list[Node]:
        """The nodes that `tokens` pass through, as deep as whole pages agree. Nothing counts as used by it."""
        nodes, node = [], self.root
        for i in range(tokens.size // self.page_size):
            node = node.children.get(self._key(tokens, i))
            if node is None:
                break
            nodes.append(node)
        return nodes

    def insert(self, start: Node, tokens: np.ndarray, pages: list[int]) -> Node:
        """Adds the whole pages of `tokens`, of which page i lies in pages[i], below `start`, one of the nodes that the tokens pass
        through. Where a node is there already, its own page stays, and the given one is its owner's alone.

        Returns: the node of the last whole page.
        """
        node = start if start in self else self.root
        for i in range(node.depth, tokens.size // self.page_size):
            key = self._key(tokens, i)
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(node, key, pages[i])
                self.pool.hold([child.page])
                self._recency[child] = None
            node = child
        self.use(node)
        return node

    def use(self, node: Node) -> None:
        """Marks a node and those above it as used now."""
        while node.parent is not None:
            self._recency.move_to_end(node)
            node = node.parent

    def remove(self, node: Node) -> None:
        """Takes a node and all below it out of the tree. Pages that sequences still hold stay theirs."""
        assert node.parent is not None, "the root stays"
        del node.parent.children[node.key]
        doomed = [node]
        for node in doomed:  # which grows on the way
            doomed += node.children.values()
        for node in doomed:
            node.children.clear()
            del self._recency[node]
            self.pool.release([node.page])
            self.on_remove(node)

    def free(self, count: int) -> int:
        """Removes leaves until `count` pages of the pool are free: those unused for longest first, sessions' last, and those
        whose page a running sequence holds, which frees nothing yet, only if all else is gone. Returns how many nodes went."""
        removed = 0
        for held, leased in ((False, False), (False, True), (True, True)):
            for node in list(self._recency):  # a node comes after all that are below it
                if self.pool.free >= count:
                    return removed
                gives = held or self.pool.holders(node.page) == 1
                if not node.children and gives and (leased or not (node.leases or node.users)):
                    self.remove(node)
                    removed += 1
        return removed

    def _key(self, tokens: np.ndarray, i: int) -> bytes:
        return tokens[i * self.page_size : (i + 1) * self.page_size].tobytes()
