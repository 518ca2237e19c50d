"""A checkpoint's tensors as the parameters of `HybridModel`, tensor by tensor onto the device."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax.config import ModelConfig
from atlas_jax.errors import CheckpointError
from atlas_jax.shapes import Array
from atlas_jax.weights.checkpoint import Checkpoint
from atlas_jax.weights.names import Join, Leaf, Part, Weight, is_ignored, plan
from atlas_jax.weights.safetensors import some

FLOATS = ("F32", "BF16", "F16")
Progress = Callable[[int, int], None]


def load_params(
    directory: str | pathlib.Path, config: ModelConfig, *, dtype: str, layout: str, progress: Progress | None = None
) -> dict[str, Any]:
    """The parameters of the model in `directory`, in the form that `HybridModel(config, dtype, layout).init` has.

    Host memory holds no more than the parts of one layer's weight at a time. With a `config` without a drafter, the
    checkpoint's `mtp.*` tensors are left out.

    Args:
        config: that of `model_config(directory)`, or one changed from it.
        dtype: of the weights; norms and decays are float32.
        layout: see `RunConfig.layout`.
        progress: called with the bytes read so far and in all, after each weight.

    Raises:
        CheckpointError: the files are damaged, or their tensors are not exactly those of `config`; it lists which.
    """
    checkpoint = Checkpoint(directory)
    leaves = plan(config, checkpoint.entries)
    check(checkpoint, config, leaves)
    total = sum(checkpoint.entries[name].nbytes for name in _wanted(leaves))
    done = 0
    params: dict[str, Any] = {}
    for leaf in leaves:
        values = []
        stacked = leaf.kind == "rows" or (leaf.kind == "layers" and layout == "stacked")
        stack = None
        for i, weight in enumerate(leaf.weights):
            value = _weight(checkpoint, weight, "float32" if weight.float32 else dtype)
            if stacked:
                stack = jnp.zeros((len(leaf.weights), *value.shape), value.dtype) if stack is None else stack
                stack = _put(stack, value, i)
            values.append(None if stacked else value)
            done += sum(checkpoint.entries[name].nbytes for part in weight.parts for name in part.names)
            if progress is not None:
                progress(done, total)
        node = params
        for key in leaf.path[:-1]:
            node = node.setdefault(key, {})
        node[leaf.path[-1]] = stack if stacked else values[0] if leaf.kind == "one" else tuple(values)
    return {"params": params}


def _weight(checkpoint: Checkpoint, weight: Weight, dtype: str) -> Array:
    parts = [_part(checkpoint, part) for part in weight.parts]
    # Waiting bounds what is in flight: the copies to the device read the parts' memory.
    value = jax.block_until_ready(_join(parts, weight.join, jnp.dtype(dtype)))
    for part in weight.parts:
        for name in part.names:
            checkpoint.release(name)
    return value


def _part(checkpoint: Checkpoint, part: Part) -> Array:
    views = [checkpoint.read(name) for name in part.names]
    return jax.device_put(np.stack(views) if part.experts else views[0])


def _joined(parts: list[Array], join: Join, dtype: np.dtype) -> Array:
    # The barrier makes the result an array of its own: on a CPU, `device_put` hands out the file's pages themselves.
    return jax.lax.optimization_barrier(join(*(part.astype(dtype) for part in parts)))


_join = jax.jit(_joined, static_argnames=("join", "dtype"))
_put = jax.jit(lambda stack, value, i: jax.lax.dynamic_update_index_in_dim(stack, value, i, 0), donate_argnums=0)


def _wanted(leaves: list[Leaf]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a plan."""
    parts = [part for leaf in leaves for weight in leaf.weights for part in weight.parts]
    return {name: part.shape for part in parts for name in part.names}


def check(checkpoint: Checkpoint, config: ModelConfig, leaves: list[Leaf]) -> None:
    """Raises CheckpointError unless the tensors are exactly those of the plan. Reads none but a head to be tied."""
    wanted, entries, folder = _wanted(leaves), checkpoint.entries, checkpoint.directory
    if config.has_mtp and not any(name.startswith("mtp.") for name in entries):
        beside = f" (the index leaves out {some(checkpoint.unlisted)})" if checkpoint.unlisted else ""
        raise CheckpointError(
            f"{folder}: config.json declares a multi-token-prediction head, but no tensor is named mtp.*; add the file "
            f"that holds them{beside}, or set mtp_num_hidden_layers to 0 to decode without a drafter"
        )
    missing = [name for name in wanted if name not in entries]
    extra = [name for name in entries if name not in wanted and not is_ignored(name, config)]
    wrong = []
    for name in sorted(wanted.keys() & entries.keys()):
        found = entries[name]
        if found.dtype not in FLOATS:
            wrong.append(f"{name} ({found.dtype}; {', '.join(FLOATS)} can be read)")
        elif found.shape != wanted[name]:
            wrong.append(f"{name} (shape {list(found.shape)}, by config.json {list(wanted[name])})")
    if config.tie_word_embeddings and "lm_head.weight" in extra:
        embedding = leaves[0].weights[0].parts[0].names[0]
        if embedding in entries and _equal(checkpoint, "lm_head.weight", embedding):
            extra.remove("lm_head.weight")
        else:
            wrong.append(f"lm_head.weight (differs from {embedding}, though tie_word_embeddings is true)")
    kinds = {
        "missing tensors": missing,
        "tensors without a place in this model": extra,
        "tensors that do not fit": wrong,
    }
    problems = [f"{kind}: {some(names)}" for kind, names in kinds.items() if names]
    if problems:
        raise CheckpointError(
            f"{folder}: {'; '.join(problems)}. Take weights and config.json of one model, unquantised"
        )


def _equal(checkpoint: Checkpoint, one: str, other: str) -> bool:
    same = checkpoint.entries[one].shape == checkpoint.entries[other].shape
    return same and bool(np.array_equal(checkpoint.read(one), checkpoint.read(other)))
