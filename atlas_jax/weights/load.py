"""A checkpoint's tensors as the parameters of `HybridModel`, tensor by tensor onto the device."""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from atlas_jax.config import ModelConfig
from atlas_jax.errors import CheckpointError
from atlas_jax.tensor_parallel import ONE_DEVICE, OneDevice
from atlas_jax.weights import cache
from atlas_jax.weights.build import Made, prepare
from atlas_jax.weights.checkpoint import Checkpoint
from atlas_jax.weights.names import Leaf, is_ignored, plan
from atlas_jax.weights.quantised.modules import Stored, of_leaves, unused
from atlas_jax.weights.quantised.recipe import Recipe
from atlas_jax.weights.safetensors import some

Progress = Callable[[int, int], None]
AHEAD = 4  # weights whose pages are read before their turn


def load_params(
    directory: str | pathlib.Path,
    config: ModelConfig,
    *,
    dtype: str,
    layout: str,
    recipe: Recipe | None = None,
    cache_folder: pathlib.Path | None = None,
    placed: OneDevice = ONE_DEVICE,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The parameters of the model in `directory`, in the form that `HybridModel(config, dtype, layout).init` has; quantised weights
    are packed (`pallas_kernels.w4a16`).

    Host memory holds no more than the parts of one layer's weight at a time. With a `config` without a drafter, the
    checkpoint's `mtp.*` tensors are left out.

    Args:
        config: that of `model_config(directory)`, or one changed from it.
        dtype: of the weights that are not quantised; norms and decays are float32.
        layout: see `RunConfig.layout`.
        recipe: how the weights are quantised (`hf_config.recipe_in(directory)`); None for a checkpoint where none are.
        cache_folder: where packed weights of quantised checkpoints are kept (`weights.cache`); None keeps none.
        placed: which devices get them. A weight is made on the first and then shared; all of a quantised checkpoint are, since what
            is kept is whole.
        progress: called with the bytes read so far and in all, after each weight.

    Raises:
        CheckpointError: the files are damaged, or their tensors are not exactly those of `config`; it lists which.
    """
    checkpoint = Checkpoint(directory)
    leaves = plan(config, checkpoint.entries)
    found = check(checkpoint, config, leaves, recipe)
    total = sum(checkpoint.entries[name].nbytes for layer in found for name in layer.names.values())
    prepared = {
        ".".join(leaf.path): Made(
            [prepare(checkpoint, weight, recipe, dtype) for weight in leaf.weights],
            leaf.kind == "rows" or (leaf.kind == "layers" and layout == "stacked"),
            single=leaf.kind == "one",
        )
        for leaf in leaves
    }
    weights, entry = None, None
    if recipe is not None and cache_folder is not None:
        how = dict(config=repr(config), quantised=recipe.name, dtype=dtype, layout=layout)
        entry = cache_folder / cache.identity([checkpoint.directory / "config.json", *checkpoint.files], how)
        weights = cache.read(entry, {name: made.form for name, made in prepared.items()})
    if weights is None:
        place = placed if entry is None else ONE_DEVICE
        weights = _made(checkpoint, prepared, total, place, progress)
        if entry is not None:
            cache.write(entry, weights)
    elif progress is not None:
        progress(total, total)
    params: dict[str, Any] = {}
    for leaf in leaves:
        node = params
        for key in leaf.path[:-1]:
            node = node.setdefault(key, {})
        node[leaf.path[-1]] = weights.pop(".".join(leaf.path))
    return placed.params({"params": params})


def _made(
    checkpoint: Checkpoint, prepared: dict[str, Made], total: int, placed: OneDevice, progress: Progress | None
) -> dict[str, Any]:
    done, out = 0, {}
    weights = [weight for made in prepared.values() for weight in made.weights]
    ahead = collections.deque()
    waiting = iter(weights)
    # Other threads have the files read while this one feeds the device.
    with concurrent.futures.ThreadPoolExecutor(AHEAD) as pool:
        for name, made in prepared.items():
            for weight in made.weights:
                ahead.extend(pool.submit(each.touch) for each in itertools.islice(waiting, AHEAD + 1 - len(ahead)))
                ahead.popleft().result()
                made.add(weight.value())
                done += weight.release(checkpoint)
                if progress is not None:
                    progress(done, total)
            out[name] = placed.leaf(tuple(name.split(".")), made.all())
    return out


def check(
    checkpoint: Checkpoint, config: ModelConfig, leaves: list[Leaf], recipe: Recipe | None = None
) -> list[Stored]:
    """What the tensors of the plan are stored as.

    Raises:
        CheckpointError: the tensors are not exactly those of the plan. Reads none but a head to be tied.
    """
    entries, folder = checkpoint.entries, checkpoint.directory
    if config.has_mtp and not any(name.startswith("mtp.") for name in entries):
        beside = f" (the index leaves out {some(checkpoint.unlisted)})" if checkpoint.unlisted else ""
        raise CheckpointError(
            f"{folder}: config.json declares a multi-token-prediction head, but no tensor is named mtp.*; add the file "
            f"that holds them{beside}, or set mtp_num_hidden_layers to 0 to decode without a drafter"
        )
    found = list(of_leaves(leaves, entries, recipe))
    wanted = {name: layer.wants[key] for layer in found for key, name in layer.names.items()}
    left = unused(found, entries)
    missing = [name for name in wanted if name not in entries]
    extra = [name for name in entries if name not in wanted and name not in left and not is_ignored(name, config)]
    wrong = []
    for name in sorted(wanted.keys() & entries.keys()):
        entry, want = entries[name], wanted[name]
        if entry.dtype not in want.dtypes:
            wrong.append(f"{name} ({entry.dtype}; {', '.join(want.dtypes)} can be read)")
        elif entry.shape not in want.shapes:
            shapes = " or ".join(str(list(shape)) for shape in want.shapes)
            wrong.append(f"{name} (shape {list(entry.shape)}, by config.json {shapes})")
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
        how = f"quantised as {recipe.name}" if recipe else "unquantised"
        raise CheckpointError(f"{folder}: {'; '.join(problems)}. Take weights and config.json of one model, {how}")
    return found


def _equal(checkpoint: Checkpoint, one: str, other: str) -> bool:
    same = checkpoint.entries[one].shape == checkpoint.entries[other].shape
    return same and bool(np.array_equal(checkpoint.read(one), checkpoint.read(other)))
