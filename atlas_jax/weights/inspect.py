"""What a model directory holds, what running it takes, and why it would be refused. Reads headers, no weights."""

from __future__ import annotations

import collections
import dataclasses
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from atlas_jax import state as states
from atlas_jax.config import FULL, LINEAR, ModelConfig, RunConfig
from atlas_jax.errors import AtlasError, CheckpointError
from atlas_jax.weights.checkpoint import Checkpoint, read_json
from atlas_jax.weights.hf_config import CONVERSION, parse
from atlas_jax.weights.load import check
from atlas_jax.weights.names import is_ignored, plan
from atlas_jax.weights.presets import PACKAGED, SHAPE, parameter_shapes, preset_config
from atlas_jax.weights.quantised.modules import unused
from atlas_jax.weights.safetensors import some

RUN = RunConfig(dtype="bfloat16")


@dataclasses.dataclass(frozen=True)
class Report:
    """The answers of `inspect_model`. What depends on config.json is empty where that could not be read.

    Attributes:
        layers: how many there are of each kind.
        parameters: how many there are, by part of the model; `active_parameters` are those that one token uses.
        stored_bytes: of the checkpoint's tensors, by dtype; `ignored_bytes` of them are not loaded (the vision tower).
        state_bytes: of one sequence, in bfloat16: the parts of a fixed size, and `kv_per_token` with the drafter's.
        drafter: the multi-token-prediction head: "present", "declared, but not in the weights" or "absent".
        refused: why the model cannot be loaded; empty if it can.
        quantised: how the weights are quantised, or None.
        calibrated: whether `atlas-jax convert` calibrated its rounding; None where config.json does not say.
        unused: tensors beside quantised weights that are not loaded: scales of activations and of a quantised KV cache.
    """

    name: str
    model_type: str | None
    layers: dict[str, int]
    parameters: dict[str, int]
    active_parameters: int
    stored_bytes: dict[str, int]
    ignored_bytes: int
    state_bytes: dict[str, int]
    drafter: str
    refused: tuple[str, ...]
    quantised: str | None = None
    calibrated: bool | None = None
    unused: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"refused": list(self.refused), "unused": list(self.unused)}

    def text(self) -> str:
        """Some lines for people."""
        lines = [f"model        {self.name}", f"type         {self.model_type or 'unknown'}"]
        if self.layers:
            lines.append("layers       " + ", ".join(f"{count} {kind}" for kind, count in self.layers.items()))
        lines.append(f"drafter      {self.drafter} (multi-token prediction)")
        if self.parameters:
            total, active = sum(self.parameters.values()), self.active_parameters
            used = f", {_count(active)} of them active" if active < total else ""
            lines.append(f"parameters   {_count(total)}{used}")
            lines += [f"  {part:<18} {_count(count):>9}" for part, count in self.parameters.items()]
        if self.stored_bytes:
            ignored = f", {_bytes(self.ignored_bytes)} not loaded" if self.ignored_bytes else ""
            lines.append(f"stored       {_bytes(sum(self.stored_bytes.values()))}{ignored}")
            lines += [f"  {dtype:<18} {_bytes(size):>9}" for dtype, size in self.stored_bytes.items()]
        if self.quantised:
            how = {None: "", True: ", calibrated", False: ", not calibrated"}[self.calibrated]
            lines.append(f"quantised    {self.quantised}{how}")
        if self.unused:
            lines.append(f"not used     {some(self.unused, 4)}")
        if self.state_bytes:
            lines.append(f"state        of one sequence, {RUN.dtype}, drafts of up to {RUN.max_drafts}")
            lines += [f"  {part:<18} {_bytes(size):>9}" for part, size in self.state_bytes.items()]
        lines.append("loads        " + ("yes" if not self.refused else "no:"))
        return "\n".join([*lines, *(f"  - {reason}" for reason in self.refused)])


def inspect_model(name_or_path: str | pathlib.Path) -> Report:
    """Describes a model directory, a packaged model or `shape:NAME`.

    Raises:
        CheckpointError: there is no such directory.
        ConfigError: there is no such shape.
    """
    name = str(name_or_path)
    if name.startswith(SHAPE):
        config = preset_config(name.removeprefix(SHAPE))
        return _report(name, config, None, "present" if config.has_mtp else "absent", ())
    directory = pathlib.Path(name).expanduser()
    directory = directory if directory.is_dir() else PACKAGED.get(name, directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory; name the folder that holds config.json")
    refused: list[str] = []
    left: tuple[str, ...] = ()
    checkpoint = _attempt(lambda: Checkpoint(directory), refused)
    parsed = _attempt(lambda: parse(directory, checkpoint.entries if checkpoint else None), refused)
    config = parsed.config if parsed else None
    if parsed:
        refused += parsed.refused
        if checkpoint and (parsed.recipe or not parsed.quantised):  # or else every tensor would be wrong
            leaves = plan(parsed.config, checkpoint.entries)
            found = _attempt(lambda: check(checkpoint, parsed.config, leaves, parsed.recipe), refused)
            left = tuple(sorted(unused(found or (), checkpoint.entries)))
    found = checkpoint is not None and any(tensor.startswith("mtp.") for tensor in checkpoint.entries)
    declared = config is not None and config.has_mtp
    drafter = "present" if found else "declared, but not in the weights" if declared else "absent"
    report = _report(name, config, checkpoint, drafter, tuple(refused))
    how = parsed.recipe.name if parsed and parsed.recipe else None
    return dataclasses.replace(report, quantised=how, calibrated=_calibrated(directory) if how else None, unused=left)


def _calibrated(directory: pathlib.Path) -> bool | None:
    about = read_json(directory / "config.json").get(CONVERSION)
    found = about.get("calibrated") if isinstance(about, dict) else None
    return found if isinstance(found, bool) else None


def _attempt[T](step: Callable[[], T], refused: list[str]) -> T | None:
    """What `step` returns, or None and a reason in `refused`."""
    try:
        return step()
    except AtlasError as error:
        refused.append(str(error))
        return None


def _report(
    name: str, config: ModelConfig | None, checkpoint: Checkpoint | None, drafter: str, refused: tuple[str, ...]
) -> Report:
    stored: collections.Counter[str] = collections.Counter()
    ignored = 0
    for tensor, entry in checkpoint.entries.items() if checkpoint else ():
        stored[entry.dtype] += entry.nbytes
        ignored += entry.nbytes if config and is_ignored(tensor, config) else 0
    parameters = _parameters(config) if config else {}
    return Report(
        name=name,
        model_type=config.model_type if config else None,
        layers={kind: config.layer_types.count(kind) for kind in (LINEAR, FULL)} if config else {},
        parameters=parameters,
        active_parameters=sum(parameters.values()) - _idle(config) if config else 0,
        stored_bytes=dict(stored.most_common()),
        ignored_bytes=ignored,
        state_bytes=_state(config) if config else {},
        drafter=drafter,
        refused=refused,
    )


def _parameters(config: ModelConfig) -> dict[str, int]:
    out: collections.Counter[str] = collections.Counter()
    for path, leaf in jax.tree.leaves_with_path(parameter_shapes(config, dtype="bfloat16", layout="stacked")["params"]):
        name = path[0].key
        out["drafter" if name == "mtp" else "norms" if name == "norms" else name] += math.prod(leaf.shape)
    return dict(out)


def _idle(config: ModelConfig) -> int:
    """Parameters of the experts that a token is not routed to."""
    unused = config.num_experts - config.num_experts_per_tok
    layers = config.num_layers + config.mtp_num_hidden_layers
    return layers * unused * 3 * config.hidden_size * config.moe_intermediate_size


def _state(config: ModelConfig) -> dict[str, int]:
    """Taken from the state's own shapes, so that it is true by construction."""
    run = dataclasses.replace(RUN, slots=1)
    shapes = jax.eval_shape(lambda: states.init(config, run))
    per_slot = {
        field.name: _size(getattr(shapes, field.name)) // (run.slots + 1)
        for field in dataclasses.fields(shapes)
        if field.name not in ("pages", "slots")
    }
    pages, page_tokens = shapes.pages.keys.shape[1], shapes.pages.page_size
    return {
        "recurrent": per_slot["h"],
        "convolution": per_slot["conv"],
        "journal": sum(size for name, size in per_slot.items() if name.startswith("journal")),
        "hidden": per_slot["hidden"],
        "kv_per_token": sum(map(_size, shapes.pages)) // (pages * page_tokens),
    }


def _size(leaf: jax.ShapeDtypeStruct) -> int:
    return leaf.size * leaf.dtype.itemsize


def _count(value: int) -> str:
    return _scaled(value, 1000, ("", " K", " M", " B"))


def _bytes(value: int) -> str:
    return _scaled(value, 1024, (" B", " KiB", " MiB", " GiB"))


def _scaled(value: int, step: int, units: tuple[str, ...]) -> str:
    power = 0
    while value >= step ** (power + 1) and power < len(units) - 1:
        power += 1
    return f"{value / step**power:.2f}{units[power]}" if power else f"{value}{units[0]}"
