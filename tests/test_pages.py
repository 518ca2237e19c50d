"""The page pool: nothing is handed out twice, nothing is lost, and misuse is refused without a trace."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_jax.cache.pages import PagePool
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
