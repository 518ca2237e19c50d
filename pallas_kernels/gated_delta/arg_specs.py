"""Named shapes of the gated delta rule, and arguments of them for tests, for compiling without a GPU, and for benchmarks.

The `…_specs` are shapes alone; the `…_arrays` are seeded random values of them. With `garbage`, everything that no implementation
may read is NaN: other slots, ring places outside of what is pending, padding rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gated_delta.forms import Mixer, Recurrent
from pallas_kernels.ragged import BLOCK, blocks, rows_of
from pallas_kernels.rows import round_up

TAPS = 4


class Shape(NamedTuple):
    """Key and value heads, their dims, and how many such layers a model has."""

    Hk: int
    Hv: int
    Dk: int
    Dv: int
    layers: int

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.Hk * self.Dk + self.Hv * self.Dv

    @property
    def width(self) -> int:
        """Of the input projection: the channels, output gate, write strength and decay."""
        return self.channels + self.Hv * self.Dv + 2 * self.Hv

    @property
    def state_bytes(self) -> int:
        """Of one sequence's state in one layer."""
        return 4 * self.Hv * self.Dv * self.Dk


SHAPES = {
    "27b": Shape(16, 48, 128, 128, layers=48),
    "35b-a3b": Shape(16, 32, 128, 128, layers=30),
    "tiny-agent": Shape(2, 2, 128, 128, layers=6),
    "ratio-1": Shape(4, 4, 64, 64, layers=2),
    "ratio-2": Shape(4, 8, 64, 64, layers=2),
    "ratio-3": Shape(2, 6, 64, 64, layers=2),
    "ratio-4": Shape(2, 8, 64, 64, layers=2),
}
ROW_GROUP = 16  # rows of a step come in groups
SMALL = {  # for the interpreter, which is slow
    "small-1": Shape(2, 2, 32, 32, layers=2),
    "small-2": Shape(1, 2, 64, 32, layers=2),
    "small-3": Shape(1, 3, 32, 64, layers=2),
    "small-4": Shape(1, 4, 32, 32, layers=2),
}

type StepArgs = tuple[Mixer, Recurrent, Any, Any, Any, Any, Any]


def step_specs(
    shape: Shape, B: int, K: int, *, slots: int = 2, max_rows: int = 17, dtype: Any = jnp.bfloat16
) -> StepArgs:
    """What `api.step` takes, but for `layer` and `K`: mixer, state, slots, base, pending, n_rows, projected.

    Slots 0 … `slots` - 1; slot 0 is the sentinel. The rings hold two verifies of `max_rows`.
    """
    Hk, Hv, Dk, Dv, L = shape
    of: Any = jax.ShapeDtypeStruct
    vectors = of((L, 2 * Hv), jnp.dtype("float32"))
    mixer = Mixer(of((L, TAPS, shape.channels), dtype), vectors)
    N, f32 = 2 * max_rows, jnp.dtype("float32")
    state = Recurrent(
        of((L, slots, Hv, Dv, Dk), f32),
        of((L, slots, N + TAPS - 1, shape.channels), dtype),
        of((L, slots, N, Hk, Dk), f32),
        of((L, slots, N, Hv, Dv), f32),
        of((L, slots, N, Hv), f32),
    )
    number = of((B,), jnp.dtype("int32"))
    return mixer, state, number, number, number, number, of((round_up(B * K, ROW_GROUP), shape.width), dtype)


def step_arrays(
    shape: Shape,
    K: int,
    *,
    base: Sequence[int],
    pending: Sequence[int],
    n_rows: Sequence[int],
    layer: int = 0,
    max_rows: int = 17,
    dtype: Any = jnp.bfloat16,
    seed: int = 0,
    garbage: bool = False,
) -> StepArgs:
    """Arrays of `step_specs` for sequences in the slots 1, 2, … (made on the host: for small shapes)."""
    B, rng = len(base), np.random.default_rng(seed)
    specs = step_specs(shape, B, K, slots=B + 1, max_rows=max_rows, dtype=dtype)
    Hv, Dk = shape.Hv, shape.Dk
    normal: Any = lambda spec, scale=1.0: rng.normal(size=spec.shape) * scale  # noqa: E731
    a_log, dt_bias = np.log(rng.uniform(1, 16, (shape.layers, Hv))), rng.normal(size=(shape.layers, Hv))
    vectors: Any = np.concatenate([a_log, dt_bias], axis=1)
    mixer = Mixer(normal(specs[0].conv, 0.5), vectors)
    scales = (0.1, 1.0, Dk**-0.5, 1.0, 1.0)
    state = Recurrent(*(normal(spec, scale) for spec, scale in zip(specs[1], scales, strict=True)))
    decay: Any = rng.uniform(0.2, 1, specs[1].decay.shape)
    state = state._replace(decay=decay)
    projected = normal(specs[6])
    projected[:, -Hv:] -= 2.0  # decays of some rows' memory
    if garbage:
        kept: Any = Recurrent(*jax.tree.map(lambda x: np.zeros(x.shape, bool), tuple(state)))
        for b in range(B):
            slot, start = b + 1, base[b] + pending[b]
            kept.h[layer, slot] = True
            for position in range(max(0, start - TAPS + 1), start):
                kept.conv[layer, slot, position % kept.conv.shape[2]] = True
            for position in range(base[b], start):
                for ring in kept[2:]:
                    ring[layer, slot, position % ring.shape[2]] = True
            projected[b * K + n_rows[b] : (b + 1) * K] = np.nan
        projected[B * K :] = np.nan
        state: Any = Recurrent(*jax.tree.map(lambda keep, x: np.where(keep, x, np.nan), tuple(kept), tuple(state)))
        others = [i for i in range(shape.layers) if i != layer]
        weights: Any = mixer
        for x in weights:
            x[others] = np.nan
    numbers = (np.arange(1, B + 1), base, pending, n_rows)
    values = (mixer, state, *(np.asarray(x) for x in numbers), projected)
    return jax.tree.map(lambda x, spec: jnp.asarray(x, spec.dtype), values, specs)


def prefill_specs(shape: Shape, T: int, S: int = 1, *, dtype: Any = jnp.bfloat16) -> tuple[Any, ...]:
    """What `api.prefill` takes, but for `layer`: state (of one layer and the slots 0 … S), slots, q, k, v, log_decay, beta, begin,
    n_rows."""
    Hk, Hv, Dk, Dv, _ = shape
    f32 = jnp.dtype("float32")
    number = ((S,), jnp.dtype("int32"))
    rows = ((T, Hk, Dk), dtype), ((T, Hk, Dk), dtype), ((T, Hv, Dv), dtype), ((T, Hv), f32), ((T, Hv), f32)
    return tuple(jax.ShapeDtypeStruct(*x) for x in (((1, S + 1, Hv, Dv, Dk), f32), number, *rows, number, number))


def prefill_arrays(
    shape: Shape, n_rows: Sequence[int], T: int | None = None, *, hard: bool = False, seed: int = 0
) -> tuple[Any, ...]:
    """Arrays of `prefill_specs` for sequences in the slots 1, 2, …, one after another in T rows (None: as many as they take); made
    on the device.

    With `hard`, all keys of a head are the same, beta is one and nothing decays: the worst system that a chunk can have.
    """
    taken = np.asarray([blocks(n) for n in n_rows])
    T, begin = T or int(taken.sum()) * BLOCK, np.cumsum(taken) - taken
    keys = jax.random.split(jax.random.key(seed), 6)
    specs = prefill_specs(shape, T, len(n_rows))
    random = lambda key, spec: jax.random.normal(key, spec.shape, jnp.float32)  # noqa: E731
    state, q, k, v, a, b = (random(key, spec) for key, spec in zip(keys, (specs[0], *specs[2:7]), strict=True))
    if hard:
        k = jnp.broadcast_to(k[:1], k.shape)
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
    live = rows_of(jnp.asarray(begin), jnp.asarray(n_rows), T).live[:, None]
    log_decay = jnp.where(live & (not hard), -jnp.exp(a - 2.0), 0.0)
    beta = jnp.where(live, jnp.ones_like(b) if hard else jax.nn.sigmoid(b), 0.0)
    rows = unit(q) * shape.Dk**-0.5, unit(k + (0.0 if hard else 0.1)), v, log_decay, beta
    values = (0.1 * state, np.arange(1, len(n_rows) + 1), *rows, begin, n_rows)
    return tuple(jnp.asarray(x, spec.dtype) for x, spec in zip(values, specs, strict=True))
