"""Plain-JAX gated delta rule: the twin of the GPU kernels and what CPUs run. Shapes are those of `api`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.rows import by_sequence

HIGHEST = jax.lax.Precision.HIGHEST


def update(state: Array, k: Array, u: Array, decay: Array, lowest: Array) -> Array:
    """One rank-one update, S <- g S + k u^T: state [Hv,Dk,Dv], k [Hv,Dk], u [Hv,Dv], decay [Hv].

    `fold` repeats in one program what `verify` did in another, and the bits must agree. A compiler may contract either product
    with the sum, and chooses by what surrounds it; a maximum with `lowest` (-inf, see `minus_infinity`) rounds both first.
    """
    kept = jnp.maximum(decay[:, None, None] * state, lowest)
    return kept + jnp.maximum(k[:, :, None] * u[:, None, :], lowest)


def minus_infinity(count: Array) -> Array:
    """-inf, computed from a count >= 0 so that no compiler knows it."""
    return -jnp.inf * (1.0 + count.astype(jnp.float32))


def fold(state: Array, journal: Any, pending: Array) -> Array:
    def one(state: Array, k: Array, u: Array, decay: Array, pending: Array) -> Array:
        ratio, lowest = u.shape[1] // k.shape[1], minus_infinity(pending)
        row = lambda t, state: update(state, jnp.repeat(k[t], ratio, axis=0), u[t], decay[t], lowest)  # noqa: E731
        return jax.lax.fori_loop(0, pending, row, state)

    return by_sequence(one, state, journal.k, journal.u, journal.decay, pending)


def verify(state: Array, q: Array, k: Array, v: Array, decay: Array, beta: Array, n_rows: Array) -> tuple[Array, Array]:
    ratio = v.shape[2] // k.shape[2]

    def one(
        state: Array, q: Array, k: Array, v: Array, decay: Array, beta: Array, n_rows: Array
    ) -> tuple[Array, Array]:
        def row(t: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            state, out, updates = carry
            kt, qt = jnp.repeat(k[t], ratio, axis=0), jnp.repeat(q[t], ratio, axis=0)
            read = jnp.einsum("hk,hkv->hv", kt, state, precision=HIGHEST)
            u = beta[t][:, None] * (v[t] - decay[t][:, None] * read)
            state = update(state, kt, u, decay[t], lowest)
            o = jnp.einsum("hk,hkv->hv", qt, state, precision=HIGHEST)
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
        target = beta[..., None] * (v - from_start * product("bhik,bhkv->bhiv", k, state))
        u = solve(coupling, target)
        out = from_start * product("bhik,bhkv->bhiv", q, state)
        out += product("bhij,bhjv->bhiv", between * product("bhik,bhjk->bhij", q, k), u)
        to_end = jnp.exp(running[..., -1:] - running)[..., None]
        state = from_start[..., -1:, :] * state + product("bhik,bhiv->bhkv", k * to_end, u)
        return state, out

    state, out = jax.lax.scan(body, state, (q, k, v, running, beta))
    out = jnp.moveaxis(out, (0, 2), (1, 3)).reshape(B, T + pad, Hv, Dv)
    return out[:, :T], state
