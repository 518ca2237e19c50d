"""The gated delta rule (Yang et al., "Gated Delta Networks", 2024) in the two forms that decoding needs.

One step, for a state S [Dk, Dv], decay g in (0, 1], write strength beta and unit-length keys and queries:

    u = beta (v - (g S)^T k);   S <- g S + k u^T;   o = S^T q / sqrt(Dk)

A state is held as its transpose [Dv, Dk]: what a key reads of a value column then lies together.

`verify` takes a few rows a sequence, one after another, and writes no state past the committed boundary: it leaves each row's
(k, u, g) in a journal. `fold` applies the rows that were accepted. `prefill` takes many rows of several sequences in their matrix
(WY) form.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.gated_delta import reference, triton, triton_prefill
from pallas_kernels.gated_delta.forms import Journal, Mixer, Recurrent
from pallas_kernels.ragged import rows_of
from pallas_kernels.registry import choose

VERIFY = {"reference": reference.verify}
FOLD = {"reference": reference.fold, "triton": triton.fold}
PREFILL = {"reference": reference.prefill, "triton": triton_prefill.prefill}
STEP = {"reference": reference.step, "triton": triton.step}


def fold(
    state: Float[Array, "B Hv Dv Dk"],
    journal: Journal,
    base: Int[Array, " B"],
    pending: Int[Array, " B"],
    *,
    implementation: str | None = None,
) -> Float[Array, "B Hv Dv Dk"]:
    """Applies the journal rows of positions base … base + pending - 1 of each sequence to `state` (float32)."""
    return choose("gated_delta.fold", FOLD, implementation, {"gpu": "triton"})(state, journal, base, pending)


def verify(
    state: Float[Array, "B Hv Dv Dk"],
    q: Float[Array, "B K Hk Dk"],
    k: Float[Array, "B K Hk Dk"],
    v: Float[Array, "B K Hv Dv"],
    decay: Float[Array, "B K Hv"],
    beta: Float[Array, "B K Hv"],
    n_rows: Int[Array, " B"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "B K Hv Dv"], Float[Array, "B K Hv Dv"]]:
    """Runs K rows from a settled `state`, all in float32. Rows at and past `n_rows` change nothing and return zeros.

    `q` and `k` have unit length, `q` carries the scale Dk^-1/2. Returns the outputs and the rows' updates `u`.
    """
    return choose("gated_delta.verify", VERIFY, implementation, {})(state, q, k, v, decay, beta, n_rows)


def prefill(
    state: Float[Array, "L N Hv Dv Dk"],
    layer: int,
    slots: Int[Array, " S"],
    q: Float[Array, "T Hk Dk"],
    k: Float[Array, "T Hk Dk"],
    v: Float[Array, "T Hv Dv"],
    log_decay: Float[Array, "T Hv"],
    beta: Float[Array, "T Hv"],
    begin: Int[Array, " S"],
    n_rows: Int[Array, " S"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "T Hv Dv"], Float[Array, "L N Hv Dv Dk"]]:
    """Runs the rows of a ragged batch of S sequences (`pallas_kernels.ragged`) in chunks of 64, in place.

    Sequence s goes on from state[layer, slots[s]] and leaves its state there; without rows it leaves it as it was. The bits of a
    sequence depend on its own rows and on T alone. Padding may hold any finite numbers and comes out as zeros.
    """
    live = rows_of(begin, n_rows, q.shape[0]).live
    log_decay, beta = (jnp.where(live[:, None], x, 0.0) for x in (log_decay, beta))  # such a row changes nothing
    run = choose("gated_delta.prefill", PREFILL, implementation, {"gpu": "triton"})
    out, state = run(state, layer, slots, q, k, v, log_decay, beta, begin, n_rows)
    return jnp.where(live[:, None, None], out, 0.0), state


def step(
    mixer: Mixer,
    state: Recurrent,
    layer: int,
    slots: Int[Array, " B"],
    base: Int[Array, " B"],
    pending: Int[Array, " B"],
    n_rows: Int[Array, " B"],
    projected: Float[Array, "R width"],
    K: int,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "R Hv Dv"], Recurrent]:
    """One layer of a verify from its input projection on: convolution, gates, norms, fold of the `pending` rows, K new rows.

    Row t of sequence b is `projected[b * K + t]`: queries, keys and values before the convolution, output gate, write strength,
    decay. The state moves to base + pending and the new rows go into the rings; rows at and past `n_rows` change nothing that
    is ever read. Returns the recurrence's float32 output, with zeros for padding rows, and the state.
    """
    return choose("gated_delta.step", STEP, implementation, {"gpu": "triton"})(
        mixer, state, layer, slots, base, pending, n_rows, projected, K
    )
