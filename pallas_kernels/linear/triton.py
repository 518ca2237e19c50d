"""Few rows times a stacked bfloat16 weight, as a Pallas-Triton kernel that streams the weight once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu


def linear(
    x: Array,
    weight: Array,
    layer: int,
    *,
    columns: int = 64,
    depth: int = 128,
    splits: int = 1,
    num_warps: int = 4,
    num_stages: int = 4,
    interpret: bool = False,
) -> Array:
    R, D = x.shape
    N = weight.shape[2]
    each = D // splits
    assert D % (splits * depth) == 0, (D, splits, depth)
    even = N % columns == 0

    def body(layers, x, w, out):
        layer = layers[0]
        n, s = pl.program_id(0), pl.program_id(1)
        cols = n * columns + jnp.arange(columns)

        def add(i, acc):
            at = s * each + i * depth
            a = x[:, pl.ds(at, depth)]
            if even:
                b = plgpu.load(
                    w.at[layer, pl.ds(at, depth), pl.ds(n * columns, columns)], eviction_policy="evict_first"
                )
            else:
                inside = jnp.broadcast_to((cols < N)[None, :], (depth, columns))
                b = plgpu.load(
                    w.at[layer, pl.ds(at, depth), pl.ds(n * columns, columns)],
                    mask=inside,
                    other=0.0,
                    eviction_policy="evict_first",
                )
            return acc + plgpu.dot(a, b)

        acc = jax.lax.fori_loop(0, each // depth, add, jnp.zeros((R, columns), jnp.float32))
        target = out.at[s, :, pl.ds(n * columns, columns)]
        plgpu.store(target, acc, mask=None if even else jnp.broadcast_to((cols < N)[None, :], (R, columns)))

    out = pl.pallas_call(
        body,
        grid=(-(-N // columns), splits),
        out_shape=jax.ShapeDtypeStruct((splits, R, N), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name="linear",
    )(jnp.full(1, layer, jnp.int32), x, weight)
    return out[0] if splits == 1 else jnp.sum(out, axis=0)
