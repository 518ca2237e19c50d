import json
import pathlib
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import atlas_jax.config
from atlas_jax.config import ModelConfig
from atlas_jax.errors import AtlasError, CheckpointError, ConfigError
from atlas_jax.weights.hf_config import model_config, parse

PATTERN = ("linear_attention",) * 3 + ("full_attention",)
# As published in 2025: rotary keys of their own, an interval instead of a list, a head declared in another way.
NEXT = {
    "model_type": "qwen3_next",
    "vocab_size": 384,
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000,
    "rope_scaling": None,
    "partial_rotary_factor": 0.25,
    "intermediate_size": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "attention_bias": False,
    "eos_token_id": 2,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}
DENSE = {key: value for key, value in NEXT.items() if "expert" not in key and "moe" not in key} | {
    "model_type": "qwen3_5_text"
}


def write(directory: pathlib.Path, config: object, **files: object) -> pathlib.Path:
    (directory / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def test_older_keys(tmp_path):
    config = model_config(write(tmp_path, NEXT))
    assert config == ModelConfig(
        model_type="qwen3_next",
        vocab_size=384,
        hidden_size=128,
        layer_types=PATTERN * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        max_position_embeddings=4096,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=48,
        mtp_num_hidden_layers=1,
        eos_token_ids=(2,),
    )


def test_wrapper_and_newer_keys(tmp_path):
    text = without(DENSE, "rope_theta", "partial_rotary_factor", "full_attention_interval", "num_nextn_predict_layers")
    text |= {
        "layer_types": list(PATTERN * 2),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1],
        },
        "mtp_num_hidden_layers": 1,
    }
    wrapper = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 1}}
    config = model_config(write(tmp_path, wrapper, generation_config={"eos_token_id": [7, 5], "pad_token_id": 5}))
    assert config.model_type == "qwen3_5" and config.intermediate_size == 256 and config.num_experts == 0
    assert config.layer_types == PATTERN * 2
    assert (config.rope_theta, config.partial_rotary_factor) == (5e6, 0.5)
    assert config.eos_token_ids == (7, 5) and config.pad_token_id == 5
    assert config.has_mtp and not config.tie_word_embeddings


@pytest.mark.parametrize(("model_type", "kind"), [("qwen3_5_moe", "qwen3_5_moe"), ("qwen3_5_moe_text", "qwen3_5_moe")])
def test_moe_wrapper(tmp_path, model_type, kind):
    text = without(NEXT, "norm_topk_prob", "model_type") | {"eos_token_id": None}
    config = model_config(write(tmp_path, {"model_type": model_type, "text_config": text}))
    assert config.model_type == kind and config.norm_topk_prob and config.num_experts == 8
    assert config.eos_token_ids == ()


@pytest.mark.parametrize("where", ["text", "wrapper", "both"])
def test_tied_embeddings_from_either_place(tmp_path, where):
    text = without(DENSE, "tie_word_embeddings")
    wrapper = {"model_type": "qwen3_5", "text_config": text}
    if where in ("text", "both"):
        text["tie_word_embeddings"] = True
    if where in ("wrapper", "both"):
        wrapper["tie_word_embeddings"] = True
    assert model_config(write(tmp_path, wrapper)).tie_word_embeddings


@pytest.mark.parametrize("head", [True, False])
def test_tensors_settle_a_contradiction_about_the_head(tmp_path, head):
    wrapper = {"model_type": "qwen3_5", "text_config": DENSE, "tie_word_embeddings": True}
    with pytest.raises(CheckpointError, match="true in one place and false in another"):
        model_config(write(tmp_path, wrapper))
    save_file({"lm_head.weight" if head else "norm.weight": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    assert model_config(tmp_path).tie_word_embeddings is not head


def test_a_drafter_that_is_only_in_the_weights_counts(tmp_path):
    write(tmp_path, without(NEXT, "num_nextn_predict_layers"))
    assert not model_config(tmp_path).has_mtp
    save_file({"mtp.norm.weight": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    assert model_config(tmp_path).has_mtp


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "attention_bias is True, only False"),
        ({"attn_output_gate": False}, "attn_output_gate is False, only True"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2, only 1"),
        ({"mlp_only_layers": [3]}, "mlp_only_layers is [3], only []"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', only 'silu'"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings is True"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling has rope type 'yarn', only 'default'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters has rope type 'linear'"),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "weights quantised as fp8 e5m2"),
        ({"model_type": "qwen3_5_moe_text", "norm_topk_prob": False}, "norm_topk_prob is false"),
    ],
)
def test_what_is_not_supported_is_refused_with_what_is(tmp_path, change, message):
    with pytest.raises(CheckpointError) as error:
        model_config(write(tmp_path, NEXT | change))
    assert message in str(error.value) and str(tmp_path) in str(error.value)
    assert parse(tmp_path, None).config.hidden_size == 128  # what can be told is told all the same


def test_all_refusals_are_listed_at_once(tmp_path):
    with pytest.raises(CheckpointError, match=r"hidden_act.*attention_bias"):
        model_config(write(tmp_path, NEXT | {"attention_bias": True, "hidden_act": "gelu"}))


def test_quantisation_is_found_beside_the_text_config_and_in_its_own_file(tmp_path):
    wrapper = {"model_type": "qwen3_5", "text_config": DENSE, "quantization_config": {"quant_algo": "INT4_AWQ"}}
    with pytest.raises(CheckpointError, match="INT4_AWQ"):
        model_config(write(tmp_path, wrapper))
    write(tmp_path, DENSE, hf_quant_config={"quantization": {"quant_algo": "W4A8_AWQ"}})
    with pytest.raises(CheckpointError, match="quantised as ModelOpt W4A8_AWQ"):
        model_config(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (NEXT | {"model_type": "qwen4_exp"}, "model_type 'qwen4_exp' is not known; known: qwen3_next"),
        (without(NEXT, "model_type"), "model_type None is not known"),
        (without(NEXT, "head_dim", "rope_theta"), "lacks head_dim, rope_theta"),
        (NEXT | {"head_dim": "32"}, "head_dim must be an integer of 32 bits, found '32'"),
        (NEXT | {"vocab_size": True}, "vocab_size must be an integer"),
        (NEXT | {"head_dim": 2**63}, "head_dim must be an integer of 32 bits"),
        (NEXT | {"tie_word_embeddings": ["a"]}, "tie_word_embeddings must be true or false"),
        (NEXT | {"rope_theta": -1}, "rope_theta must be a positive number"),
        (NEXT | {"rope_parameters": 3}, "rope_parameters must be an object"),
        (NEXT | {"layer_types": list(PATTERN)}, "num_hidden_layers is 8, but layer_types lists 4"),
        (NEXT | {"layer_types": 4}, "layer_types must be a list of names"),
        (NEXT | {"layer_types": ["sliding"] * 8}, "unknown layer types"),
        (NEXT | {"full_attention_interval": 0}, "full_attention_interval must be a positive integer"),
        (NEXT | {"eos_token_id": "2"}, "eos_token_id must be an id"),
        (NEXT | {"eos_token_id": [*range(17)]}, "at most 16 ids"),
        (NEXT | {"eos_token_id": 2**40}, "eos_token_id must be an id"),
        (NEXT | {"pad_token_id": "2"}, "pad_token_id must be an id"),
        (NEXT | {"num_nextn_predict_layers": 2}, "mtp_num_hidden_layers must be 0 or 1"),
        (NEXT | {"num_nextn_predict_layers": "1"}, "mtp_num_hidden_layers must be an integer"),
        (NEXT | {"num_experts_per_tok": 9}, "num_experts_per_tok must lie in 1 … 8"),
        ({"model_type": "qwen3_5", "text_config": [1]}, "text_config must be an object"),
        ([], "a JSON object is needed"),
    ],
)
def test_what_cannot_be_is_named(tmp_path, config, message):
    with pytest.raises(AtlasError) as error:
        model_config(write(tmp_path, config))
    assert isinstance(error.value, CheckpointError | ConfigError) and message in str(error.value)


def test_a_missing_folder_or_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="no such directory"):
        model_config(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        model_config(tmp_path)
    (tmp_path / "config.json").write_text('{"a": 1, "a": 2}')
    with pytest.raises(CheckpointError, match="'a' is there twice"):
        model_config(tmp_path)


def test_reference_configurations(shared):
    folder = shared / "data" / "parity"
    for name in ("qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_5_wrapper_sharded"):
        config = model_config(folder / name)
        assert config.layer_types == PATTERN and config.has_mtp and config.eos_token_ids == (2,)
        assert config.tie_word_embeddings == (name == "qwen3_5_wrapper_sharded")
    with pytest.raises(CheckpointError, match="qwen4_exp"):
        model_config(folder / "qwen4_exp")
    for path in sorted(folder.glob("q_*")):
        assert model_config(path).hidden_size == 256


def test_the_packaged_model(tmp_path):
    folder = pathlib.Path(atlas_jax.config.__file__).parent / "data" / "tiny_agent"
    config = model_config(folder)
    assert config.model_type == "qwen3_5" and config.eos_token_ids == (8185, 8183) and config.tie_word_embeddings
