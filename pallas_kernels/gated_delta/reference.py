"""Plain-JAX gated delta rule: the twin of the GPU kernels and what CPUs run. Shapes are those of `api`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.gated_delta.forms import Journal
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


def prefill(
    state: Array, q: Array, k: Array, v: Array, log_decay: Array, beta: Array, *, chunk: int
) -> tuple[Array, Array]:
    """Within a chunk, with G the running sum of log decays: (I + L) U = beta V - beta e^G K S_0, L strictly lower triangular,
    L_ij = beta_i e^(G_i - G_j) k_i.k_j; then O = e^G Q S_0 + (masked e^(G_i - G_j) q_i.k_j) U."""
    B, T, Hk, _ = q.shape
    Hv, Dv = v.shape[2:]
    pad = -T % chunk
    padded = lambda x: jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))  # noqa: E731
    q, k, v, log_decay, beta = (padded(x) for x in (q, k, v, log_decay, beta))
    count = (T + pad) // chunk
    ratio = Hv // Hk
    # [count, B, H, chunk, …]: the scan runs over chunks, everything inside is a batch of matrix products
    heads = lambda x: jnp.moveaxis(x.reshape(B, count, chunk, *x.shape[2:]), (1, 3), (0, 2))  # noqa: E731
    q, k = (jnp.repeat(heads(x), ratio, axis=2) for x in (q, k))
    v, beta, running = heads(v), heads(beta), jnp.cumsum(heads(log_decay), axis=-1)
    lower = jnp.tril(jnp.ones((chunk, chunk), bool))
    strict = jnp.tril(jnp.ones((chunk, chunk), bool), -1)
    product = lambda spec, *xs: jnp.einsum(spec, *xs, precision=HIGHEST)  # noqa: E731

    def body(state: Array, xs: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, running, beta = xs
        difference = running[..., :, None] - running[..., None, :]
        between = jnp.exp(jnp.where(lower, difference, -jnp.inf))  # masked before exp: the upper part would overflow
        coupling = jnp.where(strict, between, 0.0) * product("bhik,bhjk->bhij", k, k) * beta[..., None]
        from_start = jnp.exp(running)[..., None]
        target = beta[..., None] * (v - from_start * product("bhik,bhvk->bhiv", k, state))
        u = solve(coupling, target)
        out = from_start * product("bhik,bhvk->bhiv", q, state)
        out += product("bhij,bhjv->bhiv", between * product("bhik,bhjk->bhij", q, k), u)
        to_end = jnp.exp(running[..., -1:] - running)[..., None]
        state = from_start[..., -1:, :] * state + product("bhik,bhiv->bhvk", k * to_end, u)
        return state, out

    state, out = jax.lax.scan(body, state, (q, k, v, running, beta))
    out = jnp.moveaxis(out, (0, 2), (1, 3)).reshape(B, T + pad, Hv, Dv)
    return out[:, :T], state


def window(inputs: Array, slots: Array, end: Array, past: int) -> Array:
    """The last `past` convolution inputs before position `end`, oldest first, zeros before position 0: ring [L,S,N,C] ->
    [L,B,past,C]."""
    position = end[:, None] + jnp.arange(-past, 0)
    found = inputs[:, slots[:, None], position % inputs.shape[2]]
    return jnp.where(position[None, :, :, None] >= 0, found, 0)


def sliding(inputs: Array, count: int, width: int) -> Array:
    """Windows of the convolution, oldest input first: [B, count + width - 1, C] -> [B, count, width, C]."""
    return jnp.stack([inputs[:, w : w + count] for w in range(width)], axis=2)


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
