"""A checkpoint's linear layers rounded to four bits, as a standard compressed-tensors checkpoint."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from atlas_jax.errors import CheckpointError, ConfigError
from atlas_jax.weights.checkpoint import INDEX, SINGLE, Checkpoint, read_json
from atlas_jax.weights.hf_config import CONVERSION, parse
from atlas_jax.weights.load import check, load_params
from atlas_jax.weights.names import Leaf, plan
from atlas_jax.weights.presets import PACKAGED
from atlas_jax.weights.quantised.calibration import calibrated, input_moments
from atlas_jax.weights.quantised.codes import Codes
from atlas_jax.weights.quantised.rounding import rounded
from atlas_jax.weights.quantised.scheme import BLOCKS, INT4_GROUPS, Scheme
from atlas_jax.weights.safetensors import some

SHARD_BYTES = 4 << 30
SMALL = ("in_proj_a", "in_proj_b", "in_proj_ba", "mlp.gate", "shared_expert_gate")  # left as they are
IGNORE = ["re:.*in_proj_(a|b|ba)$", "re:.*mlp.gate$", "re:.*shared_expert_gate$", "re:^mtp.*", "re:.*visual.*"]
TEMPLATE = "*.json *.jinja *.txt *.model *.tiktoken"


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    scheme: Scheme,
    *,
    head: bool = False,
    search: bool = False,
    texts: Callable[[], Sequence[np.ndarray]] | None = None,
    progress: Callable[[int, int], None] | None = None,
    calibrating: Callable[[int, int], None] | None = None,
) -> tuple[int, int]:
    """Writes the model in `source` to the new folder `target` with the layers' linear weights rounded to `scheme`. Embedding,
    norms, gates, the linear layers' two small projections and the drafter stay as they are, and so does the head unless
    `head` says so.

    Args:
        search: see `rounded`.
        texts: gives token ids of texts to calibrate with (see `quantised.calibration`; int4, the dense layers only): errors of
            rounding are made up for as far as these texts allow. The model is run over them. Called when all else is checked.
        progress: called with the bytes read so far and in all.
        calibrating: called with the texts seen so far and in all.

    Returns:
        Bytes of the weights before and after.

    Raises:
        CheckpointError: the source cannot be loaded or is quantised already, or the target is there or cannot be written; nothing
            of it is left then.
        ConfigError: `head` for a model whose head is its embedding; a scheme that is not written, or whose groups do not divide
            a weight's inputs.
    """
    folder, out = pathlib.Path(source).expanduser(), pathlib.Path(target).expanduser()
    folder = folder if folder.is_dir() else PACKAGED.get(str(source), folder)
    checkpoint = Checkpoint(folder)
    parsed = parse(folder, checkpoint.entries)
    if parsed.refused or parsed.quantised:
        reason = "; ".join(parsed.refused) or "its weights are quantised already; take the unquantised model"
        raise CheckpointError(f"{folder}: {reason}")
    if head and parsed.config.tie_word_embeddings:
        raise ConfigError("the head of this model is its embedding, which is not quantised; leave out --head")
    if scheme.kind == "fp8":
        raise ConfigError("int4 and nvfp4 can be written")
    if texts and (scheme.kind != "int4" or parsed.config.num_experts):
        raise ConfigError("calibration is for int4 and models without experts; leave out --calibrate")
    if out.exists() and any(out.iterdir()):
        raise CheckpointError(f"{out}: is there already; name a new folder")
    leaves = plan(parsed.config, checkpoint.entries)
    check(checkpoint, parsed.config, leaves)
    wanted = linear_weights(leaves, head)
    _divided(checkpoint, wanted, scheme)
    moments: dict[str, np.ndarray] = {}
    if texts:
        params = load_params(folder, parsed.config, dtype="float32", layout="layers")
        found = input_moments(parsed.config, params, texts(), calibrating)
        moments = {
            name: found[leaf.path[0], leaf.path[1], i]
            for leaf in leaves
            if len(leaf.path) == 2
            for i, weight in enumerate(leaf.weights)
            if (leaf.path[0], leaf.path[1], i) in found
            for part in weight.parts
            for name in part.names
        }
    config = read_json(folder / "config.json") | quantization_config(scheme, head)
    config[CONVERSION] = {"calibrated": texts is not None}
    try:
        out.mkdir(parents=True, exist_ok=True)
        try:
            _write(out, _tensors(checkpoint, wanted, scheme, search, moments, progress))
            for pattern in TEMPLATE.split():
                for path in folder.glob(pattern):
                    if path.name not in ("config.json", INDEX):
                        shutil.copyfile(path, out / path.name)
            # Last, so that a folder with a config.json is complete.
            (out / "config.json").write_text(json.dumps(config, indent=2))
        except BaseException:
            shutil.rmtree(out, ignore_errors=True)  # it was not there, or was empty
            raise
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{out}: cannot be written ({error})") from error
    before = sum(entry.nbytes for entry in checkpoint.entries.values())
    return before, sum(file.stat().st_size for file in out.glob("*.safetensors"))


def _divided(checkpoint: Checkpoint, wanted: Iterable[str], scheme: Scheme) -> None:
    """Raises ConfigError for weights whose inputs are no whole groups: other readers of the format refuse them."""
    group = scheme.group or 1
    odd = [
        f"{name} ({checkpoint.entries[name].shape[-1]})"
        for name in sorted(wanted)
        if checkpoint.entries[name].shape[-1] % group
    ]
    if odd:
        fit = [str(g) for g in INT4_GROUPS if all(checkpoint.entries[name].shape[-1] % g == 0 for name in wanted)]
        instead = f"take --weights int4 with --group {' or '.join(fit)}" if fit else "no group that can be written does"
        raise ConfigError(f"groups of {group} do not divide the inputs of {some(odd, 3)}; {instead}")


def linear_weights(leaves: Sequence[Leaf], head: bool) -> set[str]:
    """The tensors of a plan that are quantised."""
    return {
        name
        for leaf in leaves
        if (leaf.path == ("head",) and head) or (len(leaf.path) == 2 and leaf.path[1] in BLOCKS.get(leaf.path[0], ()))
        for weight in leaf.weights
        for part in weight.parts
        for name in part.names
        if not name.removesuffix(".weight").endswith(SMALL)
    }


def quantization_config(scheme: Scheme, head: bool = False) -> dict[str, Any]:
    """What config.json says of weights so quantised."""
    weights: dict[str, Any] = {"num_bits": 4, "symmetric": True, "dynamic": False, "group_size": scheme.group}
    if scheme.kind == "nvfp4":
        weights |= {"type": "float", "strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
    else:
        weights |= {"type": "int", "strategy": "group"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    about = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized" if scheme.kind == "nvfp4" else "pack-quantized",
        "quantization_status": "compressed",
        "ignore": [*IGNORE] if head else ["lm_head", *IGNORE],
        "config_groups": {"group_0": group},
    }
    return {"quantization_config": about}


def _tensors(
    checkpoint: Checkpoint,
    wanted: set[str],
    scheme: Scheme,
    search: bool,
    moments: Mapping[str, np.ndarray],
    progress: Callable[[int, int], None] | None,
) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of the new checkpoint, by name."""
    rounding = jax.jit(functools.partial(rounded, scheme=scheme, search=search))
    done, total = 0, sum(entry.nbytes for entry in checkpoint.entries.values())
    for name, entry in checkpoint.entries.items():
        value = checkpoint.read(name)
        if name not in wanted:
            yield name, np.array(value)
        else:
            for module, matrix in _modules(name, value):
                if name in moments:
                    codes = calibrated(np.asarray(matrix, np.float32), scheme, moments[name])
                else:
                    codes = jax.device_get(rounding(jnp.asarray(matrix)))
                yield from ((f"{module}.{key}", x) for key, x in _stored(codes, matrix.shape).items())
        checkpoint.release(name)
        done += entry.nbytes
        if progress is not None:
            progress(done, total)


def _modules(name: str, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The linear layers that a tensor holds: itself, or those of all experts."""
    if value.ndim == 2:
        yield name.removesuffix(".weight"), value
        return
    at, _, projection = name.rpartition(".")
    for e, expert in enumerate(value):
        if projection == "gate_up_proj":
            gate, up = np.split(expert, 2)
            yield f"{at}.{e}.gate_proj", gate
            yield f"{at}.{e}.up_proj", up
        else:
            yield f"{at}.{e}.{projection}", expert


def _stored(codes: Codes, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """A layer's tensors by their names in compressed-tensors."""
    N, K = shape
    if codes.scheme.kind == "nvfp4":
        pairs = np.pad(codes.codes, ((0, 0), (0, K % 2)))
        return {
            "weight_packed": pairs[:, 0::2] | pairs[:, 1::2] << 4,
            "weight_scale": np.asarray(codes.scales).view(ml_dtypes.float8_e4m3fn),
            "weight_global_scale": np.array([1 / np.asarray(codes.scale)[0]], np.float32),
        }
    words = np.pad(codes.codes, ((0, 0), (0, -K % 8))).reshape(N, -1, 8).astype(np.uint32)
    words = (words << np.arange(0, 32, 4, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    return {
        "weight_packed": words.view(np.int32),
        "weight_scale": np.asarray(codes.scales),
        "weight_shape": np.array([N, K], np.int64),
    }


def _write(out: pathlib.Path, tensors: Iterator[tuple[str, np.ndarray]]) -> None:
    """Shards of some gigabytes and their index, or a single file."""
    shards: list[list[str]] = []
    shard: dict[str, np.ndarray] = {}
    size = total = 0

    def flush() -> None:
        nonlocal shard, size
        save_file(shard, out / f"model-{len(shards) + 1:05}.part", metadata={"format": "pt"})
        shards.append(list(shard))
        shard, size = {}, 0

    for name, value in tensors:
        if shard and size + value.nbytes > SHARD_BYTES:
            flush()
        shard[name] = np.ascontiguousarray(value)
        size, total = size + value.nbytes, total + value.nbytes
    flush()
    where: dict[str, str] = {}
    plain = out / "plain"  # its mode is that of other files; the library's are for their owner alone
    plain.touch()
    for i, names in enumerate(shards, 1):
        shutil.copymode(plain, out / f"model-{i:05}.part")
        file = SINGLE if len(shards) == 1 else f"model-{i:05}-of-{len(shards):05}.safetensors"
        os.replace(out / f"model-{i:05}.part", out / file)
        where |= dict.fromkeys(names, file)
    plain.unlink()
    if len(shards) > 1:
        (out / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1))
