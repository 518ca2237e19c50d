"""The page pool and the tree over it: nothing is handed out twice, nothing is lost, and misuse is refused without a trace."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_jax.cache.pages import PagePool
from atlas_jax.cache.tree import PageTree
from atlas_jax.errors import StateError

TOTAL = 9


@given(st.lists(st.tuples(st.sampled_from(["allocate", "hold", "release"]), st.integers(0, TOTAL + 1)), max_size=40))
def test_any_history(history):
    """Against a plain count a page."""
    pool, model = PagePool(TOTAL), dict.fromkeys(range(1, TOTAL + 1), 0)
    for what, n in history:
        held = [page for page, holders in model.items() if holders]
        if what == "allocate":
            if n > TOTAL - len(held):
                with pytest.raises(StateError, match=f"{n} pages were asked for"):
                    pool.allocate(n)
                continue
            pages = pool.allocate(n)
            assert len(set(pages)) == n and all(model[page] == 0 for page in pages)
            model |= dict.fromkeys(pages, 1)
        elif held:
            page = held[n % len(held)]
            (pool.hold if what == "hold" else pool.release)([page])
            model[page] += 1 if what == "hold" else -1
        assert {page: pool.holders(page) for page in model} == model
        assert pool.free == sum(not holders for holders in model.values())


def test_misuse_is_refused():
    pool = PagePool(2)
    page = pool.allocate(1)[0]
    pool.release([page])
    for misuse in (pool.release, pool.hold):
        with pytest.raises(StateError, match=f"page {page}"):
            misuse([page])
    with pytest.raises(StateError, match="-1 pages"):
        pool.allocate(-1)
    assert pool.free == 2


# ---- the tree

TEXT = st.lists(st.integers(0, 1), max_size=7)  # of pages: two kinds of each, so that texts share beginnings
OPERATION = st.one_of(
    st.tuples(st.sampled_from(["insert", "match", "use", "remove"]), TEXT),
    st.tuples(st.just("free"), st.integers(0, 20)),
)


@given(st.lists(OPERATION, max_size=30))
def test_any_history_of_the_tree(history):
    """Against a set of known beginnings: the same texts match, pages are held once each, leaves go before what they stand on."""
    pool, gone = PagePool(20), []
    tree, known = PageTree(pool, 2, gone.append), set()
    for what, value in history:
        if what == "free":
            tree.free(value)
            known -= {key(node) for node in gone}
            assert pool.free >= value
        else:
            tokens = np.repeat(np.asarray(value, np.int32), 2)
            found = tree.match(tokens)
            longest = max((n for n in range(len(value) + 1) if n == 0 or tuple(value[:n]) in known), default=0)
            assert [key(node) for node in found] == [tuple(value[:n]) for n in range(1, longest + 1)]
            if what == "insert" and value:
                tree.free(len(value))
                known -= {key(node) for node in gone}
                pages = pool.allocate(len(value))
                node = tree.insert(found[-1] if found else tree.root, np.append(tokens, tokens[:1]), pages)
                pool.release(pages)
                assert key(node) == tuple(value) and node.path()[-1] is node
                known |= {tuple(value[:n]) for n in range(1, len(value) + 1)}
            elif what == "use" and found:
                tree.use(found[-1])
            elif what == "remove" and found:
                tree.remove(found[0])
                known -= {key(node) for node in gone}
        gone.clear()
        assert {key(node) for node in tree} == known and len(tree) == len(known)
        assert pool.free == 20 - len(known) and all(pool.holders(node.page) == 1 for node in tree)
        order = {node: i for i, node in enumerate(tree)}
        assert all(order[child] < order[node] for node in tree for child in node.children.values())


def key(node):
    return tuple(int(np.frombuffer(n.key, np.int32)[0]) for n in node.path())


def test_room_is_made_where_it_costs_least():
    """First what nobody claims, longest unused first; then sessions' entries; last those whose pages give nothing yet."""
    pool = PagePool(4)
    tree = PageTree(pool, 1, lambda node: None)
    pages = pool.allocate(4)
    nodes = [tree.insert(tree.root, np.asarray([i], np.int32), [page]) for i, page in enumerate(pages)]
    pool.release(pages[1:])  # a sequence holds the first, which is the longest unused
    nodes[1].leases = 1
    tree.use(nodes[2])
    for free, left in ((1, {0, 1, 2}), (2, {0, 1}), (3, {0}), (4, set())):
        tree.free(free)
        assert {int(np.frombuffer(node.key, np.int32)[0]) for node in tree} == left
    assert pool.free == 3
