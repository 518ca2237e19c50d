"""Arrays of one byte a number that 32 bits count without a sign only, from 2^31 to 2^32 bytes, on a GPU: a layer of theirs is read
and written as it is alone, each time anew.

tests/test_compiled_kernels.py reads the offsets, and the waits, in what kernels are compiled to.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import Pages, triton_prefill
from pallas_kernels.paged_attention import triton as attention
from pallas_kernels.paged_attention.pages import page_shapes
from pallas_kernels.w4a16 import triton as packed
from pallas_kernels.w4a16.forms import Fp8, Int4, Nvfp4

FP8 = jnp.float8_e4m3fn


@functools.partial(jax.jit, static_argnums=0)
def noise(shape: tuple[int, ...]) -> jax.Array:
    """Bytes that a place decides, made where they lie: random numbers would take four times the memory on the way."""
    places = (jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in range(len(shape)))
    mixed = functools.reduce(lambda mixed, place: (mixed ^ place) * jnp.uint32(0x9E3779B1), places, jnp.uint32(1))
    return ((mixed ^ mixed >> 15) * jnp.uint32(0x2C1B3C6D) >> 24).astype(jnp.uint8)


def of_layer(tree: Any, layer: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[layer : layer + 1], tree)


def equal(x: Any, y: Any) -> None:
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        a, b = (jax.lax.bitcast_convert_type(z, f"uint{8 * z.dtype.itemsize}") for z in (a, b))
        assert jnp.array_equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ("int4", "nvfp4", "fp8"))
def test_products_with_a_layer_of_a_stack(form):
    layers, blocks, N = 36, 128, 8192 if form != "fp8" else 4096
    codes = noise((layers, blocks, N, 64 if form != "fp8" else 128)) & (0xFF if form != "fp8" else 0xBF)
    assert 2**31 < codes.nbytes < 2**32
    if form == "int4":
        stack = Int4(codes, jnp.full((layers, blocks, N), 0.01, jnp.bfloat16))
    elif form == "nvfp4":
        stack = Nvfp4(codes, jnp.full((layers, 8 * blocks, N), 0x38, jnp.uint8), jnp.full((layers, N), 0.01))
    else:
        stack = Fp8(codes, jnp.full((layers, 1, N), 0.01))
    for layer in (0, 31, 32, 35):
        alone = of_layer(stack, layer)
        for rows in (4, 16, 64, 100, 256, 600):
            x = jax.random.normal(jax.random.key(rows), (rows, blocks * 128), jnp.bfloat16)
            want = packed.product(x, alone, 0)
            for _ in range(4):
                equal(packed.product(x, stack, layer), want)


@pytest.mark.gpu
def test_attention_over_eight_bit_pages():
    layers, P, H, Hkv, Dh, N, K, T = 17, 520, 24, 4, 256, 256, 4, 128
    start, n_rows = jnp.asarray([7000], jnp.int32), jnp.asarray([K], jnp.int32)
    table = jnp.arange(P - 32, P, dtype=jnp.int32)[None]  # 8,192 tokens

    shapes = page_shapes((layers, P, Hkv), N, Dh, FP8)
    pages = Pages(*(jax.lax.bitcast_convert_type(noise(shape) & 0xBF, FP8) for shape in shapes))  # below 2 in size
    assert 2**31 < pages.keys.nbytes < 2**32
    untouched = {layer: of_layer(pages, layer) for layer in (1, 14)}
    write = jax.jit(attention.write, static_argnums=(1, 7), donate_argnums=0)
    few, chunk = (jax.random.normal(jax.random.key(R), (R, H, Dh), jnp.bfloat16) for R in (16, T))
    k, v = (jax.random.normal(jax.random.key(i), (16, Hkv, Dh), jnp.bfloat16) for i in (1, 2))
    for layer in (0, 15, 16):
        alone = of_layer(pages, layer)
        attend = functools.partial(attention.attend, first=0, row_group=16)
        equal(
            attend(few, pages, layer, table, start, n_rows, K)[:K], attend(few, alone, 0, table, start, n_rows, K)[:K]
        )
        ragged = functools.partial(triton_prefill.attend_ragged, chunk)
        rest = table, start, jnp.zeros(1, jnp.int32), jnp.full(1, T, jnp.int32)
        equal(ragged(pages, layer, *rest), ragged(alone, 0, *rest))
        want = write(alone, 0, k, v, table, start, n_rows, K)
        pages = write(pages, layer, k, v, table, start, n_rows, K)
        equal(of_layer(pages, layer), want)
    for layer, before in untouched.items():
        equal(of_layer(pages, layer), before)


def test_the_noise_is_noise():
    """Neighbours on any axis differ."""
    x = np.asarray(noise((8, 8, 8, 8)))
    for axis in range(4):
        assert np.mean(np.take(x, range(7), axis) != np.take(x, range(1, 8), axis)) > 0.95
