"""The gated delta rule over many rows of several sequences in its matrix form, as two Pallas-Triton kernels.

`_couple` works on all chunks of 64 rows at once. With G the running sum of a chunk's log decays and L strictly lower triangular,
L_ij = beta_i e^(G_i - G_j) k_i.k_j, it leaves T = (I + L)^-1 and A_ij = e^(G_i - G_j) q_i.k_j (j <= i). `_scan` then goes through
the chunks of each sequence with some columns of its state in registers:

    U = T (beta (V - e^G K S));   O = e^G Q S + A U;   S <- e^(G_end) S + K^T (e^(G_end - G) U)

all transposed, so that the few columns are the left side of every product and K, Q, T and A the right side as they lie.

Keys and queries are rounded to bfloat16, as everything is that the model projects. What is float32 goes through the tensor cores as
two bfloat16 numbers whose sum it is to 16 bits (`_split`) on the way to the state, and as one on the way to the output. T is
made in float32 of tiles of 16.
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

from pallas_kernels.ragged import BLOCK, blocks
from pallas_kernels.registry import large_shared_memory
from pallas_kernels.rows import pad_rows

CHUNK, TILE = BLOCK, 16


def prefill(state: Array, layer: int, slots: Array, *args: Array, **tuning: Any) -> tuple[Array, Array]:
    """As `api.prefill`, but that padding needs `log_decay` and `beta` of zero, and comes out as anything."""
    L, N, *rest = (
        state.shape
    )  # to the kernel, the layers' slots are slots like others: it is compiled once for all layers
    out, flat = _prefill(state.reshape(L * N, *rest), layer * N + slots, *args, **tuning)
    return out, flat.reshape(state.shape)


@functools.partial(jax.jit, static_argnames=("columns", "num_warps", "num_stages", "couple_warps", "interpret"))
def _prefill(
    state: Array,
    slots: Array,
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    beta: Array,
    begin: Array,
    n_rows: Array,
    *,
    columns: int = 32,
    num_warps: int | None = None,
    num_stages: int = 2,
    couple_warps: int = 4,
    interpret: bool = False,
) -> tuple[Array, Array]:
    (T, Hk, _), S = q.shape, slots.shape[0]
    Hv, Dv = v.shape[1:]
    # With half the warps some registers spill, which costs an H200 less than the second half's barriers.
    num_warps = num_warps or (4 if not interpret and large_shared_memory() else 8)
    columns = min(columns, Dv)
    total = blocks(T) * CHUNK
    q, k, v, log_decay, beta = (pad_rows(x, total) for x in (q, k, v, log_decay, beta))
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    barrier = (lambda: None) if interpret else plgpu.debug_barrier  # programs of the interpreter have no threads
    pairs = jax.ShapeDtypeStruct((Hv, total, CHUNK), jnp.float32)
    halves = jax.ShapeDtypeStruct((Hv, total, CHUNK), jnp.bfloat16)
    _, *matrices = pl.pallas_call(
        functools.partial(_couple, Hk, barrier),
        grid=(total // CHUNK, Hv),
        out_shape=(pairs, *[halves] * 3),
        compiler_params=plgpu.CompilerParams(num_warps=couple_warps, num_stages=1),
        interpret=interpret,
        name="gated_delta_couple",
    )(q, k, log_decay, beta)
    out, state = pl.pallas_call(
        functools.partial(_scan, Hk, columns),
        grid=(Dv // columns, Hv, S),
        out_shape=(
            jax.ShapeDtypeStruct((total, Hv, Dv), jnp.float32),
            jax.ShapeDtypeStruct(state.shape, jnp.float32),
        ),
        input_output_aliases={3: 1},
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name="gated_delta_scan",
    )(slots, begin, n_rows, state, q, k, v, log_decay, beta, *matrices)
    return out[:T], state


def _couple(Hk: int, barrier: Callable[[], None], q, k, log_decay, beta, inverse, high, low, mixing) -> None:
    c, head = pl.program_id(0), pl.program_id(1)
    Hv = beta.shape[1]
    key_head, first = head // (Hv // Hk), c * CHUNK
    rows = pl.ds(first, CHUNK)
    queries, keys = q[rows, key_head, :], k[rows, key_head, :]
    running = jnp.cumsum(log_decay[rows, head], axis=0)
    at = jnp.arange(CHUNK)
    lower, strict = at[:, None] >= at[None, :], at[:, None] > at[None, :]
    difference = running[:, None] - running[None, :]
    between = jnp.exp(jnp.where(lower, difference, -jnp.inf))  # masked before exp: the upper part would overflow
    mixing[head, rows, :] = (between * plgpu.dot(queries, keys, trans_b=True)).astype(mixing.dtype)
    coupling = jnp.where(strict, between, 0.0) * plgpu.dot(keys, keys, trans_b=True) * beta[rows, head][:, None]
    inverse[head, rows, :] = coupling
    # A block cannot be cut out of registers: it takes the way through memory.
    barrier()
    _invert(inverse, head, first, barrier)
    barrier()
    high[head, rows, :], low[head, rows, :] = _split(inverse[head, rows, :])


def _invert(matrix: Any, head: Array, first: Array, barrier: Callable[[], None]) -> None:
    """L -> (I + L)^-1 in place, for L [64, 64], strictly lower triangular, in `matrix[head]` from row `first` on; tiles of 16.

    The diagonal tiles are inverted row after row, all at once; those below follow from them:
    X_ij = -D_i (L_ij D_j + the sum of L_im X_mj over j < m < i).
    """
    n = CHUNK // TILE
    block, row = jnp.arange(n)[:, None, None], jnp.arange(TILE)
    index = (first + block * TILE + row[None, :, None], block * TILE + row[None, None, :])
    at = matrix.at[(head, *(jnp.broadcast_to(x, (n, TILE, TILE)) for x in index))]
    diagonal = plgpu.load(at)
    unit = jnp.broadcast_to((row[:, None] == row[None, :])[None], diagonal.shape).astype(jnp.float32)

    def solve(i, solved):
        here = jnp.broadcast_to((row == i)[None, :, None], diagonal.shape)
        left = jnp.sum(jnp.where(here, diagonal, 0.0), axis=1)  # row i of each block [n, TILE]
        known = jnp.sum(left[:, :, None] * solved, axis=1)
        return jnp.where(here, unit - known[:, None, :], solved)

    plgpu.store(at, jax.lax.fori_loop(1, TILE, solve, unit))
    barrier()
    part = lambda i, j: (head, pl.ds(first + i * TILE, TILE), pl.ds(j * TILE, TILE))  # noqa: E731
    product = functools.partial(plgpu.dot, precision=jax.lax.Precision.HIGHEST)
    inverse = {(i, i): matrix[part(i, i)] for i in range(n)}
    below = {(i, j): matrix[part(i, j)] for i in range(n) for j in range(i)}
    for i, j in sorted(below, key=lambda pair: pair[0] - pair[1]):
        total = product(below[i, j], inverse[j, j])
        for m in range(j + 1, i):
            total += product(below[i, m], inverse[m, j])
        inverse[i, j] = -product(inverse[i, i], total)
    for pair in below:
        matrix[part(*pair)] = inverse[pair]


def _split(x: Array) -> tuple[Array, Array]:
    """Two bfloat16 arrays whose sum is `x` to 16 bits."""
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def _product(a: Array, *b: Array, transposed: bool) -> Array:
    """a @ b, or a @ b.T, of a float32 `a` and a `b` of one bfloat16 part, or two; what two low parts would add is left out."""
    high, low = _split(a)
    product = functools.partial(plgpu.dot, trans_b=transposed)
    out = product(low, b[0]) + product(high, b[0])
    return product(high, b[1]) + out if len(b) > 1 else out


def _scan(
    Hk: int,
    columns: int,
    slots,
    begins,
    counts,
    initial,
    q,
    k,
    v,
    log_decay,
    beta,
    high,
    low,
    mixing,
    out,
    final,
) -> None:
    part, head, s = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    Hv = beta.shape[1]
    key_head, mine = head // (Hv // Hk), pl.ds(part * columns, columns)
    slot, begin, count = slots[s], begins[s], counts[s]
    last = jnp.arange(CHUNK) == CHUNK - 1

    def chunk(c, state):
        rows = pl.ds((begin + c) * CHUNK, CHUNK)
        queries, keys = q[rows, key_head, :], k[rows, key_head, :]
        values = v[rows, head, mine].astype(jnp.float32).T
        running = jnp.cumsum(log_decay[rows, head], axis=0)
        end = jnp.sum(jnp.where(last, running, 0.0), axis=0)
        from_start = jnp.exp(running)[None, :]
        known = from_start * _product(state, keys, transposed=True)
        target = beta[rows, head][None, :] * (values - known)
        u = _product(target, high[head, rows, :], low[head, rows, :], transposed=True)
        # What is only read out need not be better than the bfloat16 that it becomes.
        read = from_start * plgpu.dot(state.astype(queries.dtype), queries, trans_b=True)
        read += plgpu.dot(u.astype(queries.dtype), mixing[head, rows, :], trans_b=True)
        out[rows, head, mine] = read.T
        return jnp.exp(end) * state + _product(jnp.exp(end - running)[None, :] * u, keys, transposed=False)

    @pl.when(count > 0)
    def _():
        chunks = (count + CHUNK - 1) // CHUNK
        final[slot, head, mine, :] = jax.lax.fori_loop(0, chunks, chunk, initial[slot, head, mine, :])
