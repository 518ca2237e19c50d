"""Products with packed weights: against float64, bit for bit between row counts, and noticing the smallest change of a weight."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import linear, w4a16
from pallas_kernels.rows import at_most, by_row_group
from pallas_kernels.w4a16 import reference, triton, triton_experts, triton_prefill
from pallas_kernels.w4a16.forms import Fp8, Int4, Nvfp4
from pallas_kernels.w4a16.pack import blocks, group_rows, pack_nibbles

on_gpu = jax.default_backend() == "gpu"
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SIZES = ((64, 48), (200, 37), (384, 130))  # inputs, outputs
KINDS = ("int4 g32", "int4 g64", "int4 g128 zeros", "int4 g64 order", "nvfp4", "fp8", "fp8 blocks")


def long(*values):
    """A case for `make test-all` alone: the interpreter's programs take seconds each to compile."""
    return pytest.param(*values, marks=pytest.mark.long)


def bits_of(x: np.ndarray) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


@functools.cache
def packed(kind: str, K: int, N: int, lead: tuple[int, ...] = ()):
    """A packed weight and, in float64, what it stands for: [..., K, N]."""
    rng = np.random.default_rng(K + N)
    shape = (*lead, N, K)
    if kind.startswith("int4"):
        group = int(kind.split()[1][1:])
        groups = -(-K // group)
        codes = rng.integers(0, 16, shape, np.uint8)
        scales = rng.uniform(0.01, 0.02, (*lead, N, groups)).astype(jnp.bfloat16)
        zeros = rng.integers(0, 16, (*lead, N, groups), np.uint8) if "zeros" in kind else None
        wide = lambda x: np.repeat(x.astype(np.float64), group, axis=-1)[..., :K]  # noqa: E731
        values = (codes - (8.0 if zeros is None else wide(zeros))) * wide(scales)
        order = None
        if "order" in kind:
            order = rng.permuted(np.tile(np.arange(K, dtype=np.int32), (*lead, 1)), axis=-1)
            values = np.take_along_axis(values, np.argsort(order)[..., None, :], axis=-1)
        rows = None if zeros is None else group_rows(zeros, group, K)
        form = Int4(pack_nibbles(codes), group_rows(scales, group, K), rows, order)
    elif kind == "nvfp4":
        codes = rng.integers(0, 16, shape, np.uint8)
        scales = rng.uniform(0.1, 2, (*lead, N, -(-K // 16))).astype(jnp.float8_e4m3fn)
        scale = rng.uniform(0.01, 0.02, (*lead, N)).astype(np.float32)
        values = FP4[codes] * np.repeat(scales.astype(np.float64), 16, axis=-1)[..., :K] * scale[..., None]
        form = Nvfp4(pack_nibbles(codes), group_rows(bits_of(scales), 16, K), scale)
    else:
        codes = rng.normal(size=shape).astype(jnp.float8_e4m3fn)
        group = 128 if "blocks" in kind else K
        scales = rng.uniform(0.01, 0.02, (*lead, N, -(-K // group))).astype(np.float32)
        values = codes.astype(np.float64) * np.repeat(scales, group, axis=-1)[..., :K]
        rows = group_rows(scales, group, K) if "blocks" in kind else np.swapaxes(scales, -1, -2)
        form = Fp8(blocks(bits_of(codes)), rows)
    return jax.tree.map(jnp.asarray, form), np.swapaxes(values, -1, -2)


def rows_of(R: int, K: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(R).normal(size=(R, K)), dtype)


def bound(x: jax.Array | np.ndarray, values: np.ndarray) -> np.ndarray:
    """Of the rounding of float32 sums: a few units in the last place of the sum of sizes."""
    return 4e-6 * (np.abs(np.asarray(x, np.float64)) @ np.abs(values)) + 1e-30


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("K, N", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_product(kind, K, N, dtype):
    weight, values = packed(kind, K, N)
    x = rows_of(5, K, dtype)
    expected = np.asarray(x, np.float64) @ values
    got = np.asarray(w4a16.product(x, weight), np.float64)
    assert (np.abs(got - expected) <= bound(x, values)).all()
    whole = np.asarray(w4a16.dequantise(weight, None, K, "float32"), np.float64)
    np.testing.assert_allclose(whole, values, rtol=3e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_of_a_stack(kind):
    weight, values = packed(kind, 200, 37, (3,))
    x = rows_of(2, 200)
    for layer in range(3):
        got = np.asarray(linear.linear(x, weight, layer), np.float64)
        assert (np.abs(got - np.asarray(x, np.float64) @ values[layer]) <= bound(x, values[layer])).all()


def rows_agree(kind: str, K: int, N: int, group: int, counts: tuple[int, ...]) -> None:
    weight, _ = packed(kind, K, N)
    product = jax.jit(lambda x, n: by_row_group(lambda y: w4a16.product(y, weight), group, n, x))
    x = rows_of(16, K)
    alone = np.concatenate([product(x[r : r + 1], jnp.int32(1)) for r in range(16)])
    for R in counts:
        np.testing.assert_array_equal(product(x[:R], jnp.int32(R)), alone[:R])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_together_equal_rows_alone(kind):
    rows_agree(kind, 200, 37, 8, (3, 16))


@pytest.mark.long
@pytest.mark.parametrize("group", (1, 8))
@pytest.mark.parametrize("K, N", SIZES[1:])
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_rows_equals_rows_alone(kind, K, N, group):
    rows_agree(kind, K, N, group, tuple(range(2, 17)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_smallest_change_of_a_weight_is_noticed(kind):
    """One code, and one scale by one unit in its last place, change the column that they belong to and no other."""
    K, N = 200, 37
    weight, _ = packed(kind, K, N)
    x = rows_of(16, K)
    before = np.asarray(w4a16.product(x, weight))
    for name in ("codes", "scales", *(("scale",) if kind == "nvfp4" else ())):
        held = np.array(getattr(weight, name))
        at = (0, 5, 3) if name == "codes" else (5,) if name == "scale" else (0, 5)
        bits = held.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[held.itemsize])
        bits[at] ^= 1
        after = np.asarray(w4a16.product(x, dataclasses.replace(weight, **{name: jnp.asarray(held)})))
        assert (after[:, 5] != before[:, 5]).any(), name
        np.testing.assert_array_equal(np.delete(after, 5, 1), np.delete(before, 5, 1))


@pytest.mark.parametrize("kind", ("int4 g32", "nvfp4", "fp8 blocks"))
def test_experts(kind):
    E, K, N = 4, 200, 37
    weight, values = packed(kind, K, N, (2, E))
    x, experts = rows_of(3, K), jnp.asarray([[3, 0], [0, 2], [3, 1]])
    by_pair = linear.by_expert(x, weight, experts, 1)
    own = jnp.stack([rows_of(4, K)[:3], rows_of(5, K)[:3]], axis=1)
    for inputs, out in ((x, by_pair), (own, linear.by_expert(own, weight, experts, 1))):
        for r, e in np.ndindex(3, 2):
            row, of = inputs[r] if inputs.ndim == 2 else inputs[r, e], values[1, experts[r, e]]
            got = np.asarray(out[r, e], np.float64)
            assert (np.abs(got - np.asarray(row, np.float64) @ of) <= bound(row, of)).all()
    for r in range(3):
        np.testing.assert_array_equal(by_pair[r], linear.by_expert(x[r : r + 1], weight, experts[r : r + 1], 1)[0])
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=E).astype(jnp.int32)
    grouped = linear.grouped(jnp.repeat(x, 2, axis=0)[order], weight, sizes, 1)
    np.testing.assert_allclose(grouped, by_pair.reshape(6, N)[order], atol=2e-4)


# ---- the GPU's kernels, by Pallas' interpreter -------------------------------------------------------------------------


@pytest.mark.parametrize("K, N, columns, programs", ((200, 130, 64, 4), long(384, 130, 128, 5), long(64, 37, 64, 1)))
@pytest.mark.parametrize("kind", KINDS)
def test_kernel(kind, K, N, columns, programs):
    """Programs with parts of tiles, tiles that are not whole, inputs that do not fill their last block."""
    weight, values = packed(kind, K, N)
    x = rows_of(5, K, "bfloat16")
    got = triton.product(x, weight, None, columns=columns, programs=programs, interpret=not on_gpu)
    assert (np.abs(np.asarray(got, np.float64) - np.asarray(x, np.float64) @ values) <= bound(x, values)).all()


@pytest.mark.parametrize("kind", ("int4 g128 zeros", long("nvfp4"), long("fp8")))
def test_kernel_rows_together_equal_rows_alone(kind):
    weight, _ = packed(kind, 200, 37)
    x = rows_of(16, 200, "bfloat16")
    run = functools.partial(triton.product, weight=weight, layer=None, columns=64, programs=2, interpret=not on_gpu)
    whole = run(x)
    eight = run(x[-8:])
    for rows, full in (((1, 3, 8), eight), ((9, 16), whole)):
        for R in rows:
            np.testing.assert_array_equal(run(x[-R:]), full[-R:])
    # On a CPU the interpreter's products of eight and of sixteen rows are the library's, which are not the same row by row.
    same = np.testing.assert_array_equal if on_gpu else functools.partial(np.testing.assert_allclose, atol=1e-6)
    same(eight, whole[-8:])
    with at_most(3):  # the others pad a bucket
        few = run(x)
    same(few[:3], whole[:3])
    assert few.shape == whole.shape and not np.asarray(few[3:]).any()


def close(got, row, values):
    """Within the rounding of each weight to bfloat16, which is as random as they are: six standard deviations of its sum."""
    row = np.asarray(row, np.float64)
    slack = 6 * 2.0**-9 * np.sqrt(row**2 @ values**2)
    return (np.abs(np.asarray(got, np.float64) - row @ values) <= bound(row, values) + slack).all()


EXPERTS = ("int4 g128 zeros", "plain", *map(long, ("int4 g64", "nvfp4", "fp8", "fp8 blocks")))


def experts_of(kind, E, K, N):
    """Two layers of experts, packed or plain, and their values."""
    if kind != "plain":
        return packed(kind, K, N, (2, E))
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(2, E, K, N)), jnp.bfloat16)
    return weight, np.asarray(weight, np.float64)


@pytest.mark.parametrize("kind", EXPERTS)
def test_kernel_of_experts(kind):
    E, K, N = 5, 256, 130
    rng = np.random.default_rng(0)
    weight, values = experts_of(kind, E, K, N)
    experts = jnp.asarray([rng.permutation(E)[:3] for _ in range(5)], jnp.int32)
    for x in (rows_of(5, K, "bfloat16"), rows_of(15, K, "bfloat16").reshape(5, 3, K)):
        got = np.asarray(triton_experts.expert_product(x, weight, experts, 1, interpret=not on_gpu), np.float64)
        for r, j in np.ndindex(5, 3):
            row, of = x[r] if x.ndim == 2 else x[r, j], values[1, experts[r, j]]
            assert (np.abs(got[r, j] - np.asarray(row, np.float64) @ of) <= bound(row, of)).all()
        alone = triton_experts.expert_product(x[2:3], weight, experts[2:3], 1, interpret=not on_gpu)
        np.testing.assert_array_equal(alone[0], got[2].astype(np.float32))
        with at_most(2):
            few = np.asarray(triton_experts.expert_product(x, weight, experts, 1, interpret=not on_gpu))
        np.testing.assert_array_equal(few[:2], got[:2].astype(np.float32))
        assert few.shape == got.shape and not few[2:].any()


@pytest.mark.parametrize("kind", EXPERTS)
def test_kernel_of_rows_sorted_by_expert(kind):
    """Experts without rows, with fewer than a tile holds and with more; where rows stand changes no bit of them."""
    E, K, N = 5, 256, 130
    weight, values = experts_of(kind, E, K, N)
    run = jax.jit(functools.partial(triton_prefill.grouped_product, rows=16, interpret=not on_gpu))
    same = np.testing.assert_array_equal if on_gpu else functools.partial(np.testing.assert_allclose, atol=1e-5)
    x = rows_of(40, K, "bfloat16")
    before = None
    for sizes in ([0, 5, 1, 33, 1], [5, 1, 33, 1, 0], [0, 40, 0, 0, 0]):
        got = np.asarray(run(x, weight, jnp.asarray(sizes, jnp.int32), 1))
        assert got.shape == (40, N)
        of = np.repeat(np.arange(E), sizes)
        for r, e in enumerate(of):
            assert close(got[r], x[r], values[1, e])
        if before is not None:
            again = before[0] == of
            same(got[again], before[1][again])
        before = of, got
    moved = np.asarray(run(jnp.roll(x, 7, 0), weight, jnp.asarray([0, 40, 0, 0, 0], jnp.int32), 1))
    same(np.roll(moved, -7, 0), got)


@pytest.mark.parametrize(
    "kind", ("int4 g128 zeros", *map(long, ("int4 g32", "int4 g64", "nvfp4", "fp8", "fp8 blocks")))
)
def test_kernels_of_many_rows(kind):
    """Tiles that rows do not fill, inputs in parts; and the weight that more rows are multiplied by is the twin's to the bit."""
    weight, values = packed(kind, 200, 130)
    stack = jax.tree.map(lambda leaf: leaf[None], weight)
    x, layer = jnp.pad(rows_of(70, 200, "bfloat16"), ((0, 0), (0, 56))), jnp.zeros(1, jnp.int32)
    got = triton_prefill.product(x, stack, layer, rows=64, parts=2, interpret=not on_gpu)
    for r in range(70):
        assert close(got[r], x[r, :200], values)
    decoded = triton_prefill.decoded(stack, layer, interpret=not on_gpu)
    np.testing.assert_array_equal(decoded, reference.whole_rows(stack, 0, jnp.bfloat16))


def test_forms_side_by_side_and_by_layer():
    one, _ = packed("int4 g32", 200, 37)
    other, _ = packed("nvfp4", 200, 48)
    plain = jnp.asarray(np.random.default_rng(0).normal(size=(200, 3)), jnp.float32)
    x = rows_of(4, 200)
    both = linear.linear(x, w4a16.SideBySide((one, plain, other)))
    assert both.shape == (4, 88)
    parts = [linear.linear(x, w) for w in (one, plain, other)]
    np.testing.assert_array_equal(both, np.concatenate(parts, axis=1))
    stack = lambda w: jax.tree.map(lambda leaf: leaf[None], w)  # noqa: E731
    layers = w4a16.ByLayer((stack(one), stack(packed("fp8", 200, 37)[0])), ((1, 0), (0, 0)))
    np.testing.assert_array_equal(linear.linear(x, layers, 1), parts[0])
    np.testing.assert_array_equal(linear.linear(x, (other, one), 1), parts[0])
