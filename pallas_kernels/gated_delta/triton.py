"""The step's linear-attention mixer as one Pallas-Triton kernel: convolution, gates, norms, fold and recurrence.

A program holds `columns` value columns of one head's state in registers (`triton_tile.py`): it reads them once, applies the
committed journal rows, writes them once, and runs the new rows from there one after another. What the rows need besides the state
is made first, for all of them (`triton_rows.py`), while the state is on its way. Rows are loops of run-time bound, so that the same
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
from pallas_kernels.gated_delta.triton_rows import Inputs, Ready, prepare
from pallas_kernels.gated_delta.triton_tile import LANES, Keys, State, Tile

COLUMNS, WARPS = 32, 4  # of a program
MANY = 4  # sequences, from which on there are programs enough of twice the columns: fewer repeat what rows need
BLOCK = 2  # journal rows that are loaded together
TUNING = ("columns", "num_warps", "lanes", "block", "interpret")


def step(mixer: Mixer, state: Recurrent, layer: int, *args: Any, **tuning: Any) -> tuple[Array, Recurrent]:
    # A sum over keys is made in the same order whatever the columns, so the batch does not show in the bits.
    tuning.setdefault("columns", COLUMNS if len(args[0]) < MANY else 2 * COLUMNS)
    # The layer is an operand, and the call a function of its own: traced, lowered and compiled once for all layers.
    return _step(jnp.full(1, layer, jnp.int32), mixer, state, *args, **tuning)


@functools.partial(jax.jit, static_argnames=("K", "warm", *TUNING))
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
    columns: int = COLUMNS,
    num_warps: int = WARPS,
    lanes: int = LANES,
    block: int = BLOCK,
    warm: bool = True,
    interpret: bool = False,
) -> tuple[Array, Recurrent]:
    R = projected.shape[0]
    B, (_, _, Hv, Dv, Dk) = slots.shape[0], state.h.shape
    columns = min(columns, Dv)
    given = (layer, slots, base, pending, n_rows, projected, *mixer)
    first = len(given)
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    parts, rows = Dv // columns, B * K + 1  # what follows the last row is loaded too
    out, *after = pl.pallas_call(
        functools.partial(_kernel, K, R, columns, num_warps, lanes, block, warm, interpret),
        grid=(B, Hv, parts),
        out_shape=(
            f32(R, Hv, Dv),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in state),
            f32(rows, Hv, parts, Dk),
            f32(rows, Hv, parts, Dk),
            f32(rows, Hv, parts, 4),
            f32(rows, Hv, Dv),
        ),
        input_output_aliases={first + i: 1 + i for i in range(len(state))},
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="gated_delta_step",
    )(*given, *state)
    return out, Recurrent(*after[: len(state)])


class _Rows(NamedTuple):
    """A sequence's committed journal rows, as one program sees them."""

    read: Callable[[Array], tuple[Keys, Array, Array]]  # place in the ring -> k, u [Q, P, L], decay
    base: Array
    pending: Array
    ring: int
    size: int  # rows that are loaded together

    def block(self, first: Any) -> tuple[Any, ...]:
        """The rows `first` …, as many as a block has; past the last one, what happens to be there."""
        return tuple(self.read(jax.lax.rem(self.base + first + i, self.ring)) for i in range(self.size))

    def apply(self, tile: Tile, state: State, block: Any) -> State:
        """Folds all rows into `state`, given the first block."""

        def fold(i: Array, carry: Any) -> Any:
            state, block = carry
            after = self.block((i + 1) * self.size)
            for j, (k, u, decay) in enumerate(block):
                live, updated = i * self.size + j < self.pending, tile.update(state, k, u, decay)
                state = tuple(jnp.where(live, y, x) for x, y in zip(state, updated, strict=True))
            return state, after

        return jax.lax.fori_loop(0, (self.pending + self.size - 1) // self.size, fold, (state, block))[0]


@functools.partial(jax.jit, static_argnames=TUNING)
def fold(
    state: Array,
    journal: Journal,
    base: Array,
    pending: Array,
    *,
    columns: int = COLUMNS,
    num_warps: int = WARPS,
    lanes: int = LANES,
    block: int = BLOCK,
    interpret: bool = False,
) -> Array:
    """What a step does with the journal, by itself."""
    B, Hv, Dv, Dk = state.shape
    ratio, ring, columns = Hv // journal.k.shape[2], journal.k.shape[1], min(columns, Dv)

    def body(bases, pendings, journal_k, journal_u, journal_decay, before, after):
        b, head = pl.program_id(0), pl.program_id(1)
        tile = Tile.of(pl.program_id(2), Dk, columns, num_warps, lanes, interpret)

        def read(at):
            k = tile.load_keys(journal_k, b, at, head // ratio)
            return k, journal_u[b, at, head, tile.columns], journal_decay[b, at, head]

        rows = _Rows(read, bases[b], pendings[b], ring, block)
        first = rows.block(0)
        tile.store(after, b, head, state=rows.apply(tile, tile.load(before, b, head), first))

    return pl.pallas_call(
        body,
        grid=(B, Hv, Dv // columns),
        out_shape=jax.ShapeDtypeStruct(state.shape, state.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="gated_delta_fold",
    )(base, pending, *journal, state)


def _kernel(
    K: int, R: int, columns: int, num_warps: int, lanes: int, block: int, warm: bool, interpret: bool, *refs: Any
) -> None:
    layers, slots, bases, pendings, counts, x, conv_weight, vectors = refs[:8]
    out, *carried = refs[13:]
    state, ready = Recurrent(*carried[:5]), Ready(*carried[5:])
    layer = layers[0]
    _, _, Hv, _, Dk = state.h.shape
    b, head, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    key_head = head // (Hv // state.k.shape[3])
    slot, base, pending, count = slots[b], bases[b], pendings[b], counts[b]
    start, ring = base + pending, state.u.shape[2]
    tile = Tile.of(part, Dk, columns, num_warps, lanes, interpret)
    mine = tile.columns

    # What comes from far is asked for here, before anything waits: a program is a chain of latencies.
    h = tile.load(state.h, layer, slot, head)
    arrived = (
        _ask(state, layer, slot, base, pending, head, key_head, part * columns, columns) if warm else lambda ref: None
    )
    prepare(
        Inputs(x, conv_weight, vectors, layer, slot, b * K, start, count), ready, state, columns, num_warps, interpret
    )
    arrived(ready.gates)
    if not interpret:  # whose programs have no threads
        plgpu.debug_barrier()

    def read(at):
        k = tile.load_keys(state.k, layer, slot, at, key_head)
        return k, state.u[layer, slot, at, head, mine], state.decay[layer, slot, at, head]

    def load(t):
        r = b * K + t
        q, k = (tile.load_keys(ref, r, head, part) for ref in (ready.q, ready.k))
        return q, k, ready.v[r, head, mine], *(ready.gates[r, head, part, i] for i in range(3))

    rows = _Rows(read, base, pending, ring, block)
    journal, first = rows.block(0), load(0)

    def clear(r, carry):
        out[r, head, mine] = jnp.zeros(mine.shape, jnp.float32)
        return carry

    jax.lax.fori_loop(b * K + count, jnp.where(b == pl.num_programs(0) - 1, R, b * K + K), clear, 0)  # padding rows

    h = rows.apply(tile, h, journal)
    tile.store(state.h, layer, slot, head, state=h)

    def row(t, carry):
        h, (q, k, v, decay, beta, both) = carry
        following = load(t + 1)
        # Both read the state before the update, together: q of the state after it reads g q.S + (q.k) u.
        at_k, at_q = tile.read(h, k), tile.read(h, q)
        u = beta * (v - decay * at_k)
        h = tile.update(h, k, u, decay)
        out[b * K + t, head, mine] = decay * at_q + both * u
        state.u[layer, slot, jax.lax.rem(start + t, ring), head, mine] = u
        return h, following

    jax.lax.fori_loop(0, count, row, (h, first))


def _ask(
    state: Recurrent, layer: Any, slot: Any, base: Any, pending: Any, head: Any, key_head: Any, mine: Any, columns: int
) -> Callable[[Any], None]:
    """Has the pending rows of the journal brought into the cache: of each 16 words all over. Call what is returned when they should
    be there: it would write them somewhere if fewer than no rows were pending, so that the compiler takes them for needed."""
    shape = 16, 16
    t, word = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    at, mask = jax.lax.rem(base + t, state.k.shape[2]), t < pending
    load = lambda ref, *index: plgpu.load(ref.at[layer, slot, at, *index], mask=mask)  # noqa: E731
    k = load(state.k, key_head, word * (state.k.shape[4] // 16))
    u = load(state.u, head, mine + word * (columns // 16))
    decay = load(state.decay, head + word * 0)

    def arrived(ref: Any) -> None:
        plgpu.store(ref.at[0, 0, 0, word * 0], k + u + decay, mask=jnp.broadcast_to(pending < 0, shape))

    return arrived
