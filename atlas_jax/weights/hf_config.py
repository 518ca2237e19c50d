"""`ModelConfig` from a Hugging Face `config.json`."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Collection
from typing import Any

from atlas_jax.config import FULL, LINEAR, ModelConfig
from atlas_jax.errors import CheckpointError
from atlas_jax.weights.checkpoint import Checkpoint, has_weights, read_json
from atlas_jax.weights.quantised.formats import Unsupported
from atlas_jax.weights.quantised.recipe import Recipe, recipe_of
from atlas_jax.weights.safetensors import short

# model_type of the file -> that of `ModelConfig`. Without _text, a wrapper around a text model and a vision tower.
CONVERSION = "atlas_jax_conversion"  # what `convert` did that a quantization_config has no field for
TYPES = {
    "qwen3_next": "qwen3_next",
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
}
# What must be as it is here, with what the reference implementation takes an absent key for.
FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attn_output_gate": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "mtp_use_dedicated_embeddings": False,
}
MAX_EOS = 16  # ids that end a text; decoding has room for as many again of a request
INTEGERS = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim linear_num_key_heads "
    "linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim max_position_embeddings"
).split()
EXPERT_INTEGERS = "num_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size".split()


@dataclasses.dataclass(frozen=True)
class Parsed:
    """A model's shape, what this runtime cannot do about it (empty: it can be loaded), whether config.json says that weights are
    quantised, and how, where that is known."""

    config: ModelConfig
    refused: tuple[str, ...]
    quantised: bool
    recipe: Recipe | None


def model_config(directory: str | pathlib.Path) -> ModelConfig:
    """The configuration of the model in `directory`.

    A drafter counts as declared where config.json says so or where the checkpoint holds `mtp.*` tensors.

    Raises:
        CheckpointError: config.json is missing or damaged, or asks for what is not supported; it lists all of that.
        ConfigError: the numbers in it cannot belong together.
    """
    directory = pathlib.Path(directory)
    parsed = parse(directory, Checkpoint(directory).entries if has_weights(directory) else None)
    if parsed.refused:
        raise CheckpointError(f"{directory}: " + "; ".join(parsed.refused))
    return parsed.config


def parse(directory: pathlib.Path, names: Collection[str] | None) -> Parsed:
    """`model_config` that lists what is not supported instead of raising. `names` are the tensors, where known.

    Raises:
        CheckpointError: config.json is missing or damaged, or of a model that is not known.
        ConfigError: the numbers in it cannot belong together.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory; name the folder that holds config.json")
    path = directory / "config.json"
    wrapper = read_json(path)
    text = wrapper.get("text_config") or wrapper
    if not isinstance(text, dict):
        raise CheckpointError(f"{path}: text_config must be an object, found {short(text)}")
    reader = _Reader(path, text, wrapper)
    name = reader.get("model_type")
    if not isinstance(name, str) or name not in TYPES:
        raise CheckpointError(f"{path}: model_type {short(name)} is not known; known: {', '.join(TYPES)}")
    fields: dict[str, Any] = {key: reader.integer(key) for key in INTEGERS if key != "num_hidden_layers"}
    experts = TYPES[name] == "qwen3_5_moe" or (TYPES[name] == "qwen3_next" and text.get("num_experts") != 0)
    fields |= {key: reader.integer(key) for key in (EXPERT_INTEGERS if experts else ["intermediate_size"])}
    fields["layer_types"] = reader.layer_types(reader.integer("num_hidden_layers"))
    fields["rms_norm_eps"] = reader.number(text, "rms_norm_eps")
    rope = reader.rope()
    fields |= {key: reader.number(rope, key) for key in ("rope_theta", "partial_rotary_factor")}
    # Only qwen3_next reads norm_topk_prob; the later models always normalise.
    fields["norm_topk_prob"] = bool(text.get("norm_topk_prob", True)) or TYPES[name] != "qwen3_next"
    fields["tie_word_embeddings"] = reader.tied(names)
    found = names is not None and any(tensor.startswith("mtp.") for tensor in names)
    fields["mtp_num_hidden_layers"] = reader.drafter_layers() or int(found)
    generation = (
        read_json(directory / "generation_config.json") if (directory / "generation_config.json").exists() else {}
    )
    fields["eos_token_ids"], fields["pad_token_id"] = reader.ends(generation)
    reader.complain()
    config = ModelConfig(model_type=TYPES[name], **fields)
    refused, recipe, about = reader.refused(), None, quantization_of(directory, wrapper, text)
    try:
        recipe = _recipe(about)
    except Unsupported as error:
        refused.append(f"weights quantised as {error}; others are refused")
    return Parsed(config, tuple(refused), about is not None, recipe)


def recipe_in(directory: str | pathlib.Path) -> Recipe | None:
    """How the weights in `directory` are quantised; None if config.json says nothing of it.

    Raises:
        CheckpointError: config.json is missing or damaged.
        Unsupported: naming what this runtime does not read.
    """
    directory = pathlib.Path(directory)
    wrapper = read_json(directory / "config.json")
    text = wrapper.get("text_config")
    return _recipe(quantization_of(directory, wrapper, text if isinstance(text, dict) else wrapper))


def _recipe(about: Any) -> Recipe | None:
    return None if about is None else recipe_of(about)


def quantization_of(directory: pathlib.Path, wrapper: dict[str, Any], text: dict[str, Any]) -> dict[str, Any] | None:
    """The description of quantised weights, which may stand in either part of config.json or in a file of its own."""
    for holder in (text, wrapper):
        for key in ("quantization_config", "compression_config"):
            if holder.get(key):
                return holder[key]
    beside = directory / "hf_quant_config.json"
    return read_json(beside) if beside.exists() else None


class _Reader:
    """Typed look-ups in a text config, and in its wrapper where both may hold a key. Collects what is wrong."""

    def __init__(self, path: pathlib.Path, text: dict[str, Any], wrapper: dict[str, Any]) -> None:
        self.path, self.text, self.wrapper = path, text, wrapper
        self.missing: list[str] = []

    def get(self, *keys: str) -> Any:
        """The first of `keys` that is there and not null, in the text config or else in the wrapper."""
        values = (holder[key] for holder in (self.text, self.wrapper) for key in keys if holder.get(key) is not None)
        return next(values, None)

    def wrong(self, key: str, value: Any, needed: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {key} must be {needed}, found {short(value)}")

    def integer(self, key: str) -> int:
        value = self.text.get(key)
        if value is None:
            self.missing.append(key)
            return 1
        if type(value) is not int or abs(value) >= 2**31:
            raise self.wrong(key, value, "an integer of 32 bits")
        return value

    def number(self, holder: dict[str, Any], key: str) -> float:
        value = holder.get(key)
        if value is None:
            self.missing.append(key)
            return 1.0
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.wrong(key, value, "a positive number")
        return float(value)

    def complain(self) -> None:
        """Raises for all missing keys at once: a guessed value would load and compute something else."""
        if self.missing:
            raise CheckpointError(f"{self.path}: lacks {', '.join(self.missing)}; take the model's own config.json")

    def layer_types(self, count: int) -> tuple[str, ...]:
        listed, interval = self.text.get("layer_types"), self.text.get("full_attention_interval")
        if listed is None:
            interval = 4 if interval is None else interval
            if type(interval) is not int or interval < 1:
                raise self.wrong("full_attention_interval", interval, "a positive integer")
            return tuple(LINEAR if (i + 1) % interval else FULL for i in range(count))
        if not isinstance(listed, list) or not all(isinstance(kind, str) for kind in listed):
            raise self.wrong("layer_types", listed, "a list of names")
        if len(listed) != count and "num_hidden_layers" not in self.missing:
            raise CheckpointError(f"{self.path}: num_hidden_layers is {count}, but layer_types lists {len(listed)}")
        return tuple(listed)

    def rope(self) -> dict[str, Any]:
        """Rotary parameters: a group of their own, or (older) keys of the config itself."""
        group = self.text.get("rope_parameters") or {}
        if not isinstance(group, dict):
            raise self.wrong("rope_parameters", group, "an object")
        keys = ("rope_theta", "partial_rotary_factor")
        return {"partial_rotary_factor": 0.25} | {
            key: source[key] for source in (self.text, group) for key in keys if key in source
        }

    def tied(self, names: Collection[str] | None) -> bool:
        """Whether the head is the embedding. Where text config and wrapper disagree, the tensors decide."""
        key = "tie_word_embeddings"
        values = [holder[key] for holder in (self.text, self.wrapper) if holder.get(key) is not None]
        for value in values:
            if not isinstance(value, bool):
                raise self.wrong(key, value, "true or false")
        said = set(values)
        if len(said) == 2 and names is not None:
            return "lm_head.weight" not in names
        if len(said) == 2:
            raise CheckpointError(
                f"{self.path}: tie_word_embeddings is true in one place and false in another; correct one"
            )
        return bool(said and said.pop())

    def drafter_layers(self) -> int:
        count = self.get("mtp_num_hidden_layers", "num_nextn_predict_layers")
        if count is not None and type(count) is not int:
            raise self.wrong("mtp_num_hidden_layers", count, "an integer")
        return count or 0

    def ends(self, generation: dict[str, Any]) -> tuple[tuple[int, ...], int | None]:
        """End-of-sequence ids and the padding id: generation_config.json goes before config.json."""

        def first(key: str) -> Any:
            return generation[key] if generation.get(key) is not None else self.get(key)

        eos, pad = first("eos_token_id"), first("pad_token_id")
        eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
        if not all(type(token) is int and abs(token) < 2**31 for token in eos) or len(eos) > MAX_EOS:
            raise self.wrong("eos_token_id", eos, f"an id or a list of at most {MAX_EOS} ids")
        if pad is not None and type(pad) is not int:
            raise self.wrong("pad_token_id", pad, "an id")
        return tuple(eos), pad

    def refused(self) -> list[str]:
        """Settings that are understood and not supported, each with what would be."""
        out = []
        for key, value in FIXED.items():
            found = self.text.get(key)
            if found is not None and found != value:
                out.append(f"{key} is {short(found)}, only {value!r} is supported")
        for key in ("rope_parameters", "rope_scaling"):
            group = self.text.get(key) or {}
            kind = group.get("rope_type", group.get("type", "default")) if isinstance(group, dict) else group
            if kind not in ("default", None):
                out.append(f"{key} has rope type {short(kind)}, only 'default' is supported: remove the scaling")
        if TYPES[self.get("model_type")] != "qwen3_next" and self.text.get("norm_topk_prob") is False:
            out.append(
                "norm_topk_prob is false, which this model type's reference implementation does not read: remove it"
            )
        return out
