"""Products of up to 64 rows with packed weights as one Pallas-Triton kernel (and a sum, where inputs are split).

A program multiplies all rows by a share of the weight: every program has the same number of (column tile, input block) pairs, tile
after tile, so that none waits for another at the end. A tile that several programs share has a part from each; parts are added in
order. What a program does depends on the weight's shape and on the GPU, never on the rows, so a row's bits depend on it alone:
where at most eight rows can matter, a product of eight is done in place of one of sixteen or more, which adds in the same order.

The weight is the left side of the tensor cores' product, so that eight rows are its smallest right side. Codes travel as bytes into
the layout of that operand and are decoded there: four bytes to four bfloat16 numbers 128 + code by one mask and two byte
permutations, since 128 is where bfloat16 counts in ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.instructions import assembly, multiply_add
from pallas_kernels.registry import multiprocessors
from pallas_kernels.rows import add_in_order, least_holding, most_live, pad_rows
from pallas_kernels.w4a16.forms import BLOCK, Fp8, Int4, Nvfp4, Packed, outputs
from pallas_kernels.w4a16.pack import padded
from pallas_kernels.w4a16.reference import e2m1, e4m3, whole_rows

ROWS = (8, 16, 32, 64)  # of a product; the first is the tensor cores' smallest, whose left side is the weight
HALF = BLOCK // 2

# Four bytes to four bfloat16 numbers at a time.
_decoded = functools.partial(assembly, pack=4, dtype=jnp.bfloat16)


def product(x: Array, weight: Packed, layer: Any, **tuning: Any) -> Array:
    """x [R, K] in bfloat16 -> float32 [R, N]. Up to 64 rows run in the kernel; more are bound by the matrix units, which the
    library feeds best from a decoded weight."""
    if layer is None:
        weight, layer = jax.tree.map(lambda leaf: leaf[None], weight), 0
    if isinstance(weight, Int4) and weight.order is not None:
        x = x[:, weight.order[layer]]
    x = jnp.pad(x, ((0, 0), (0, padded(x.shape[1]) - x.shape[1])))
    if x.shape[0] > ROWS[-1]:
        values = whole_rows(weight, layer, x.dtype)
        return jax.lax.dot_general(x, values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    # The layer is an operand, and the call a function of its own: traced, lowered and compiled once for all layers.
    live = most_live(x.shape[0])
    out = _product(jnp.full(1, layer, jnp.int32), x, weight, live, **tuning)
    return pad_rows(out, x.shape[0])


@functools.partial(jax.jit, static_argnames=("live", "columns", "programs", "num_warps", "interpret"))
def _product(
    layer: Array,
    x: Array,
    weight: Packed,
    live: int,
    *,
    columns: int = 64,
    programs: int = 0,
    num_warps: int = 2,
    interpret: bool = False,
) -> Array:
    N, blocks = outputs(weight), weight.codes.shape[-3]
    rows = least_holding(live, ROWS)
    x = pad_rows(x, max(rows, x.shape[0]))
    tiles = pl.cdiv(N, columns)
    # At most some 16 parts of a tile: more would cost their sum what they save.
    programs = min(programs or 8 * multiprocessors(), 16 * tiles, tiles * blocks)
    parts = _parts(tiles, blocks, programs)
    out = pl.pallas_call(
        functools.partial(_kernel, adder(weight, interpret), N, rows, columns, tiles, blocks, programs),
        grid=(programs,),
        out_shape=jax.ShapeDtypeStruct((parts.max(), rows, N), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=3),
        interpret=interpret,
        name="w4a16_product",
    )(layer, x, *arrays_of(weight))
    written = np.arange(len(out))[:, None] < np.repeat(parts, columns)[:N]
    out = add_in_order(out[:, :live], written)
    if isinstance(weight, Nvfp4):
        out = out * (256 * weight.scale[layer[0]])
    if isinstance(weight, Fp8) and weight.scales.shape[-2] == 1:
        out = out * weight.scales[layer[0]]
    return out


def arrays_of(weight: Packed) -> list[Array]:
    """What a program reads; scales of whole columns come after it."""
    zeros = [weight.zeros] if isinstance(weight, Int4) and weight.zeros is not None else []
    return [weight.codes, weight.scales, *zeros]


def _parts(tiles: int, blocks: int, programs: int) -> np.ndarray:
    """How many programs have a share in each tile."""
    total, tile = tiles * blocks, np.arange(tiles)
    first, last = (((unit + 1) * programs - 1) // total for unit in (tile * blocks, tile * blocks + blocks - 1))
    return last - first + 1


def _kernel(
    add: Callable[..., Array],
    N: int,
    rows: int,
    columns: int,
    tiles: int,
    blocks: int,
    programs: int,
    layer_ref: Any,
    x_ref: Any,
    *refs: Any,
) -> None:
    *weight_refs, out_ref = refs
    program, total, layer = pl.program_id(0), tiles * blocks, layer_ref[0]
    start, end = program * total // programs, (program + 1) * total // programs

    def tile(t: Array, _: None) -> None:
        place, mask = pl.ds(t * columns, columns), inside(t, columns, N)
        load = functools.partial(load_columns, (layer,), place, mask)

        def block(b: Array, sums: Array) -> Array:
            return add(sums, b, load, lambda first, count: x_ref[pl.ds(0, rows), pl.ds(first, count)], *weight_refs)

        first, last = jnp.maximum(start - t * blocks, 0), jnp.minimum(end - t * blocks, blocks)
        sums = jax.lax.fori_loop(first, last, block, jnp.zeros((columns, rows), jnp.float32))
        part = program - ((t * blocks + 1) * programs - 1) // total
        if mask is None:
            out_ref[part, :, place] = sums.T
        else:
            plgpu.store(out_ref.at[part, :, place], sums.T, mask=jnp.broadcast_to(mask[None], (rows, columns)))

    jax.lax.fori_loop(start // blocks, (end + blocks - 1) // blocks, tile, None)


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


def adder(weight: Packed, interpret: bool) -> Callable[..., Array]:
    """What adds a block of inputs, times its columns, to the sums so far."""
    match weight:
        case Int4():
            return functools.partial(_add_int4, weight.group, interpret)
        case Nvfp4():
            return functools.partial(_add_nvfp4, interpret)
        case Fp8():
            return functools.partial(_add_fp8, weight.scales.shape[-2] > 1, interpret)


def _add_int4(
    group: int,
    interpret: bool,
    sums: Array,
    b: Array,
    load: Any,
    x: Callable[..., Array],
    codes: Any,
    scales: Any,
    *zeros: Any,
) -> Array:
    """Group by group: the sum of exact factors in float32, then its scale."""
    bytes_, groups = min(group, HALF), BLOCK // group
    loaded = [load(codes, b, pl.ds(i, bytes_)) for i in range(0, HALF, bytes_)]
    halves: list[Array] = []
    for high in (False, True):
        for i, part in enumerate(loaded):
            g = b * groups + (high * HALF + i * bytes_) // group
            if zeros:
                shift = load(zeros[0], g).astype(jnp.bfloat16)[:, None] + jnp.bfloat16(128)
            else:
                shift = jnp.bfloat16(136)
            partial = dot(x, b * BLOCK + high * HALF + i * bytes_, _counted(part, high, interpret) - shift)
            if group == BLOCK:
                halves.append(partial)
            else:
                sums = multiply_add(partial, load(scales, g).astype(jnp.float32)[:, None], sums, interpret)
    if group == BLOCK:
        sums = multiply_add(halves[0] + halves[1], load(scales, b).astype(jnp.float32)[:, None], sums, interpret)
    return sums


def _add_nvfp4(
    interpret: bool, sums: Array, b: Array, load: Any, x: Callable[..., Array], codes: Any, scales: Any
) -> Array:
    """Codes times block scales, which is exact in bfloat16, then one product for each half of the block; 2^-8 of it (`_e2m1`)."""
    loaded = load(codes, b, pl.ds(0, HALF))
    for high in (False, True):
        values = _e2m1(loaded, high, interpret)
        four = _block_scales(load(scales, pl.ds(b * (BLOCK // 16) + 4 * high, 4)).T, interpret)[:, :, None]
        wide = jnp.broadcast_to(four, (values.shape[0], 4, 16)).reshape(values.shape)
        sums = sums + dot(x, b * BLOCK + high * HALF, values * wide)
    return sums


def _add_fp8(
    by_block: bool, interpret: bool, sums: Array, b: Array, load: Any, x: Callable[..., Array], codes: Any, scales: Any
) -> Array:
    partial = dot(x, b * BLOCK, _e4m3(load(codes, b, pl.ds(0, BLOCK)), interpret))
    return multiply_add(partial, load(scales, b)[:, None], sums, interpret) if by_block else sums + partial


def dot(x: Callable[..., Array], first: Array, values: Array) -> Array:
    """`values` [columns, inputs] times the rows' inputs from `first` on -> float32 [columns, rows]."""
    return plgpu.dot(values, x(first, values.shape[1]).T)


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


def _e4m3(codes: Array, interpret: bool) -> Array:
    """Bytes as E4M3 numbers, in bfloat16. The conversion instructions run at a sixteenth of the others' rate."""
    if interpret:
        return e4m3(codes, jnp.bfloat16)
    half = "shr.b32 b, a, 4; and.b32 b, b, 0x07f007f0; lop3.b32 a, a, 0x80008000, b, 0xea;"
    return _decoded(
        f"""{{ .reg .b32 a, b, big, none; mov.b32 none, 0; mov.b32 big, 0x7b807b80;
        prmt.b32 a, $2, none, 0x1404; {half} mul.rn.bf16x2 $0, a, big;
        prmt.b32 a, $2, none, 0x3424; {half} mul.rn.bf16x2 $1, a, big; }}""",
        codes,
    )


def _nibbles(high: bool) -> str:
    return f"{'shr.b32 c, $2, 4; and.b32 c, c' if high else 'and.b32 c, $2'}, 0x0f0f0f0f;"
