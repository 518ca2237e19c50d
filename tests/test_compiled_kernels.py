"""The GPU kernels, compiled for an H200 and a GB10 over the named shapes: what they spill, need and load, what stays in place."""

from __future__ import annotations

import functools
import re
from typing import Any

import deviceless
import jax
import jax.numpy as jnp
import pytest
from deviceless import CAPTURE, assert_fits, assert_in_place, assert_wide_loads, compile_for

from atlas_jax.models.layers import rms_norm
from pallas_kernels import linear, w4a16
from pallas_kernels.gated_delta import arg_specs as gated
from pallas_kernels.gated_delta import triton as step_kernel
from pallas_kernels.gated_delta import triton_prefill
from pallas_kernels.gated_delta.forms import Journal
from pallas_kernels.paged_attention import arg_specs as paged
from pallas_kernels.paged_attention import triton as attention_kernel
from pallas_kernels.paged_attention import triton_prefill as attention_prefill
from pallas_kernels.registry import GPU_OPTIONS
from pallas_kernels.rows import by_row_group
from pallas_kernels.w4a16 import triton_prefill as packed_prefill

pytestmark = pytest.mark.skipif(deviceless.packages() is None, reason=deviceless.MISSING)
FP8 = jnp.float8_e4m3fn


def cases(*quick: tuple, every: tuple = ()):
    """Targets, shapes and rows; those not among the quick ones are left to `make test-all`."""
    rest = [(target, "27b", K) for target in ("h200", "gb10") for K in (1, 4, 17)]
    rest += [("h200", "35b-a3b", 4), ("gb10", "tiny-agent", 17)]
    rest = [pytest.param(*case, marks=pytest.mark.long) for case in every or rest if case not in quick]
    return pytest.mark.parametrize(("target", "name", "K"), [*quick, *rest])


SEQUENCES = 4  # of a ragged batch
PREFILLS = tuple((target, name, 2048) for target in ("h200", "gb10") for name in ("27b", "35b-a3b"))


def step(K, mixer, state, *rest):
    return step_kernel.step(mixer, state, 1, *rest, K)


def fold(*args):
    return step_kernel.fold(*args)


def attend(K, q, pages, *rest):
    return attention_kernel.attend(q, pages, 1, *rest, K, first=0, row_group=16)


def chunk(shape: paged.Shape, T: int, context: int = 8192, **options: Any) -> tuple[Any, ...]:
    """What the attention of a ragged batch takes, but for the layer."""
    _, pages, table, number, _ = paged.attend_specs(shape, SEQUENCES, 1, context, **options)
    return jax.ShapeDtypeStruct((T, shape.H, shape.Dh), jnp.bfloat16), pages, table, *[number] * 3


def write(K, pages, *rest):
    return attention_kernel.write(pages, 1, *rest, K)


def prefill(*args):
    state, *rest = args
    return triton_prefill.prefill(state, 0, *rest)


def attend_chunk(q, pages, *rest):
    return attention_prefill.attend_ragged(q, pages, 1, *rest)


@cases(("gb10", "27b", 17))
def test_the_step_fits_and_moves_its_state_sixteen_bytes_at_a_time_in_place(target, name, K):
    args = gated.step_specs(gated.SHAPES[name], 1, K)
    compiled = compile_for(target, functools.partial(step, K), *args, donate=(1,), compiler_options=CAPTURE)
    assert_fits(compiled)
    assert_in_place(compiled)
    (kernel,) = compiled.kernels("gated_delta_step*")
    assert_moves_a_tile(kernel, gated.SHAPES[name].Dk)
    # None in the loops over rows: before the rows' inputs are summed up, after it, and once they are all written.
    assert kernel.ptx.count("bar.sync") == 3
    assert kernel.ptx.count("fma.rn.f32") > 100


def assert_moves_a_tile(kernel: deviceless.Kernel, Dk: int) -> None:
    """Sixteen bytes at a time; so are vectors of keys and of columns."""
    words = step_kernel.COLUMNS * Dk // (step_kernel.WARPS * 32)
    for accesses in (kernel.loads, kernel.stores):
        assert 4 * accesses[16] >= words, f"of a thread's {words} words of the state, wide: {dict(accesses)}"


# ---- products with packed weights --------------------------------------------------------------------------------------


def packed(form: str) -> w4a16.Int4 | w4a16.Nvfp4 | w4a16.Fp8:
    L, blocks, N = 2, 40, 34816
    of = lambda dtype, *shape: jax.ShapeDtypeStruct((L, *shape), dtype)  # noqa: E731
    if form == "fp8":
        return w4a16.Fp8(of(jnp.uint8, blocks, N, 128), of(jnp.float32, 1, N))
    codes = of(jnp.uint8, blocks, N, 64)
    if form == "nvfp4":
        return w4a16.Nvfp4(codes, of(jnp.uint8, 8 * blocks, N), of(jnp.float32, N))
    groups = blocks * 128 // int(form[1:4])
    return w4a16.Int4(codes, of(jnp.bfloat16, groups, N), of(jnp.uint8, groups, N) if form.endswith("z") else None)


def product(x, weight):
    return w4a16.product(x, weight, 1)


def both_layers(x, weight):
    y = w4a16.product(x, weight, 0)
    return y + w4a16.product(x + y[:, :1].astype(x.dtype), weight, 1)


def of_experts(x, weight, sizes):
    return linear.grouped(x, weight, sizes, 1)


PRODUCTS = [("h200", "g128"), ("gb10", "nvfp4")]
MORE = [(t, form) for t in ("h200", "gb10") for form in ("g128", "g128z", "g064", "g032", "nvfp4", "fp8")]


@pytest.mark.parametrize(
    ("target", "form"), PRODUCTS + [pytest.param(*x, marks=pytest.mark.long) for x in MORE if x not in PRODUCTS]
)
def test_products_with_packed_weights_fit_and_load_sixteen_bytes_at_a_time(target, form):
    for rows in (16, 64) if target == "h200" else (16,):  # 64 are a product of another instruction there
        x = jax.ShapeDtypeStruct((rows, 5120), jnp.bfloat16)
        compiled = compile_for(target, product, x, packed(form))
        assert_fits(compiled)
        assert not compiled.copies()  # the layer is read out of its stack
        if rows == 16:
            assert_wide_loads(compiled, "w4a16_product*")


CHUNKS = [("h200", "g128"), ("gb10", "nvfp4")]


@pytest.mark.parametrize(
    ("target", "form"), CHUNKS + [pytest.param(*x, marks=pytest.mark.long) for x in MORE if x not in CHUNKS]
)
def test_products_of_chunks_fit_and_decode_one_layer_at_a_time(target, form):
    for rows, kernel in ((256, "w4a16_prefill*"), (2048, "w4a16_decode*")):
        x = jax.ShapeDtypeStruct((rows, 5120), jnp.bfloat16)
        compiled = compile_for(target, both_layers, x, packed(form), compiler_options=CAPTURE)
        assert_fits(compiled)
        assert compiled.kernels(kernel)
        assert not compiled.copies()
        layer = 2 * 34816 * 5120  # bytes, decoded
        assert compiled.temp_bytes < (1.9 if rows > 512 else 0.9) * layer


@pytest.mark.parametrize("target", ["h200", pytest.param("gb10", marks=pytest.mark.long)])
def test_experts_of_a_chunk_are_computed_by_those_who_chose_them(target):
    """No array of every row for every expert, which XLA's own product makes."""
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    plain = of(jnp.bfloat16, 2, 256, 2048, 1024)
    packed = w4a16.Int4(of(jnp.uint8, 2, 256, 16, 1024, 64), of(jnp.bfloat16, 2, 256, 16, 1024))
    for weight in (plain, packed):
        for rows in (2048, 16384):
            compiled = compile_for(target, of_experts, of(jnp.bfloat16, rows, 2048), weight, of(jnp.int32, 256))
            assert_fits(compiled)
            assert compiled.temp_bytes < 8 * rows * 2048


# ---- large arrays ------------------------------------------------------------------------------------------------------


def decoded(weight, layer):
    return packed_prefill.decoded(weight, layer)


def in_32_bits(compiled, stride):
    """Of each multiplication by a leading axis' stride, whether it is one of 32 bits."""
    ptx = "\n".join(kernel.ptx for kernel in compiled.pallas_kernels())
    found = re.findall(rf"(?:mul|mad)\.(\w+)\.[su](\d\d)[^;]*\b{stride}\b", ptx)
    assert found
    return {how != "wide" and width == "32" for how, width in found}


@pytest.mark.parametrize("target", ["h200", pytest.param("gb10", marks=pytest.mark.long)])
def test_offsets_into_large_arrays_of_bytes_have_64_bits(target):
    """Between 2^31 and 2^32 bytes, where 32 bits still count them but have no room for a sign; below, 32 bits are enough."""
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    x, layer, blocks, N = of(jnp.bfloat16, 16, 136 * 128), of(jnp.int32, 1), 136, 5120
    for layers, small in ((64, False), (40, True)):
        weight = w4a16.Int4(of(jnp.uint8, layers, blocks, N, 64), of(jnp.bfloat16, layers, blocks, N))
        for compiled in (compile_for(target, decoded, weight, layer), compile_for(target, product, x, weight)):
            assert in_32_bits(compiled, blocks * N * 64) == {small}
    pages, table, one = of(FP8, 17, 600, 4, 256, 256), of(jnp.int32, 1, 64), of(jnp.int32, 1)
    cache: Any = paged.Pages(pages, pages)  # pyright: ignore[reportArgumentType]
    rows, new = of(jnp.bfloat16, 16, 24, 256), of(jnp.bfloat16, 16, 4, 256)
    for function, args in ((attend, (rows, cache)), (write, (cache, new, new))):
        compiled = compile_for(target, functools.partial(function, 4), *args, table, one, one)
        assert in_32_bits(compiled, 600 * 4 * 256 * 256) == {False}


# ---- row groups --------------------------------------------------------------------------------------------------------


def layers(x, count, weight, norm):
    for _ in range(2):
        x = by_row_group(lambda y: y + times(rms_norm(y, norm, 1e-6), weight), 16, count, x)
    return x


def times(x, weight):
    return jax.lax.dot_general(x, weight, (((1,), (0,)), ((), ())), precision="highest")


def test_each_row_group_is_computed_as_one_alone_is():
    """XLA would join the norms of two groups in one fusion, whose sums are split otherwise: other bits than one group's."""
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    kinds = {}
    for R in (16, 32):
        rest = jax.ShapeDtypeStruct((), jnp.int32), of(64, 64), of(64)
        compiled = compile_for("h200", layers, of(R, 64), *rest, compiler_options=GPU_OPTIONS)
        entry = compiled.hlo[compiled.hlo.index("ENTRY") :]
        found = re.findall(r" = (\S+) (?:fusion|custom-call)\(.*?(kind=kCustom|kind=kInput|cublas)", entry)
        kinds[R] = sorted(found)
    assert kinds[16], "nothing was found to compare"
    assert kinds[32] == sorted(2 * kinds[16])


@pytest.mark.long
@pytest.mark.parametrize("name", ["ratio-1", "ratio-2", "ratio-3", "ratio-4"])
def test_the_step_fits_for_every_head_ratio(name):
    args = gated.step_specs(gated.SHAPES[name], 2, 4, slots=3)
    compiled = compile_for("gb10", functools.partial(step, 4), *args, donate=(1,), compiler_options=CAPTURE)
    assert_fits(compiled)
    assert_in_place(compiled)


@cases(("gb10", "27b", 17), every=(("h200", "27b", 17), ("gb10", "27b", 1), ("h200", "27b", 1)))
def test_the_fold_fits_and_moves_its_state_sixteen_bytes_at_a_time(target, name, K):
    shape = gated.SHAPES[name]
    _, state, _, base, *_ = gated.step_specs(shape, 1, K, max_rows=K)
    one: Any = lambda x: jax.ShapeDtypeStruct((1, *x.shape[2:]), x.dtype)  # noqa: E731
    journal = Journal(*(one(x) for x in state[2:]))
    compiled = compile_for(target, fold, one(state.h), journal, base, base, compiler_options=CAPTURE)
    assert_fits(compiled)
    assert_in_place(compiled)
    (kernel,) = compiled.kernels("gated_delta_fold*")
    assert_moves_a_tile(kernel, shape.Dk)
    assert "bar.sync" not in kernel.ptx


@cases(("gb10", "27b", 2048), every=PREFILLS)
def test_the_prefill_of_linear_layers_fits(target, name, K):
    args = gated.prefill_specs(gated.SHAPES[name], K, SEQUENCES)
    compiled = compile_for(target, prefill, *args, donate=(0,), compiler_options=CAPTURE)
    assert_in_place(compiled)
    if (
        target == "h200"
    ):  # with half the warps some registers spill there, which costs less than the barriers of twice as many
        for kernel in compiled.pallas_kernels():
            assert kernel.spill_bytes <= 512 and kernel.shared_bytes <= 227 * 1024
    else:
        assert_fits(compiled)
    assert_wide_loads(compiled, "gated_delta_scan*")


@cases(("gb10", "27b", 4))
def test_attention_fits_and_reads_sixteen_bytes_at_a_time(target, name, K):
    args = paged.attend_specs(paged.SHAPES[name], 1, K, 4096)
    compiled = compile_for(target, functools.partial(attend, K), *args, compiler_options=CAPTURE)
    assert_fits(compiled)
    assert_in_place(compiled)  # nothing is donated, and nothing copied
    assert_wide_loads(compiled, "paged_attention_partials*")


@cases(("gb10", "27b", 4), every=(("h200", "27b", 1), ("h200", "27b", 4), ("gb10", "27b", 17)))
def test_attention_over_eight_bit_pages_fits_and_reads_sixteen_bytes_at_a_time(target, name, K):
    args = paged.attend_specs(paged.SHAPES[name], 1, K, 4096, kv_dtype=FP8)
    compiled = compile_for(target, functools.partial(attend, K), *args, compiler_options=CAPTURE)
    assert_fits(compiled)
    assert_wide_loads(compiled, "paged_attention_partials*")


@cases(("gb10", "27b", 2048), every=PREFILLS)
def test_attention_of_a_prefill_fits_and_reads_sixteen_bytes_at_a_time(target, name, K):
    compiled = compile_for(target, attend_chunk, *chunk(paged.SHAPES[name], K), compiler_options=CAPTURE)
    assert_fits(compiled)
    assert_in_place(compiled)
    assert_wide_loads(compiled, "paged_attention_prefill*")


@pytest.mark.long
@pytest.mark.parametrize("target", ["h200", "gb10"])
def test_attention_of_a_prefill_over_eight_bit_pages_fits(target):
    args = chunk(paged.SHAPES["27b"], 2048, kv_dtype=FP8)
    compiled = compile_for(target, attend_chunk, *args, compiler_options=CAPTURE)
    assert_fits(compiled, spill_bytes=40)  # five numbers a thread on an H200, written and read


@cases(("h200", "27b", 4))
def test_the_write_is_in_place(target, name, K):
    args = paged.write_specs(paged.SHAPES[name], 1, K, 4096)
    compiled = compile_for(target, functools.partial(write, K), *args, donate=(0,), compiler_options=CAPTURE)
    assert_fits(compiled)
    assert_in_place(compiled)


@pytest.mark.parametrize("target", ["h200", pytest.param("gb10", marks=pytest.mark.long)])
def test_the_write_of_eight_bits_is_in_place(target):
    args = paged.write_specs(paged.SHAPES["27b"], 1, 4, 4096, kv_dtype=FP8)
    compiled = compile_for(target, functools.partial(write, 4), *args, donate=(0,), compiler_options=CAPTURE)
    assert_fits(compiled)
    assert_in_place(compiled)
