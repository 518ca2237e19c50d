"""Rounding that minds what a weight is multiplied with (GPTQ; Frantar et al., 2022): input by input, the error that rounding makes
is taken up by the inputs that are still to come, as far as they go together on calibration text."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from atlas_jax.config import ModelConfig
from atlas_jax.models import HybridModel, layers
from atlas_jax.shapes import Array
from atlas_jax.weights.quantised.codes import Codes
from atlas_jax.weights.quantised.scheme import Scheme

DAMPING = 0.01  # of the mean diagonal, added to it: inputs that calibration hardly saw
Moments = dict[tuple[str, str, int], np.ndarray]


def input_moments(
    config: ModelConfig,
    params: Any,
    texts: Sequence[np.ndarray],
    progress: Callable[[int, int], None] | None = None,
) -> Moments:
    """E[x xᵀ] of what each linear layer's weight is multiplied with: (block, weight, layer) -> float64 [K, K]. The model runs once
    over each text.

    Args:
        params: plain weights in layout "layers"; the experts of a mixture are left out.
        progress: called with the texts seen so far and in all.
    """
    model = HybridModel(config, jnp.dtype("float32"), "layers")
    longest = max(len(text) for text in texts)

    @jax.jit
    def sums(params: Any, tokens: Array, length: Array) -> dict[tuple[str, str, int], Array]:
        where = {
            id(weight): (block, name, i)
            for block, weights in params["params"].items()
            if isinstance(weights, dict) and block != "mtp"
            for name, value in weights.items()
            if isinstance(value, tuple)
            for i, weight in enumerate(value)
        }
        real = jnp.arange(longest)[:, None] < length
        out: dict[tuple[str, str, int], Array] = {}

        def seen(x: Array, weight: Any, i: int | None) -> None:
            key = where.get(id(weight if i is None else weight[i]))
            if key is not None:
                rows = jnp.where(real, x.reshape(longest, -1), 0)
                out[key] = jnp.matmul(rows.T, rows, precision="highest")

        with _watched(seen):
            model.apply(params, tokens[None], method="forward")
        return out

    found: Moments = {}
    for number, text in enumerate(texts):
        if progress is not None:
            progress(number, len(texts))
        tokens = np.zeros(longest, np.int32)  # what follows a text changes nothing of it
        tokens[: len(text)] = text
        for key, value in jax.device_get(sums(params, tokens, len(text))).items():
            found[key] = found.get(key, 0) + value.astype(np.float64)
    if progress is not None:
        progress(len(texts), len(texts))
    count = sum(len(text) for text in texts)
    return {key: value / count for key, value in found.items()}


@contextlib.contextmanager
def _watched(seen: Any) -> Iterator[None]:
    """Shows every product's input and weight to `seen`."""
    product = layers.linear

    def watched(x: Array, weight: Any, i: int | None = None) -> Array:
        seen(x, weight, i)
        return product(x, weight, i)

    with mock.patch.object(layers, "linear", watched):
        yield


def calibrated(weight: np.ndarray, scheme: Scheme, moments: np.ndarray) -> Codes:
    """The int4 codes of a weight [N, K] whose products with inputs of these moments [K, K] err least, greedily. Symmetric."""
    w = weight.astype(np.float64)
    N, K = w.shape
    group = scheme.group or K
    damped = moments + np.eye(K) * (DAMPING * np.mean(np.diag(moments)) + 1e-12)
    # Row j of the upper Cholesky factor of the inverse says how the inputs after j take up an error at j.
    spread = np.linalg.cholesky(np.linalg.inv(damped)).T
    codes = np.empty((N, K), np.uint8)
    scales = np.empty((N, -(-K // group)), ml_dtypes.bfloat16)
    for start in range(0, K, group):
        stop = min(start + group, K)
        scale = _scale(w[:, start:stop], np.diag(spread)[start:stop])
        scales[:, start // group] = scale
        errors = np.empty((N, stop - start))
        for j in range(start, stop):
            steps = np.clip(np.round(w[:, j] / scale), -8, 7)
            codes[:, j] = steps + 8
            errors[:, j - start] = (w[:, j] - steps * scale) / spread[j, j]
            w[:, j:stop] -= np.outer(errors[:, j - start], spread[j, j:stop])
        w[:, stop:] -= errors @ spread[start:stop, stop:]
    return Codes(scheme, codes, scales)


def _scale(group: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """For each output, of some scales the one with the least error, weighted as the errors will weigh; rounded to bfloat16. A
    negative one gives the code -8, which has no counterpart, to the other side."""
    largest = np.maximum(np.abs(group).max(1), 1e-30) / 7.5
    best, least = largest, np.full(len(group), np.inf)
    for factor in np.linspace(1.0, 0.7, 11):
        for sign in (1, -1):
            scale = (sign * largest * factor).astype(ml_dtypes.bfloat16).astype(np.float64)
            rounded = np.clip(np.round(group / scale[:, None]), -8, 7) * scale[:, None]
            error = (((group - rounded) / spread) ** 2).sum(1)
            best, least = np.where(error < least, scale, best), np.minimum(error, least)
    return best.astype(ml_dtypes.bfloat16).astype(np.float64)
