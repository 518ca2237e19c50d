"""The gated delta rule (Yang et al., "Gated Delta Networks", 2024) in the two forms that decoding needs.

One step, for a state S [Dk, Dv], decay g in (0, 1], write strength beta and unit-length keys and queries:

    u = beta (v - (g S)^T k);   S <- g S + k u^T;   o = S^T q / sqrt(Dk)

`verify` takes a few rows a sequence, one after another, and writes no state past the committed boundary: it leaves each row's
(k, u, g) in a journal. `fold` applies the rows that were accepted. `prefill` takes a long chunk in its matrix (WY) form.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float, Int

from pallas_kernels.gated_delta import reference
from pallas_kernels.registry import choose


class Journal(NamedTuple):
    """The rank-one updates of the last verify's rows, row-major: enough to move the state without a reduction."""

    k: Float[Array, "B M Hk Dk"]
    u: Float[Array, "B M Hv Dv"]
    decay: Float[Array, "B M Hv"]


VERIFY = {"reference": reference.verify}
FOLD = {"reference": reference.fold}
PREFILL = {"reference": reference.prefill}


def fold(
    state: Float[Array, "B Hv Dk Dv"], journal: Journal, pending: Int[Array, " B"], *, implementation: str | None = None
) -> Float[Array, "B Hv Dk Dv"]:
    """Applies the first `pending` journal rows of each sequence to `state` (float32)."""
    return choose("gated_delta.fold", FOLD, implementation, {})(state, journal, pending)


def verify(
    state: Float[Array, "B Hv Dk Dv"],
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
    state: Float[Array, "B Hv Dk Dv"],
    q: Float[Array, "B T Hk Dk"],
    k: Float[Array, "B T Hk Dk"],
    v: Float[Array, "B T Hv Dv"],
    log_decay: Float[Array, "B T Hv"],
    beta: Float[Array, "B T Hv"],
    *,
    chunk: int = 64,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T Hv Dv"], Float[Array, "B Hv Dk Dv"]]:
    """Runs T rows in chunks of `chunk`. A row with `log_decay = beta = 0` is padding and leaves the state as it was."""
    return choose("gated_delta.prefill", PREFILL, implementation, {})(state, q, k, v, log_decay, beta, chunk=chunk)
