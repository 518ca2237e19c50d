"""The step's linear-attention mixer as one Pallas-Triton kernel: convolution, gates, norms, fold and recurrence.

One program holds `columns` value columns of one head's state in registers: it reads them once, applies the committed journal rows,
writes them once, and runs the new rows from there one after another. Rows are a loop of run-time bound, so that the same
instructions run for every number of rows; with the rings of `Recurrent`, no program writes what another still reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.gated_delta.forms import Journal, Mixer, Recurrent

BLOCK = 4  # journal rows that are loaded together


def step(mixer: Mixer, state: Recurrent, layer: int, *args: Any, **tuning: Any) -> tuple[Array, Recurrent]:
    # The layer is an operand, and the call a function of its own: traced, lowered and compiled once for all layers.
    return _step(jnp.full(1, layer, jnp.int32), mixer, state, *args, **tuning)


@functools.partial(jax.jit, static_argnames=("K", "columns", "num_warps", "interpret"))
def _step(
    layer: Array,
    mixer: Mixer,
    state: Recurrent,
    slots: Array,
    base: Array,
    pending: Array,
    n_rows: Array,
    projected: Array,
    K: int,
    *,
    columns: int = 16,
    num_warps: int = 4,
    interpret: bool = False,
) -> tuple[Array, Recurrent]:
    R = projected.shape[0]
    B, (_, _, Hv, Dv, _) = slots.shape[0], state.h.shape
    Hk, columns = state.k.shape[3], min(columns, Dv)
    taps = mixer.conv.shape[1]
    body = functools.partial(_kernel, K, R, Hk, taps, columns)
    given = (layer, slots, base, pending, n_rows, projected, *mixer)
    first = len(given)
    out, *after = pl.pallas_call(
        body,
        grid=(B, Hv, Dv // columns),
        out_shape=(
            jax.ShapeDtypeStruct((R, Hv, Dv), jnp.float32),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in state),
        ),
        input_output_aliases={first + i: 1 + i for i in range(len(state))},
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="gated_delta_step",
    )(*given, *state)
    return out, Recurrent(*after)


def _update(state: Array, k: Array, u: Array, decay: Array) -> Array:
    """S <- g S + k u^T; one helper, so that the fold and the rows that it repeats contract alike."""
    return decay * state + k * u


class _Rows(NamedTuple):
    """A sequence's committed journal rows, as one program sees them."""

    read: Callable[[Array], tuple[Array, Array, Array]]  # place in the ring -> (k [Dk], u [columns], decay)
    base: Array
    pending: Array
    ring: int

    def block(self, first: Any) -> tuple[Any, ...]:
        """The rows `first` …, as many as a block has; past the last one, what happens to be there."""
        return tuple(self.read((self.base + first + i) % self.ring) for i in range(BLOCK))

    def apply(self, state: Array, block: Any) -> Array:
        """Folds all rows into `state`, given the first block."""

        def fold(i: Array, carry: Any) -> Any:
            state, block = carry
            after = self.block((i + 1) * BLOCK)
            for j, (k, u, decay) in enumerate(block):
                state = jnp.where(i * BLOCK + j < self.pending, _update(state, k[None, :], u[:, None], decay), state)
            return state, after

        return jax.lax.fori_loop(0, (self.pending + BLOCK - 1) // BLOCK, fold, (state, block))[0]


@functools.partial(jax.jit, static_argnames=("columns", "num_warps", "interpret"))
def fold(
    state: Array,
    journal: Journal,
    base: Array,
    pending: Array,
    *,
    columns: int = 16,
    num_warps: int = 4,
    interpret: bool = False,
) -> Array:
    """What a step does with the journal, by itself."""
    B, Hv, Dv, _ = state.shape
    ratio, ring, columns = Hv // journal.k.shape[2], journal.k.shape[1], min(columns, Dv)

    def body(bases, pendings, journal_k, journal_u, journal_decay, before, after):
        b, head, mine = pl.program_id(0), pl.program_id(1), pl.ds(pl.program_id(2) * columns, columns)

        def read(at):
            return journal_k[b, at, head // ratio, :], journal_u[b, at, head, mine], journal_decay[b, at, head]

        rows = _Rows(read, bases[b], pendings[b], ring)
        after[b, head, mine, :] = rows.apply(before[b, head, mine, :], rows.block(0))

    return pl.pallas_call(
        body,
        grid=(B, Hv, Dv // columns),
        out_shape=jax.ShapeDtypeStruct(state.shape, state.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="gated_delta_fold",
    )(base, pending, *journal, state)


def _kernel(K: int, R: int, Hk: int, taps: int, columns: int, *refs) -> None:
    layers, slots, bases, pendings, counts, x, conv_weight, vectors = refs[:8]
    out, h, conv, journal_k, journal_u, journal_decay = refs[13:]
    layer = layers[0]
    _, _, Hv, Dv, Dk = h.shape
    ratio = Hv // Hk
    b, head, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    key_head = head // ratio
    slot, base, pending, count = slots[b], bases[b], pendings[b], counts[b]
    start, ring, inputs = base + pending, journal_u.shape[2], conv.shape[2]
    q_at, k_at = pl.ds(key_head * Dk, Dk), pl.ds((Hk + key_head) * Dk, Dk)
    v_at, mine = pl.ds(2 * Hk * Dk + head * Dv + part * columns, columns), pl.ds(part * columns, columns)
    channels = (q_at, k_at, v_at)
    strength_at = 2 * Hk * Dk + 2 * Hv * Dv + head

    # Everything that is needed first is asked for here, before anything waits: a program is a chain of latencies.
    state = h[layer, slot, head, mine, :]

    rows = _Rows(
        lambda at: (
            journal_k[layer, slot, at, key_head, :],
            journal_u[layer, slot, at, head, mine],
            journal_decay[layer, slot, at, head],
        ),
        base,
        pending,
        ring,
    )
    block = rows.block(0)

    def load(t):
        r = b * K + jnp.maximum(jnp.minimum(t, count - 1), 0)
        return tuple(x[r, c] for c in channels), x[r, strength_at], x[r, strength_at + Hv]

    def past(c, w):
        position = start - (taps - 1) + w
        return jnp.where(position >= 0, conv[layer, slot, jnp.maximum(position, 0) % inputs, c], 0).astype(jnp.float32)

    raw = load(0)
    window = tuple(tuple(past(c, w) for w in range(taps - 1)) for c in channels)
    weights = [[conv_weight[layer, w, c].astype(jnp.float32) for w in range(taps)] for c in channels]
    rate, bias = jnp.exp(vectors[layer, head]), vectors[layer, Hv + head]
    following = load(1)

    state = rows.apply(state, block)
    h[layer, slot, head, mine, :] = state

    # ---- new rows ----
    def prepare(raw, window):
        """A row's query, key, value, decay and write strength, and the convolution's window after it."""
        new, strength, step = raw
        mixed, shifted = [], []
        for w, past, x_new in zip(weights, window, new, strict=True):
            y = x_new.astype(jnp.float32) * w[-1]
            for i in range(taps - 1):
                y += past[i] * w[i]
            y = y.astype(x.dtype).astype(jnp.float32)
            mixed.append((y * jax.nn.sigmoid(y)).astype(x.dtype).astype(jnp.float32))
            shifted.append((*past[1:], x_new.astype(jnp.float32)))
        q, k, v = mixed
        q = q * jax.lax.rsqrt(jnp.sum(q * q) + 1e-6) * Dk**-0.5
        k = k * jax.lax.rsqrt(jnp.sum(k * k) + 1e-6)
        decay = jnp.exp(-rate * _softplus(step.astype(jnp.float32) + bias))
        beta = jax.nn.sigmoid(strength.astype(jnp.float32)).astype(x.dtype).astype(jnp.float32)
        return (q, k, v, decay, beta), tuple(shifted)

    shared = (head % ratio == 0) & (part == 0)

    def row(t, carry):
        # While this row goes through the state, the next is prepared and the one after that is on its way.
        state, (q, k, v, decay, beta), raw, window, following = carry
        far = load(t + 2)
        prepared, shifted = prepare(following, window)
        read = jnp.sum(k[None, :] * state, axis=1)
        u = beta * (v - decay * read)
        state = _update(state, k[None, :], u[:, None], decay)
        at, here = (start + t) % ring, (start + t) % inputs
        out[b * K + t, head, mine] = jnp.sum(q[None, :] * state, axis=1)
        journal_u[layer, slot, at, head, mine] = u
        conv[layer, slot, here, v_at] = raw[0][2]

        @pl.when(part == 0)
        def _():
            journal_decay[layer, slot, at, head] = decay

        @pl.when(shared)
        def _():
            journal_k[layer, slot, at, key_head, :] = k
            conv[layer, slot, here, q_at] = raw[0][0]
            conv[layer, slot, here, k_at] = raw[0][1]

        return state, prepared, following, shifted, far

    prepared, window = prepare(raw, window)
    jax.lax.fori_loop(0, count, row, (state, prepared, raw, window, following))

    # ---- padding rows read as zeros ----
    def clear(r, carry):
        out[r, head, mine] = jnp.zeros(columns, jnp.float32)
        return carry

    jax.lax.fori_loop(b * K + count, jnp.where(b == pl.num_programs(0) - 1, R, b * K + K), clear, 0)


def _softplus(x: Array) -> Array:
    return jnp.maximum(x, 0.0) + jnp.log(1.0 + jnp.exp(-jnp.abs(x)))
