"""What a run does when: batch shapes and mixtures, the learning rate, the optimizer."""

import dataclasses
import math
import re
from typing import Any

import jax.numpy as jnp
import optax
import optax.contrib


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of the run with one batch shape: it lasts until `until` (share of the time)."""

    until: float
    rows: int
    tokens: int
    drafts: int  # positions a row that the drafts are trained on
    mix: dict[str, float]


RECIPES = {
    "target": (
        Phase(0.45, 128, 2048, 256, {"text": 0.7, "chat": 0.1, "synthetic": 0.2}),
        Phase(1.0, 32, 8192, 1024, {"text": 0.4, "chat": 0.35, "synthetic": 0.25}),
    ),
    "mtp": (Phase(1.0, 16, 8192, 2048, {"text": 0.15, "chat": 0.6, "synthetic": 0.25}),),
    "smoke": (
        Phase(0.5, 2, 256, 32, {"text": 0.6, "chat": 0.2, "synthetic": 0.2}),
        Phase(1.0, 2, 512, 64, {"text": 0.2, "chat": 0.6, "synthetic": 0.2}),
    ),
}


def groups(params: dict) -> dict[str, list[str]]:
    """Names of like tensors of all layers, under one name each: they are stacked for the optimizer."""
    out: dict[str, list[str]] = {}
    for name in params:
        out.setdefault(re.sub(r"^(model\.layers)\.\d+\.", r"\1.*.", name), []).append(name)
    return out


def optimizer(params: dict, weight_decay: float) -> optax.GradientTransformation:
    """Muon for matrices, Adam for the embedding and vectors, on like tensors stacked [n, …]; unit learning rate."""
    spec = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    named = groups(params)
    kinds: Any = {g: spec if params[names[0]].ndim == 2 and "embed" not in g else None for g, names in named.items()}
    muon = optax.contrib.muon(
        1.0, weight_decay=weight_decay, adam_b2=0.98, consistent_rms=0.2, muon_weight_dimension_numbers=kinds
    )
    inner = optax.chain(optax.clip_by_global_norm(1.0), muon)

    def stack(tree):
        return {g: jnp.stack([tree[n] for n in names]) for g, names in named.items()}

    def update(updates, state, params=None):
        stacked: Any
        stacked, state = inner.update(stack(updates), state, stack(params))
        return {n: stacked[g][i] for g, names in named.items() for i, n in enumerate(names)}, state

    return optax.GradientTransformation(lambda params: inner.init(stack(params)), update)


def rate(progress: float, peak: float, warm: float = 0.02, floor: float = 0.02) -> float:
    """Linear warm-up, then a cosine down to `floor` of the peak."""
    if progress < warm:
        return peak * (progress + 1e-3) / warm
    at = min(1.0, (progress - warm) / (1 - warm))
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * at)))
