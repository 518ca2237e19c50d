"""The GPU kernels against their twins and against themselves: themselves on a GPU, by Pallas' interpreter on a CPU."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta import Journal, Recurrent, triton_prefill
from pallas_kernels.gated_delta import api as gated_api
from pallas_kernels.gated_delta import arg_specs as gated
from pallas_kernels.gated_delta import reference as twin
from pallas_kernels.gated_delta import triton as step_kernel
from pallas_kernels.linear import triton as narrow
from pallas_kernels.paged_attention import api as paged_api
from pallas_kernels.paged_attention import arg_specs as paged
from pallas_kernels.paged_attention import reference as paged_twin
from pallas_kernels.paged_attention import triton as attention_kernel
from pallas_kernels.paged_attention import triton_prefill as attention_kernel_prefill
from pallas_kernels.rows import at_most


def long(*values):
    """A case for `make test-all` and `make test-gpu`: the interpreter's programs take long to compile."""
    return pytest.param(*values, marks=pytest.mark.long)


# Both are float32 throughout; they add in another order.
CLOSE: Any = dict(rtol=2e-4, atol=2e-5)
on_gpu = jax.default_backend() == "gpu"
interpret = not on_gpu


def step(args: Any, K, layer=1, **state: Any):
    mixer, recurrent, *rest = args
    run: Any = step_kernel.step
    return run(mixer, recurrent, layer, *rest, K, interpret=interpret, **state)


def same(x, y):
    """With == on a GPU. On a CPU, XLA contracts products in what the interpreter made of row 0 otherwise than in a loop's rows."""
    if on_gpu:
        np.testing.assert_array_equal(x, y)
    else:
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@functools.partial(jax.jit, static_argnums=1)
def twin_step(args: Any, K):
    mixer, state, *rest = args
    run: Any = twin.step
    return run(mixer, state, 1, *rest, K)


# ---- the gated delta rule's step ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "K", "base", "pending", "n_rows"),
    [
        ("small-1", 1, [0], [0], [1]),  # the first token: the convolution reaches before position 0
        long("small-1", 3, [1, 40], [1, 0], [3, 2]),
        ("small-2", 3, [7, 9], [4, 5], [1, 0]),  # a block of the journal, and one more; a sequence without rows
        ("small-3", 5, [6, 3], [5, 3], [5, 4]),  # the rings of 10 and 13 places wrap around in both parts
        long("small-4", 5, [98, 11], [0, 4], [2, 5]),
    ],
)
def test_step_equals_its_twin_and_touches_nothing_else(name, K, base, pending, n_rows):
    shape = gated.SMALL[name]
    args = gated.step_arrays(
        shape, K, base=base, pending=pending, n_rows=n_rows, layer=1, max_rows=5, dtype=jnp.float32, garbage=True
    )
    out, state = step(args, K)
    want, want_state = twin_step(args, K)
    before = args[1]
    assert np.isfinite(out).all()
    untouched: Any = Recurrent(*jax.tree.map(lambda x: np.ones(x.shape, bool), tuple(state)))
    for b in range(len(base)):
        slot, start = b + 1, base[b] + pending[b]
        rows = slice(b * K, b * K + n_rows[b])
        np.testing.assert_allclose(out[rows], want[rows], **CLOSE)
        assert not np.asarray(out[b * K + n_rows[b] : (b + 1) * K]).any()
        np.testing.assert_allclose(state.h[1, slot], want_state.h[1, slot], **CLOSE)
        untouched.h[1, slot] = False
        at = start + np.arange(n_rows[b])
        for name, written in untouched._asdict().items():
            if name != "h":
                ring, wanted = getattr(state, name), getattr(want_state, name)
                places = at % ring.shape[2]
                np.testing.assert_allclose(ring[1, slot, places], wanted[1, slot, places], **CLOSE, err_msg=name)
                written[1, slot, places] = False
    assert not np.asarray(out[len(base) * K :]).any()
    for same, x, y in zip(untouched, state, before, strict=True):
        np.testing.assert_array_equal(np.asarray(x)[same], np.asarray(y)[same])


def test_step_rounds_to_bfloat16_where_its_twin_does():
    shape, K = gated.SMALL["small-3"], 3
    args = gated.step_arrays(shape, K, base=[20], pending=[2], n_rows=[3], layer=1, garbage=True)
    (out, state), (want, want_state) = step(args, K), twin_step(args, K)
    np.testing.assert_allclose(out[:K], want[:K], rtol=2e-2, atol=2e-3)  # one rounding may fall to the other side
    np.testing.assert_array_equal(state.conv[1, 1, 22:25], want_state.conv[1, 1, 22:25])


def test_rows_of_a_step_together_equal_rows_one_by_one_whatever_was_accepted():
    shape, K, base = gated.SMALL["small-2"], 3, 7
    mixer, state, slots, _, _, _, projected = gated.step_arrays(
        shape, K, base=[base], pending=[0], n_rows=[K], layer=1, max_rows=5, dtype=jnp.float32, garbage=True
    )
    number = lambda *x: jnp.asarray(x, jnp.int32)  # noqa: E731

    def run(state, at, pending, rows, first, K):
        given = jnp.roll(projected, -first, axis=0)
        args = mixer, state, 1, slots, number(at), number(pending), number(rows), given, K
        return step_kernel.step(*args, interpret=interpret)

    singles, outs, alone = [], [], state
    for t in range(K + 1):
        out, alone = run(alone, base + max(t - 1, 0), min(t, 1), 1, t % K, 1)
        outs.append(np.asarray(out[0]))
        singles.append(alone)
    together, after = run(state, base, 0, K, 0, K)
    same(together[:K], np.stack(outs[:K]))
    for accepted in (1, 2, 3):
        out, then = run(after, base, accepted, 1, accepted % K, 1)
        same(out[0], outs[accepted])
        same(then.h[1, 1], singles[accepted].h[1, 1])
        for ring, wanted in zip(then[1:], singles[accepted][1:], strict=True):
            place = 1, 1, (base + accepted) % ring.shape[2]
            same(ring[place], wanted[place])


def test_the_fold_alone_equals_that_of_a_step():
    args = gated.step_arrays(
        gated.SMALL["small-3"], 1, base=[6, 3], pending=[5, 2], n_rows=[0, 1], layer=1, max_rows=5, garbage=True
    )
    _, state, slots, base, pending, *_ = args
    of_slots = Recurrent(*(x[1, slots] for x in state))
    folded = step_kernel.fold(of_slots.h, Journal(*of_slots[2:]), base, pending, interpret=interpret)
    same(step(args, 1)[1].h[1, slots], folded)


@pytest.mark.long
def test_how_wide_a_program_is_changes_no_bit():
    """With == on a GPU. It depends on the number of sequences, and a sequence must not notice its neighbours."""
    same = (
        np.testing.assert_array_equal if on_gpu else functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    )
    shape, K = gated.Shape(1, 3, 128, 128, layers=2) if on_gpu else gated.SMALL["small-3"], 5
    args = gated.step_arrays(shape, K, base=[6, 3], pending=[5, 3], n_rows=[5, 4], layer=1, max_rows=5, garbage=True)
    narrow, wide = (jax.tree.map(np.asarray, step(args, K, columns=columns)) for columns in (32, 64))
    same(narrow[0], wide[0])
    for name, x, y in zip(Recurrent._fields, narrow[1], wide[1], strict=True):
        same(x[1, 1:3].astype(np.float32), y[1, 1:3].astype(np.float32), err_msg=name)


# ---- the gated delta rule's prefill ------------------------------------------------------------------------------------


def recurrence(state, q, k, v, log_decay, beta):
    """The rule itself, in float64, of one sequence."""
    state, q, k, v, log_decay, beta = (np.asarray(x, np.float64) for x in (state, q, k, v, log_decay, beta))
    q, k = (np.repeat(x, v.shape[1] // x.shape[1], axis=1) for x in (q, k))
    out = np.zeros(v.shape)
    for t in range(v.shape[0]):
        kept = np.exp(log_decay[t])[:, None, None] * state
        u = beta[t][:, None] * (v[t] - np.einsum("hvk,hk->hv", kept, k[t]))
        state = kept + u[:, :, None] * k[t][:, None, :]
        out[t] = np.einsum("hvk,hk->hv", state, q[t])
    return out, state


def relative(x, want):
    return np.linalg.norm(np.asarray(x, np.float64) - want) / np.linalg.norm(want)


def rows_of(args, s):
    """The rows of sequence s of a ragged batch."""
    begin, n = int(args[-2][s]) * 64, int(args[-1][s])
    return slice(begin, begin + n)


def prefill(run, state, *rest):
    """Of layer 1 of a state that is given of one."""
    out, state = run(jnp.concatenate([jnp.full_like(state, jnp.nan), state]), 1, *rest)
    assert np.isnan(state[0]).all()
    return out, state[1]


PREFILLS = {
    "kernel": functools.partial(prefill, functools.partial(triton_prefill.prefill, interpret=interpret)),
    "twin": jax.jit(functools.partial(gated_api.prefill, implementation="reference"), static_argnums=1),
}
PREFILLS["twin"] = functools.partial(prefill, PREFILLS["twin"])


@pytest.mark.parametrize(
    ("name", "n_rows", "T", "hard"),
    [
        ("small-3", [150], 150, False),
        ("small-2", [67, 0, 1], None, False),
        ("small-1", [1], 1, False),
        long("small-4", [128], None, True),
    ],
)
def test_prefill_equals_the_recurrence_in_float64(name, n_rows, T, hard):
    args = gated.prefill_arrays(gated.SMALL[name], n_rows, T, hard=hard)
    out, state = PREFILLS["kernel"](*args)
    (initial,), slots, *rows, _, _ = args
    for s, slot in enumerate(slots.tolist()):
        mine = rows_of(args, s)
        if not n_rows[s]:
            np.testing.assert_array_equal(state[slot], initial[slot])
            continue
        want, want_state = recurrence(initial[slot], *(x[mine] for x in rows))
        # The state keeps 16 bits of every factor; the output is read in bfloat16.
        assert relative(state[slot], want_state) < 1e-4
        # In the hard system updates alternate and nearly cancel in the sum, which their rounding does not: 1.23e-2 measured.
        assert relative(out[mine], want) < (2e-2 if hard else 1e-2)


@pytest.mark.parametrize("which", PREFILLS)
def test_a_sequence_of_a_ragged_prefill_does_not_know_its_neighbours(which):
    """Its bits are the same beside others, alone, and in another place; slots that have no rows keep theirs."""
    n_rows, T = [65, 1, 63, 64, 0], 5 * 64
    args = gated.prefill_arrays(gated.SMALL["small-1"], n_rows, T)
    (initial,), slots, *rows, begin, count = args
    out, state = PREFILLS[which](*args)
    assert relative(out[rows_of(args, 0)], recurrence(initial[1], *(x[:65] for x in rows))[0]) < 1e-2
    for kept in (0, 5):
        np.testing.assert_array_equal(state[kept], initial[kept])
    others: list[Any] = [(begin, count * (np.arange(5) == s)) for s in range(4)] + [([1, 4, 3, 0, 3], count)]
    for where, many in others:
        placed = [np.zeros(x.shape, x.dtype) for x in rows]
        here: Any = (*args[:-2], jnp.asarray(where, jnp.int32), jnp.asarray(many, jnp.int32))
        for s in range(5):
            for old, new in zip(rows, placed, strict=True):
                new[rows_of(here, s)] = np.asarray(old)[rows_of(args, s)][: int(many[s])]
        got, after = PREFILLS[which](args[0], slots, *map(jnp.asarray, placed), *here[-2:])
        for s in np.flatnonzero(many):
            np.testing.assert_array_equal(got[rows_of(here, s)], out[rows_of(args, s)], err_msg=f"sequence {s}")
            np.testing.assert_array_equal(after[slots[s]], state[slots[s]], err_msg=f"sequence {s}")


# ---- paged attention ---------------------------------------------------------------------------------------------------


def attend(given, K, first=0, **tuning):
    q, pages, *rest = given
    return attention_kernel.attend(q, pages, 0, *rest, K, first=first, row_group=1, interpret=interpret, **tuning)


def assert_attends(given, K, first, dtype, **tuning):
    q, pages, table, start, n_rows = given
    out = attend(given, K, first, **tuning)
    want = paged_twin.attend(q, pages, 0, table, start, n_rows, K, first=first, row_group=4)
    # bfloat16 products of scores and weights, against float32 ones
    close = CLOSE if dtype == jnp.float32 else dict[str, Any](rtol=2e-2, atol=2e-2)
    for b, n in enumerate(n_rows.tolist()):
        rows = slice(b * K, b * K + n)
        got, wanted = (np.asarray(x[rows], np.float32) for x in (out, want))
        np.testing.assert_allclose(got, wanted, **close, err_msg=f"sequence {b}")
    assert not np.asarray(out[len(n_rows) * K :]).any()


@pytest.mark.parametrize(
    ("name", "K", "start", "n_rows", "first", "dtype"),
    [
        ("small-4", 1, [0, 63], [1, 1], 0, jnp.float32),
        ("small-2", 3, [31, 150], [3, 1], [1, 0], jnp.float32),
        ("small-4", 5, [70, 30], [5, 2], [1, 40], jnp.float32),  # 20 rows: two tiles; a whole unit is hidden
        ("small-4", 9, [129, 5], [9, 0], 1, jnp.bfloat16),  # 36 rows: two programs; a sequence without rows
        ("pages of 48", 2, [47, 100], [2, 1], 0, jnp.float32),
    ],
)
def test_attention_of_few_rows_equals_its_twin_whatever_lies_where_nobody_looks(name, K, start, n_rows, first, dtype):
    given, _ = paged.arrays(paged.SMALL[name], K, start=start, n_rows=n_rows, first=first, dtype=dtype, garbage=True)
    hidden = jnp.asarray(first, jnp.int32) if isinstance(first, list) else first
    assert_attends(given, K, hidden, dtype, programs=2)


def chunk_of(name, start, n_rows, begin, T, **options):
    """Arguments of a ragged batch: q [T, …] whose padding is NaN, pages that hold NaN where nobody looks, and the rest."""
    longest = max(n_rows)
    given, _ = paged.arrays(paged.SMALL[name], longest, start=start, n_rows=n_rows, garbage=True, **options)
    q, pages, table, at, count = given
    ragged = np.full((T, *q.shape[1:]), np.nan, np.float32)
    for s, n in enumerate(n_rows):
        ragged[begin[s] * 64 : begin[s] * 64 + n] = q[s * longest : s * longest + n]
    return jnp.asarray(ragged, q.dtype), pages, 0, table, at, jnp.asarray(begin, jnp.int32), count


CHUNKS = {
    "kernel": functools.partial(attention_kernel_prefill.attend_ragged, interpret=interpret, rows=32),
    "twin": jax.jit(functools.partial(paged_api.attend_ragged, implementation="reference"), static_argnums=2),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [("small-4", jnp.float32), ("small-4", jnp.bfloat16), ("pages of 48", jnp.float32)]
)
def test_attention_of_a_ragged_chunk_equals_its_twin_and_does_not_know_its_neighbours(name, dtype):
    start, n_rows, begin, T = [37, 0, 5], [70, 23, 0], [1, 0, 0], 190
    args = chunk_of(name, start, n_rows, begin, T, dtype=dtype)
    q, pages, layer, table, *_ = args
    outs = {which: run(*args) for which, run in CHUNKS.items()}
    # bfloat16 products of scores and weights, against float32 ones
    close = CLOSE if dtype == jnp.float32 else dict[str, Any](rtol=2e-2, atol=2e-2)
    for s, n in enumerate(n_rows):
        mine = slice(begin[s] * 64, begin[s] * 64 + n)
        given = q[mine], pages, 0, table[s : s + 1], *(jnp.asarray([x[s]], jnp.int32) for x in (start, n_rows))
        twin_attend: Any = paged_twin.attend
        want = twin_attend(*given, n, first=0, row_group=4) if n else q[mine]
        for which, out in outs.items():
            got, wanted = (np.asarray(x, np.float32) for x in (out[mine], want))
            np.testing.assert_allclose(got, wanted, **close, err_msg=f"{which}, sequence {s}")
    assert not np.asarray(outs["twin"][128 + 7 :], np.float32).any()
    moved = jnp.roll(q.at[:23].set(jnp.nan), -64, axis=0)
    for which, run in CHUNKS.items():
        where: Any = [jnp.asarray(x, jnp.int32) for x in (start, [0, 0, 0], [70, 0, 0])]
        alone = run(moved, pages, layer, table, *where)
        np.testing.assert_array_equal(np.asarray(alone[:70]), np.asarray(outs[which][64:134]), err_msg=which)


def test_the_write_of_a_ragged_chunk_writes_its_rows_and_nothing_else():
    shape = paged.SMALL["small-4"]
    start, n_rows, begin = [30, 64], [70, 3], [1, 0]
    _, pages, _, table, at, begins, count = chunk_of("small-4", start, n_rows, begin, 140)
    k, v = (np.random.default_rng(i).normal(size=(140, 1, 32)).astype(np.float32) for i in range(2))
    want, tables = [np.array(x) for x in pages], np.asarray(table)
    for s, n in enumerate(n_rows):
        for t in range(n):
            page, offset = tables[s, (start[s] + t) // shape.page_size], (start[s] + t) % shape.page_size
            want[0][1, page, :, :, offset] = k[begin[s] * 64 + t]
            want[1][1, page, :, offset] = v[begin[s] * 64 + t]
    write: Any = paged_api.write_ragged
    got = write(pages, 1, jnp.asarray(k), jnp.asarray(v), table, at, begins, count, implementation="reference")
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x[:, 1:], y[:, 1:])


def test_attention_of_rows_together_equals_rows_one_by_one():
    K, start = 9, 60
    given, _ = paged.arrays(paged.SMALL["small-4"], K, start=[start], n_rows=[K], garbage=True)
    q, pages, table, _, _ = given
    together = attend(given, K, programs=2)
    one = jnp.ones(1, jnp.int32)
    for t in range(K):
        alone = attend((jnp.roll(q, -t, axis=0), pages, table, one * (start + t), one), 1, programs=2)
        np.testing.assert_array_equal(alone[0], together[t])


def test_attention_sees_a_nan_that_it_should_see():
    given, _ = paged.arrays(paged.SMALL["small-4"], 2, start=[40], n_rows=[2])
    q, pages, table, *rest = given
    broken = pages._replace(values=pages.values.at[0, table[0, 41 // 32], 0, 41 % 32].set(jnp.nan))
    out = attend((q, broken, table, *rest), 2, programs=2)
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()
    chunk = jnp.zeros((64, *q.shape[1:]), q.dtype).at[:2].set(q[:2])
    for run in CHUNKS.values():
        out = run(chunk, broken, 0, table, rest[0], jnp.zeros(1, jnp.int32), rest[1])
        assert np.isfinite(out[0]).all()
        assert np.isnan(out[1]).all()


def test_write_equals_its_twin_and_writes_nothing_else():
    K, start, n_rows = 5, [30, 64], [4, 0]
    given, (k, v) = paged.arrays(paged.SMALL["small-2"], K, start=start, n_rows=n_rows, garbage=True)
    _, pages, table, *rest = given
    args: Any = (1, k, v, table, *rest, K)
    got = attention_kernel.write(pages, *args, interpret=interpret)
    want = paged_twin.write(pages, *args)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x[:, 1:], y[:, 1:])


def test_eight_bit_pages_equal_their_twin():
    """What is written is the same to the bit; what is read of it goes through products of bfloat16 instead of float32."""
    K, start, n_rows = 5, [30, 64], [4, 5]
    options: Any = dict(start=start, n_rows=n_rows, dtype=jnp.bfloat16, kv_dtype=jnp.float8_e4m3fn)
    given, (k, v) = paged.arrays(paged.SMALL["small-2"], K, garbage=True, **options)
    q, pages, table, *rest = given
    args: Any = (1, 200 * k, v, table, *rest, K)  # some beyond what eight bits hold
    got, want = attention_kernel.write(pages, *args, interpret=interpret), paged_twin.write(pages, *args)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(x[:, 1:]).view(np.uint8), np.asarray(y[:, 1:]).view(np.uint8))
    out = attend(given, K)
    twin_attend: Any = paged_twin.attend
    exact = twin_attend(q, pages, 0, table, *rest, K, first=0, row_group=4)
    for b, n in enumerate(n_rows):
        a, w = (np.asarray(x[b * K : b * K + n], np.float32) for x in (out, exact))
        np.testing.assert_allclose(a, w, rtol=2e-2, atol=2e-2)


# ---- narrow products ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("R", "K", "N"), [(1, 128, 1), (3, 256, 40), (16, 640, 96)])
def test_a_narrow_product_equals_the_librarys(R, K, N):
    x, weight = rows_and_stack(R, K, N)
    assert narrow.fits(x, weight, 1, False)
    got = narrow.linear(x, weight, 1, interpret=interpret)
    want = np.asarray(x, np.float64) @ np.asarray(weight[1], np.float64)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)  # both exact products, summed in another order


def test_rows_of_a_narrow_product_are_the_same_in_any_company_and_those_that_pad_are_left_out():
    x, weight = rows_and_stack(16, 256, 40)
    together = np.asarray(narrow.linear(x, weight, 0, interpret=interpret))
    for R in (1, 5, 16):
        np.testing.assert_array_equal(narrow.linear(x[-R:], weight, 0, interpret=interpret), together[-R:])
    with at_most(3):
        few = narrow.linear(x, weight, 0, interpret=interpret)
    np.testing.assert_array_equal(few[:3], together[:3])
    assert few.shape == together.shape and not np.asarray(few[3:]).any()


def rows_and_stack(R, K, N):
    x, weight = jax.random.normal(jax.random.key(0), (R, K)), jax.random.normal(jax.random.key(1), (2, K, N))
    return x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)
