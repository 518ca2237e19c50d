"""What the rows of a step need, for all of them before the first one: convolution, SiLU, unit lengths and gates."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.instructions import multiply_add, rounded, sigmoid, widen


class Inputs(NamedTuple):
    """References that the rows are made of, and where a sequence's are."""

    projected: Any
    conv_weight: Any
    vectors: Any
    layer: Array
    slot: Array
    first: Array  # the sequence's first row of `projected`
    start: Array  # that row's position
    rows: Array  # how many


class Ready(NamedTuple):
    """References that hold the rows of a program: [rows, Hv, parts, …] float32, of which it writes and reads its own."""

    q: Any  # unit length times Dk^-1/2
    k: Any  # unit length
    gates: Any  # decay, write strength, q.k
    v: Any  # [rows, Hv, Dv]


def prepare(given: Inputs, ready: Ready, state: Any, columns: int, num_warps: int, interpret: bool) -> None:
    """Makes a program's rows, a warp each, and puts what is kept of them into the rings of `state`: one program of those that share
    a key head does so for the keys, and one of those that share a head for the decay."""
    x, weight, vectors, layer, slot, first, start, count = given
    _, _, Hv, Dv, Dk = state.h.shape
    taps, inputs, ring, Hk = weight.shape[1], state.conv.shape[2], *state.k.shape[2:4]
    head, part = pl.program_id(1), pl.program_id(2)
    key_head, ratio, W = head // (Hv // Hk), Hv // Hk, num_warps
    iota = lambda width: jax.lax.broadcasted_iota(jnp.int32, (W, width), 1)  # noqa: E731
    keys, mine = iota(Dk), iota(columns) + part * columns
    channels = (key_head * Dk + keys, (Hk + key_head) * Dk + keys, 2 * Hk * Dk + head * Dv + mine)
    rate, bias = jnp.exp(vectors[layer, head]), vectors[layer, Hv + head]
    strength_at = 2 * Hk * Dk + 2 * Hv * Dv + head
    of_head = part == 0
    of_key_head = (head % ratio == 0) & of_head

    def some(i: Array, carry: Any) -> Any:
        t = i * W + jnp.arange(W)
        live, last = t < count, jnp.minimum(t, count - 1)

        def tap(c: Array, back: int) -> Array:
            """The convolution's inputs `back` rows before: of this step, or of the ring, or zeros before position 0."""
            t = (last - back)[:, None]
            row, wide = first + jnp.maximum(t, 0), lambda mask: jnp.broadcast_to(mask, c.shape)
            if back == 0:
                return x[row, c]
            position = start + t
            at = state.conv.at[layer, slot, jax.lax.rem(jnp.maximum(position, 0), inputs), c]
            old = plgpu.load(at, mask=wide((t < 0) & (position >= 0)), other=0)
            return plgpu.load(x.at[row, c], mask=wide(t >= 0), other=old)

        # Loaded for each few rows again, which are mostly all: kept, they would take the registers that the state waits for.
        weights = [[widen(weight[layer, w, c], interpret) for w in range(taps)] for c in channels]
        windows = [[tap(c, taps - 1 - w) for w in range(taps)] for c in channels]
        strength, speed = x[first + last, strength_at], x[first + last, strength_at + Hv]
        mixed = []
        for each, window in zip(weights, windows, strict=True):
            y = widen(window[-1], interpret) * each[-1]
            for w in range(taps - 1):
                y = multiply_add(widen(window[w], interpret), each[w], y, interpret)
            y = rounded(y, x.dtype, interpret)
            mixed.append(rounded(y * sigmoid(y, interpret), x.dtype, interpret))
        q, k, v = mixed
        q = q * (jax.lax.rsqrt(jnp.sum(q * q, axis=1) + 1e-6) * Dk**-0.5)[:, None]
        k = k * jax.lax.rsqrt(jnp.sum(k * k, axis=1) + 1e-6)[:, None]
        decay = jnp.exp(-rate * _softplus(speed.astype(jnp.float32) + bias))
        beta = rounded(sigmoid(strength.astype(jnp.float32), interpret), x.dtype, interpret)

        r, at, here = first + t, jax.lax.rem(start + t, ring), jax.lax.rem(start + t, inputs)
        wide = lambda x: x[:, None]  # noqa: E731
        put = lambda ref, value, mask: plgpu.store(ref, value, mask=jnp.broadcast_to(mask, value.shape))  # noqa: E731
        put(ready.q.at[wide(r), head, part, keys], q, wide(live))
        put(ready.k.at[wide(r), head, part, keys], k, wide(live))
        put(ready.v.at[wide(r), head, mine], v, wide(live))
        for number, y in enumerate((decay, beta, jnp.sum(q * k, axis=1))):
            put(ready.gates.at[r, head, part, number], y, live)
        put(state.conv.at[layer, slot, wide(here), channels[2]], windows[2][-1], wide(live))
        put(state.decay.at[layer, slot, at, head], decay, live & of_head)
        put(state.k.at[layer, slot, wide(at), key_head, keys], k, wide(live & of_key_head))
        for c, window in zip(channels[:2], windows[:2], strict=True):
            put(state.conv.at[layer, slot, wide(here), c], window[-1], wide(live & of_key_head))
        return carry

    jax.lax.fori_loop(0, (count + W - 1) // W, some, 0)


def _softplus(x: Array) -> Array:
    return jnp.maximum(x, 0.0) + jnp.log(1.0 + jnp.exp(-jnp.abs(x)))
