"""How the kernels decode a weight: what a program loads of it, block by block, and the arithmetic that makes numbers of codes.

Codes travel as bytes into the layout that the tensor cores' operand has, and are decoded there: four bytes to four bfloat16 numbers
128 + code by one mask and two byte permutations, since 128 is where bfloat16 counts in ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.instructions import assembly, awaited, bfloat16_of_e4m3, multiply_add
from pallas_kernels.w4a16.forms import BLOCK, Fp8, Int4, Nvfp4, Packed
from pallas_kernels.w4a16.pack import padded
from pallas_kernels.w4a16.reference import e2m1, e4m3

HALF = BLOCK // 2

# Of a block, in order: exact values in bfloat16, [columns, inputs], each with its first input's offset, and the scale that they
# share, of each column, or None. `pieces(b, load, *refs)` gives those of block b.
Terms = list[tuple[list[tuple[int, Array]], Array | None]]
Pieces = Callable[..., Terms]

# Four bytes to four bfloat16 numbers at a time.
_decoded = functools.partial(assembly, pack=4, dtype=jnp.bfloat16)


def takes(x: Array, weight: Packed | Array) -> bool:
    """Whether the kernels can multiply by it: rows in bfloat16, whole blocks of inputs, in the order of the rows' own."""
    whole = weight.shape[-2] % BLOCK == 0 if isinstance(weight, jax.Array) else getattr(weight, "order", None) is None
    return x.dtype == jnp.bfloat16 and whole


def in_stack(weight: Any, layer: Any) -> tuple[Any, Array]:
    """A weight with an axis of layers, and the layer's number as an operand: a call is traced and compiled once for all layers."""
    if layer is None:
        weight, layer = jax.tree.map(lambda leaf: leaf[None], weight), 0
    return weight, jnp.full(1, layer, jnp.int32)


def whole_blocks(x: Array, weight: Packed | Array) -> Array:
    """Rows with zeros for the inputs that a packed weight is padded with."""
    inputs = x.shape[-1] if isinstance(weight, jax.Array) else padded(x.shape[-1])
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, inputs - x.shape[-1])])


def arrays_of(weight: Packed | Array) -> list[Array]:
    """What a program reads; scales of whole columns come after it."""
    if isinstance(weight, jax.Array):
        return [weight]
    zeros = [weight.zeros] if isinstance(weight, Int4) and weight.zeros is not None else []
    return [weight.codes, weight.scales, *zeros]


def column_scale(weight: Packed | Array) -> tuple[Array, float] | None:
    """The scale of whole columns, [..., 1, N], and a factor that belongs to it; None where there is none."""
    match weight:
        case Nvfp4():
            return weight.scale[..., None, :], 256.0  # what `_e2m1` leaves
        case Fp8() if weight.scales.shape[-2] == 1:
            return weight.scales, 1.0
    return None


def inside(tile: Array, columns: int, N: int) -> Array | None:
    """Which columns of a tile there are; None where all tiles are whole."""
    return tile * columns + jnp.arange(columns) < N if N % columns else None


def load_columns(
    lead: tuple[Any, ...], place: Any, mask: Array | None, ref: Any, row: Any, inputs: Any = None
) -> Array:
    """A tile's columns of a row of scales (or of several, [rows, columns]), or of a block's codes, [columns, inputs]."""
    index = (*lead, row, place) if inputs is None else (*lead, row, place, inputs)
    if mask is None:
        return ref[index]
    if inputs is not None:
        mask = jnp.broadcast_to(mask[:, None], (place.size, inputs.size))
    elif isinstance(row, pl.Slice):
        mask = jnp.broadcast_to(mask, (row.size, place.size))
    return plgpu.load(ref.at[index], mask=mask, other=0)


def store_rows(ref: Any, lead: tuple[Any, ...], rows: Array, where: Array, place: Any, values: Array) -> None:
    """Stores those `values` [rows, columns] that are asked for. The others' place is the array's last row, which nothing is stored
    to: all of them at one place would wait for each other."""
    rows = jnp.where(where, rows, ref.shape[len(lead)] - 1)[:, None]
    columns = (place.start + jnp.arange(place.size))[None]
    at = (*(jnp.full((1, 1), i) for i in lead), rows, columns)
    plgpu.store(ref.at[at], values, mask=jnp.broadcast_to(where[:, None], values.shape))


def adder(pieces: Pieces, interpret: bool) -> Callable[..., Array]:
    """`add(sums, b, load, x, *refs)` adds the inputs `x(first, count)` [rows, count] of block b times its columns to `sums`
    [columns, rows]: of each scale the sum of exact factors in float32, then the scale."""

    def add(sums: Array, b: Array, load: Any, x: Callable[..., Array], *refs: Any) -> Array:
        dot = lambda at, values: plgpu.dot(values, x(b * BLOCK + at, values.shape[1]).T)  # noqa: E731
        for terms, scale in pieces(b, load, *refs):
            if scale is None:
                for at, values in terms:
                    sums = sums + dot(at, values)
                sums = awaited(sums, interpret)
            else:
                partial = functools.reduce(jnp.add, (dot(at, values) for at, values in terms))
                sums = multiply_add(partial, scale.astype(jnp.float32)[:, None], sums, interpret)
        return sums

    return add


def pieces_of(weight: Packed | Array, interpret: bool) -> Pieces:
    """Exact values, and what scales them."""
    match weight:
        case Int4():
            return functools.partial(_int4, weight.group, interpret)
        case Nvfp4():
            return functools.partial(_nvfp4, interpret)
        case Fp8():
            return functools.partial(_fp8, weight.scales.shape[-2] > 1, interpret)
    return _plain


def rounded_pieces(weight: Packed | Array, interpret: bool) -> Pieces:
    """The same with nothing left to scale (but whole columns): values times scale, rounded to bfloat16 once."""
    pieces = pieces_of(weight, interpret)

    def scaled(values: Array, scale: Array | None) -> Array:
        if scale is None:
            return values
        wide = jnp.bfloat16 if scale.dtype == jnp.bfloat16 else jnp.float32  # either way the product is rounded once
        return (values.astype(wide) * scale.astype(wide)[:, None]).astype(jnp.bfloat16)

    return lambda *args: [([(at, scaled(x, scale)) for at, x in terms], None) for terms, scale in pieces(*args)]


def _plain(b: Array, load: Any, weight: Any) -> Terms:
    return [([(0, load(weight, pl.ds(b * BLOCK, BLOCK)).T)], None)]


def _int4(group: int, interpret: bool, b: Array, load: Any, codes: Any, scales: Any, *zeros: Any) -> Terms:
    bytes_, groups = min(group, HALF), BLOCK // group
    loaded = [load(codes, b, pl.ds(i, bytes_)) for i in range(0, HALF, bytes_)]
    terms: Terms = []
    for high in (False, True):
        for i, part in enumerate(loaded):
            at = high * HALF + i * bytes_
            g = b * groups + at // group
            if zeros:
                shift = load(zeros[0], g).astype(jnp.bfloat16)[:, None] + jnp.bfloat16(128)
            else:
                shift = jnp.bfloat16(136)
            term = at, _counted(part, high, interpret) - shift
            if at % group:
                terms[-1][0].append(term)
            else:
                terms.append(([term], load(scales, g)))
    return terms


def _nvfp4(interpret: bool, b: Array, load: Any, codes: Any, scales: Any) -> Terms:
    """Codes times block scales, which is exact in bfloat16; 2^-8 of it (`_e2m1`)."""
    loaded = load(codes, b, pl.ds(0, HALF))
    terms: Terms = []
    for high in (False, True):
        values = _e2m1(loaded, high, interpret)
        four = _block_scales(load(scales, pl.ds(b * (BLOCK // 16) + 4 * high, 4)).T, interpret)[:, :, None]
        wide = jnp.broadcast_to(four, (values.shape[0], 4, 16)).reshape(values.shape)
        terms.append(([(high * HALF, values * wide)], None))
    return terms


def _fp8(by_block: bool, interpret: bool, b: Array, load: Any, codes: Any, scales: Any) -> Terms:
    values = bfloat16_of_e4m3(load(codes, b, pl.ds(0, BLOCK)), interpret, nan=False)
    return [([(0, values)], load(scales, b) if by_block else None)]


def _counted(codes: Array, high: bool, interpret: bool) -> Array:
    """128 + the codes in the low or high halves of bytes, in bfloat16."""
    if interpret:
        bits = (codes >> 4 if high else codes & 15).astype(jnp.uint16) | jnp.uint16(0x4300)
        return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    return _decoded(
        f"""{{ .reg .b32 c, one; mov.b32 one, 0x43434343;
        {_nibbles(high)}
        prmt.b32 $0, c, one, 0x4140; prmt.b32 $1, c, one, 0x4342; }}""",
        codes,
    )


def _e2m1(codes: Array, high: bool, interpret: bool) -> Array:
    """Four-bit floats in the low or high halves of bytes, in bfloat16: 2^-126 of them, when sign, exponent and mantissa have been
    moved to their places there (zero exponents make subnormals); the block's scale makes up for all but 2^8 of that."""
    if interpret:  # CPUs flush subnormals
        return e2m1(codes >> 4 if high else codes & 15, jnp.bfloat16) * jnp.bfloat16(2.0**-8)
    return _decoded(
        f"""{{ .reg .b32 c, a, b, none; mov.b32 none, 0;
        {_nibbles(high)}
        prmt.b32 a, c, none, 0x4140; mul.lo.u32 a, a, 0x1040; and.b32 $0, a, 0x81c081c0;
        prmt.b32 b, c, none, 0x4342; mul.lo.u32 b, b, 0x1040; and.b32 $1, b, 0x81c081c0; }}""",
        codes,
    )


def _block_scales(bits: Array, interpret: bool) -> Array:
    """Positive E4M3 numbers in bfloat16, 2^118 of them for what `_e2m1` leaves: their bits moved to where bfloat16 has them are
    2^-120 of the number, and the rest of the way is more than one factor can go."""
    if interpret:
        return e4m3(bits, jnp.bfloat16)
    moved = jax.lax.bitcast_convert_type(bits.astype(jnp.uint16) << 4, jnp.bfloat16)
    return moved * jnp.bfloat16(2.0**119) * jnp.bfloat16(2.0**119)


def _nibbles(high: bool) -> str:
    return f"{'shr.b32 c, $2, 4; and.b32 c, c' if high else 'and.b32 c, $2'}, 0x0f0f0f0f;"
