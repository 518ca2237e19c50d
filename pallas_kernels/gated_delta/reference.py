"""Plain-JAX gated delta rule: the twin of the GPU kernels and what CPUs run. Shapes are those of `api`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.gated_delta.forms import Journal
from pallas_kernels.ragged import BLOCK, Rows, blocks
from pallas_kernels.rows import by_sequence, pad_rows

HIGHEST = jax.lax.Precision.HIGHEST


def update(state: Array, k: Array, u: Array, decay: Array, lowest: Array) -> Array:
    """One rank-one update, S <- g S + u k^T: state [Hv,Dv,Dk], k [Hv,Dk], u [Hv,Dv], decay [Hv].

    `fold` repeats in one program what `verify` did in another, and the bits must agree. A compiler may contract either product
    with the sum, and chooses by what surrounds it; a maximum with `lowest` (-inf, see `minus_infinity`) rounds both first.
    """
    kept = jnp.maximum(decay[:, None, None] * state, lowest)
    return kept + jnp.maximum(k[:, None, :] * u[:, :, None], lowest)


def minus_infinity(count: Array) -> Array:
    """-inf, computed from a count >= 0 so that no compiler knows it."""
    return -jnp.inf * (1.0 + count.astype(jnp.float32))


def fold(state: Array, journal: Any, base: Array, pending: Array) -> Array:
    def one(state: Array, k: Array, u: Array, decay: Array, base: Array, pending: Array) -> Array:
        ratio, lowest = u.shape[1] // k.shape[1], minus_infinity(pending)

        def row(t: Array, state: Array) -> Array:
            at = (base + t) % u.shape[0]
            return update(state, jnp.repeat(k[at], ratio, axis=0), u[at], decay[at], lowest)

        return jax.lax.fori_loop(0, pending, row, state)

    return by_sequence(one, state, journal.k, journal.u, journal.decay, base, pending)


def verify(state: Array, q: Array, k: Array, v: Array, decay: Array, beta: Array, n_rows: Array) -> tuple[Array, Array]:
    ratio = v.shape[2] // k.shape[2]

    def one(
        state: Array, q: Array, k: Array, v: Array, decay: Array, beta: Array, n_rows: Array
    ) -> tuple[Array, Array]:
        def row(t: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            state, out, updates = carry
            kt, qt = jnp.repeat(k[t], ratio, axis=0), jnp.repeat(q[t], ratio, axis=0)
            read = jnp.einsum("hk,hvk->hv", kt, state, precision=HIGHEST)
            u = beta[t][:, None] * (v[t] - decay[t][:, None] * read)
            state = update(state, kt, u, decay[t], lowest)
            o = jnp.einsum("hk,hvk->hv", qt, state, precision=HIGHEST)
            return state, out.at[t].set(o), updates.at[t].set(u)

        lowest = minus_infinity(n_rows)
        # A bound known only at run time keeps this a loop for every K: one body, one set of bits.
        zeros = jnp.zeros(v.shape, jnp.float32)
        return jax.lax.fori_loop(0, n_rows, row, (state, zeros, zeros))[1:]

    return by_sequence(one, state, q, k, v, decay, beta, n_rows)


def solve(coupling: Array, target: Array) -> Array:
    """U of (I + coupling) U = target, where coupling [..., C, C] is strictly lower triangular."""
    size = coupling.shape[-1]

    def by_rows(coupling: Array, target: Array) -> Array:
        def row(i: Array, u: Array) -> Array:
            return u.at[..., i, :].add(-jnp.einsum("...j,...jv->...v", coupling[..., i, :], u, precision=HIGHEST))

        return jax.lax.fori_loop(0, size, row, target)

    def by_library(coupling: Array, target: Array) -> Array:
        system = jnp.eye(size) + coupling
        return jax.lax.linalg.triangular_solve(system, target, left_side=True, lower=True, unit_diagonal=True)

    # On a CPU the library needs several milliseconds for one matrix of 64 rows, 250 times what the rows need.
    return jax.lax.platform_dependent(coupling, target, cpu=by_rows, default=by_library)


def chunk_form(state: Array, q: Array, k: Array, v: Array, log_decay: Array, beta: Array) -> tuple[Array, Array]:
    """One chunk of C rows in its matrix form: state [Hv,Dv,Dk], q and k [C,Hk,Dk], v [C,Hv,Dv], log_decay and beta [C,Hv] ->
    state, output [C,Hv,Dv].

    With G the running sum of log decays: (I + L) U = beta V - beta e^G K S_0, L strictly lower triangular,
    L_ij = beta_i e^(G_i - G_j) k_i.k_j; then O = e^G Q S_0 + (masked e^(G_i - G_j) q_i.k_j) U."""
    size, ratio = q.shape[0], v.shape[1] // q.shape[1]
    heads = lambda x: jnp.moveaxis(x, 1, 0)  # noqa: E731
    q, k = (jnp.repeat(heads(x), ratio, axis=0) for x in (q, k))
    v, beta, running = heads(v), heads(beta), jnp.cumsum(heads(log_decay), axis=-1)
    lower = jnp.tril(jnp.ones((size, size), bool))
    strict = jnp.tril(jnp.ones((size, size), bool), -1)
    product = lambda spec, *xs: jnp.einsum(spec, *xs, precision=HIGHEST)  # noqa: E731
    difference = running[..., :, None] - running[..., None, :]
    between = jnp.exp(jnp.where(lower, difference, -jnp.inf))  # masked before exp: the upper part would overflow
    coupling = jnp.where(strict, between, 0.0) * product("hik,hjk->hij", k, k) * beta[..., None]
    from_start = jnp.exp(running)[..., None]
    target = beta[..., None] * (v - from_start * product("hik,hvk->hiv", k, state))
    u = solve(coupling, target)
    out = from_start * product("hik,hvk->hiv", q, state)
    out += product("hij,hjv->hiv", between * product("hik,hjk->hij", q, k), u)
    to_end = jnp.exp(running[..., -1:] - running)[..., None]
    state = from_start[..., -1:, :] * state + product("hik,hiv->hvk", k * to_end, u)
    return state, heads(out)


def prefill(
    state: Array,
    layer: int,
    slots: Array,
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    beta: Array,
    begin: Array,
    n_rows: Array,
) -> tuple[Array, Array]:
    # A block more than there are rows for: a slice that is the whole would be simplified away, and the loop's body perhaps be
    # compiled with what stands around it.
    total = (blocks(v.shape[0]) + 1) * BLOCK
    rows = [pad_rows(x.astype(jnp.float32), total) for x in (q, k, v, log_decay, beta)]

    def sequence(s: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        def chunk(c: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            h, out = carry
            at = (begin[s] + c) * BLOCK
            h, new = chunk_form(h, *(jax.lax.dynamic_slice_in_dim(x, at, BLOCK) for x in rows))
            return h, jax.lax.dynamic_update_slice_in_dim(out, new, at, 0)

        mine, out = carry
        # A bound known only at run time keeps this a loop: one body, one set of bits, whatever else is in the batch.
        h, out = jax.lax.fori_loop(0, (n_rows[s] + BLOCK - 1) // BLOCK, chunk, (mine[s], out))
        return mine.at[s].set(h), out

    out = jnp.zeros((total, *v.shape[1:]), jnp.float32)
    # One slot after another, in place: a loop that carried all of `state` would copy it.
    at = lambda s: (layer, slots[s], 0, 0, 0)  # noqa: E731
    taken = [jax.lax.dynamic_slice(state, at(s), (1, 1, *state.shape[2:])) for s in range(slots.shape[0])]
    mine, out = jax.lax.fori_loop(0, slots.shape[0], sequence, (jnp.concatenate(taken, axis=1)[0], out))
    for s in range(slots.shape[0]):
        state = jax.lax.dynamic_update_slice(state, mine[None, s : s + 1], at(s))
    return out[: v.shape[0]], state


def whole(q: Array, k: Array, v: Array, log_decay: Array, beta: Array) -> Array:
    """Outputs [B, T, Hv, Dv] of whole sequences [B, T, …] from an empty state, which can be differentiated: for training."""
    B, T, Hv, Dv = v.shape
    padded = lambda x: jnp.pad(x, [(0, 0), (0, -T % BLOCK)] + [(0, 0)] * (x.ndim - 2))  # noqa: E731
    by_chunk = lambda x: jnp.moveaxis(padded(x).reshape(B, -1, BLOCK, *x.shape[2:]), 1, 0)  # noqa: E731
    state = jnp.zeros((B, Hv, Dv, k.shape[-1]), jnp.float32)
    form = jax.vmap(chunk_form)
    _, out = jax.lax.scan(lambda h, xs: form(h, *xs), state, [by_chunk(x) for x in (q, k, v, log_decay, beta)])
    return jnp.moveaxis(out, 0, 1).reshape(B, -1, Hv, Dv)[:, :T]


def window(inputs: Array, slots: Array, end: Array, past: int) -> Array:
    """The last `past` convolution inputs before position `end`, oldest first, zeros before position 0: ring [L,S,N,C] ->
    [L,B,past,C]."""
    position = end[:, None] + jnp.arange(-past, 0)
    found = inputs[:, slots[:, None], position % inputs.shape[2]]
    return jnp.where(position[None, :, :, None] >= 0, found, 0)


def sliding(inputs: Array, count: int, width: int) -> Array:
    """Windows of the convolution, oldest input first: [B, count + width - 1, C] -> [B, count, width, C]."""
    return jnp.stack([inputs[:, w : w + count] for w in range(width)], axis=2)


def windows(inputs: Array, before: Array, rows: Rows, begin: Array) -> Array:
    """Windows of the convolution of the rows of a ragged batch, [T, C] -> [T, width, C]: a sequence's first rows reach back to what
    came `before` them, [S, width - 1, C]."""
    T, reach = inputs.shape[0], before.shape[1]
    size = min(BLOCK, T)
    count = blocks(T)
    parts = pad_rows(inputs, count * size).reshape(count, size, -1)
    tails = jnp.concatenate([jnp.zeros_like(parts[:1, -reach:]), parts[:-1, -reach:]])
    owner = rows.owner[::BLOCK]
    first = begin[owner] == jnp.arange(count)
    inputs = jnp.concatenate([jnp.where(first[:, None, None], before[owner], tails), parts], axis=1)
    return sliding(inputs, size, reach + 1).reshape(count * size, reach + 1, -1)[:T]


def last(inputs: Array, before: Array, begin: Array, n_rows: Array) -> Array:
    """The last inputs of each sequence of a ragged batch, as many as came `before`: [T, C] -> [S, width - 1, C]."""
    reach = before.shape[1]
    number = n_rows[:, None] + jnp.arange(-reach, 0)
    new = inputs[jnp.clip(begin[:, None] * BLOCK + number, 0, inputs.shape[0] - 1)]
    old = jnp.take_along_axis(before, jnp.minimum(n_rows[:, None] + jnp.arange(reach), reach - 1)[..., None], axis=1)
    return jnp.where((number >= 0)[..., None], new, old)


def gates(a: Array, b: Array, a_log: Array, dt_bias: Array) -> tuple[Array, Array]:
    """Log decay and write strength [.., Hv], float32 whatever the weights are."""
    log_decay = -jnp.exp(a_log) * jax.nn.softplus(a.astype(jnp.float32) + dt_bias)
    return log_decay, jax.nn.sigmoid(b).astype(jnp.float32)


def convolve(windows: Array, weight: Array, Hk: int, Dk: int, Hv: int, Dv: int) -> tuple[Array, Array, Array]:
    """From windows [.., taps, C]: float32 queries [.., Hk, Dk] (unit length, scaled), keys (unit length), values [.., Hv, Dv]."""
    y = jnp.sum(windows.astype(jnp.float32) * weight.astype(jnp.float32), axis=-2).astype(windows.dtype)
    y = jax.nn.silu(y).astype(jnp.float32)
    q, k, v = jnp.split(y, [Hk * Dk, 2 * Hk * Dk], axis=-1)
    q, k = (unit_length(x.reshape(*y.shape[:-1], Hk, Dk)) for x in (q, k))
    return q * Dk**-0.5, k, v.reshape(*y.shape[:-1], Hv, Dv)


def unit_length(x: Array) -> Array:
    """L2 normalisation with 1e-6 under the root."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def step(
    mixer: Any,
    state: Any,
    layer: int,
    slots: Array,
    base: Array,
    pending: Array,
    n_rows: Array,
    projected: Array,
    K: int,
) -> tuple[Array, Any]:
    B, (_, _, Hv, Dv, Dk) = slots.shape[0], state.h.shape
    Hk, taps = state.k.shape[3], mixer.conv.shape[1]
    C = 2 * Hk * Dk + Hv * Dv
    start = base + pending
    rows = projected[: B * K].reshape(B, K, -1)
    mixed, _, b, a = jnp.split(rows, [C, C + Hv * Dv, C + Hv * Dv + Hv], axis=-1)
    log_decay, beta = gates(a, b, *mixer.gates_of(layer, Hv))
    decay = jnp.exp(log_decay)
    past = window(state.conv[layer : layer + 1], slots, start, taps - 1)[0]
    inputs = sliding(jnp.concatenate([past, mixed], axis=1), K, taps)
    q, k, v = convolve(inputs, mixer.conv[layer], Hk, Dk, Hv, Dv)
    h = fold(state.h[layer, slots], Journal(*(x[layer, slots] for x in state[2:])), base, pending)
    out, u = verify(h, q, k, v, decay, beta, n_rows)

    def put(ring: Array, value: Array) -> Array:
        at = (start[:, None] + jnp.arange(K)) % ring.shape[2]
        return ring.at[layer, slots[:, None], at].set(value.astype(ring.dtype))

    state = state._replace(
        h=state.h.at[layer, slots].set(h),
        conv=put(state.conv, mixed),
        k=put(state.k, k),
        u=put(state.u, u),
        decay=put(state.decay, decay),
    )
    return pad_rows(out.reshape(B * K, Hv, Dv), projected.shape[0]), state
