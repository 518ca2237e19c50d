"""The arrays that the step of a linear-attention layer reads and carries, stacked over layers (and slots)."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float


class Mixer(NamedTuple):
    """A mixer's weights that the step itself applies; its projections stay outside."""

    conv: Float[Array, "L taps C"]
    vectors: Float[Array, "L width"]  # a_log [Hv] | dt_bias [Hv] | what the step does not read

    def gates_of(self, layer: int, heads: int) -> tuple[Float[Array, " Hv"], Float[Array, " Hv"]]:
        """A layer's a_log and dt_bias."""
        return self.vectors[layer, :heads], self.vectors[layer, heads : 2 * heads]


class Recurrent(NamedTuple):
    """What the linear-attention layers carry of S sequences. Rings keep what belongs to position p at p mod their length."""

    h: Float[Array, "L S Hv Dv Dk"]
    conv: Float[Array, "L S inputs C"]
    k: Float[Array, "L S N Hk Dk"]
    u: Float[Array, "L S N Hv Dv"]
    decay: Float[Array, "L S N Hv"]


class Journal(NamedTuple):
    """Rows' rank-one updates, enough to move the state without a reduction; that of position p lies at p mod N."""

    k: Float[Array, "B N Hk Dk"]
    u: Float[Array, "B N Hv Dv"]
    decay: Float[Array, "B N Hv"]
