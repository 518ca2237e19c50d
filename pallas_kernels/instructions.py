"""Arithmetic of a Triton kernel in the GPU's own instructions, where JAX has no name for them and the compiler does not find them:
it contracts no product with a sum, whatever the flags. `interpret` gives the same in plain JAX, to a rounding.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import triton as plgpu


def multiply_add(a: Array, b: Array, c: Array, interpret: bool) -> Array:
    """a * b + c, rounded once; float32, of shapes that broadcast. The interpreter always rounds twice: left to the CPU's compiler,
    it would do now one, now the other."""
    return jax.lax.optimization_barrier(a * b) + c if interpret else assembly("fma.rn.f32 $0, $1, $2, $3;", a, b, c)


def exp2(x: Array, interpret: bool) -> Array:
    """2^x in one instruction, to some 2e-7 of it; 0 where it would be subnormal."""
    return jnp.exp2(x) if interpret else assembly("ex2.approx.ftz.f32 $0, $1;", x)


def sigmoid(x: Array, interpret: bool) -> Array:
    """1 / (1 + e^-x) in four instructions, to some 1e-6 of the result for x above -20 (below, -x / log 2 is rounded more)."""
    if interpret:
        return jax.nn.sigmoid(x)
    return assembly(
        """{ .reg .f32 y; mul.rn.f32 y, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 y, y;
        add.rn.f32 y, y, 0f3F800000; rcp.approx.ftz.f32 $0, y; }""",
        x,
    )


def widen(x: Array, interpret: bool) -> Array:
    """To float32; two bfloat16 numbers, which share a register, in two instructions."""
    if interpret or x.dtype != jnp.bfloat16 or x.size == 1:
        return x.astype(jnp.float32)
    return assembly("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", x, pack=2)


def bfloat16_of_e4m3(codes: Array, interpret: bool, nan: bool = True) -> Array:
    """Bytes as E4M3 numbers, in bfloat16: moved to where bfloat16 has sign, exponent and mantissa they are 2^-120 of the number,
    zero exponents included. The GPU's conversion instructions run at a sixteenth of the others' rate.

    Args:
        nan: there may be NaN; without, its code is 480.
    """
    if interpret:
        return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.bfloat16)
    half = (
        "shr.b32 b, a, 4; and.b32 b, b, 0x07f007f0; lop3.b32 a, a, 0x80008000, b, 0xea; mul.rn.bf16x2 {0}, a, big; {1}"
    )
    # The only code that a 1 carries into the sign, which then fills both bytes.
    find = "and.b32 n, $2, 0x7f7f7f7f; add.u32 n, n, 0x01010101;" if nan else ""
    mark = "prmt.b32 b, n, none, {0}; or.b32 {1}, {1}, b;" if nan else ""
    return assembly(
        f"""{{ .reg .b32 a, b, n, big, none; mov.b32 none, 0; mov.b32 big, 0x7b807b80; {find}
        prmt.b32 a, $2, none, 0x1404; {half.format("$0", mark.format("0x9988", "$0"))}
        prmt.b32 a, $2, none, 0x3424; {half.format("$1", mark.format("0xbbaa", "$1"))} }}""",
        codes,
        pack=4,
        dtype=jnp.bfloat16,
    )


def awaited(x: Array, interpret: bool) -> Array:
    """`x`, once the tensor cores have made it: for sums that a loop carries. Where a side of the product is in registers, some
    versions of ptxas (13.0's) let the loop's next turn write to these while Hopper's tensor cores still read them."""
    return x if interpret else assembly("mov.b32 $0, $1;", x)


def rounded(x: Array, dtype: Any, interpret: bool) -> Array:
    """A float32 array with the numbers of `dtype` that are nearest."""
    if interpret or dtype != jnp.bfloat16 or x.size == 1:
        return x.astype(dtype).astype(jnp.float32)
    both = "cvt.rn.bf16x2.f32 y, $3, $2; shl.b32 $0, y, 16; and.b32 $1, y, 0xffff0000;"
    return assembly("{ .reg .b32 y; " + both + " }", x, pack=2)


def assembly(code: str, *args: Array, pack: int = 1, dtype: Any = jnp.float32) -> Array:
    """`code` for `pack` numbers of each argument at a time, which fill whole registers, as the results do."""
    shape = jnp.broadcast_shapes(*(x.shape for x in args))
    registers = lambda of: pack * jnp.dtype(of).itemsize // 4  # noqa: E731
    inputs = sum(registers(x.dtype) for x in args)
    [y] = plgpu.elementwise_inline_asm(
        code,
        args=[jnp.broadcast_to(x, shape) for x in args],
        constraints=",".join(["=r"] * registers(dtype) + ["r"] * inputs),
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, dtype)],
    )
    return y
