import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from atlas_jax.config import ModelConfig
from atlas_jax.errors import CheckpointError
from atlas_jax.settings import row_group_on_gpu
from atlas_jax.weights.hf_config import model_config
from atlas_jax.weights.load import load_params
from atlas_jax.weights.names import plan
from atlas_jax.weights.presets import parameter_shapes

SMALL = pathlib.Path(__file__).parent / "data" / "parity_small"
CASES = (SMALL.name, "qwen3_5", "qwen3_5_moe", "qwen3_next")
CONFIG = ModelConfig(
    model_type="qwen3_next",
    vocab_size=48,
    hidden_size=32,
    layer_types=("linear_attention", "full_attention", "linear_attention"),
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=4,
    linear_value_head_dim=5,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=6,
    shared_expert_intermediate_size=7,
    mtp_num_hidden_layers=1,
)


def random_tensors(config: ModelConfig, fused: bool) -> dict[str, np.ndarray]:
    """A checkpoint's tensors, with the experts of each layer in one tensor or in many."""
    layers = ["mtp.layers.0", *(f"model.layers.{i}" for i in range(config.num_layers))]
    names = [f"{layer}.mlp.experts.gate_up_proj" for layer in layers] if fused else []
    rng = np.random.default_rng(0)
    parts = [part for leaf in plan(config, names) for weight in leaf.weights for part in weight.parts]
    return {name: rng.normal(size=part.shape).astype(np.float32) for part in parts for name in part.names}


def write(directory: pathlib.Path, tensors: dict[str, np.ndarray]) -> pathlib.Path:
    save_file(tensors, directory / "model.safetensors")
    return directory


def load(directory: pathlib.Path, config: ModelConfig = CONFIG, dtype: str = "float32", layout: str = "layers"):
    return load_params(directory, config, dtype=dtype, layout=layout)["params"]


@pytest.mark.parametrize("layout", ["layers", "stacked"])
@pytest.mark.parametrize("case", CASES)
def test_the_tree_is_that_of_the_model(request, case, layout):
    directory = SMALL if case == SMALL.name else request.getfixturevalue("shared") / "data" / "parity" / case
    config = model_config(directory)
    for dtype in ("float32", "bfloat16"):
        params = load_params(directory, config, dtype=dtype, layout=layout)
        expected = parameter_shapes(config, dtype=dtype, layout=layout)
        assert jax.tree.structure(params) == jax.tree.structure(expected)
        for (path, got), want in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(expected), strict=True):
            assert (got.shape, got.dtype) == (want.shape, want.dtype), jax.tree_util.keystr(path)


def test_layouts_hold_the_same_numbers(tmp_path):
    write(tmp_path, random_tensors(CONFIG, True))
    layers, stacked = load(tmp_path), load(tmp_path, layout="stacked")
    for block in ("linear_attention", "attention", "feed_forward"):
        for name, values in layers[block].items():
            np.testing.assert_array_equal(np.stack(values), stacked[block][name])
    np.testing.assert_array_equal(layers["norms"], stacked["norms"])


def test_columns_lie_where_the_model_splits_them(tmp_path):
    tensors = random_tensors(CONFIG, False)
    params = load(write(tmp_path, tensors))
    heads, ratio, keys, values = 2, 3, 4, 5
    fused = tensors["model.layers.2.linear_attn.in_proj_qkvz.weight"].reshape(heads, 2 * keys + 2 * ratio * values, 32)
    small = tensors["model.layers.2.linear_attn.in_proj_ba.weight"].reshape(heads, 2 * ratio, 32)
    q, k = fused[:, :keys], fused[:, keys : 2 * keys]
    v, z = fused[:, 2 * keys : 2 * keys + ratio * values], fused[:, 2 * keys + ratio * values :]
    rows = [x.reshape(-1, 32) for x in (q, k, v, z, small[:, :ratio], small[:, ratio:])]
    np.testing.assert_array_equal(params["linear_attention"]["in_proj"][1], np.concatenate(rows).T)
    conv = tensors["model.layers.2.linear_attn.conv1d.weight"]
    np.testing.assert_array_equal(params["linear_attention"]["conv"][1], conv[:, 0].T)
    attention = [tensors[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    np.testing.assert_array_equal(params["attention"]["in_proj"][0], np.concatenate(attention).T)
    expert = [tensors[f"model.layers.0.mlp.experts.3.{name}_proj.weight"] for name in ("gate", "up")]
    np.testing.assert_array_equal(params["feed_forward"]["gate_up"][0][3], np.concatenate(expert).T)
    np.testing.assert_array_equal(params["mtp"]["fc"], tensors["mtp.fc.weight"].T)
    np.testing.assert_array_equal(params["norms"][3], tensors["model.layers.1.post_attention_layernorm.weight"])
    np.testing.assert_array_equal(params["norms"][6], tensors["model.norm.weight"])
    np.testing.assert_array_equal(params["norms"][7], tensors["mtp.pre_fc_norm_embedding.weight"])
    small = [tensors[f"model.layers.2.linear_attn.{name}"] for name in ("A_log", "dt_bias", "norm.weight")]
    np.testing.assert_array_equal(params["linear_attention"]["vectors"][1], np.concatenate(small))
    norms = [tensors[f"model.layers.1.self_attn.{name}_norm.weight"] for name in "qk"]
    np.testing.assert_array_equal(params["attention"]["norms"][0], norms)
    np.testing.assert_array_equal(params["head"], tensors["lm_head.weight"].T)


@pytest.mark.parametrize("trunk_fused", [True, False])
@pytest.mark.parametrize("drafter_fused", [True, False])
def test_experts_in_one_tensor_or_in_many(tmp_path, trunk_fused, drafter_fused):
    many = random_tensors(CONFIG, False)
    tensors = {
        name: value
        for name, value in many.items()
        if ".experts." not in name or not (drafter_fused if name.startswith("mtp.") else trunk_fused)
    }
    for layer in ["mtp.layers.0"] * drafter_fused + [f"model.layers.{i}" for i in range(3)] * trunk_fused:
        at = f"{layer}.mlp.experts"
        gate, up, down = (
            np.stack([many[f"{at}.{e}.{name}_proj.weight"] for e in range(4)]) for name in ("gate", "up", "down")
        )
        tensors |= {f"{at}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{at}.down_proj": down}
    (tmp_path / "many").mkdir()
    expected, got = load(write(tmp_path / "many", many)), load(write(tmp_path, tensors))
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_a_single_expert_keeps_its_axis(tmp_path):
    config = dataclasses.replace(CONFIG, num_experts=1, num_experts_per_tok=1)
    params = load(write(tmp_path, random_tensors(config, False)), config)
    assert params["feed_forward"]["gate_up"][0].shape == (1, 32, 12)


def test_wrapped_names_vision_tower_and_buffers(tmp_path):
    tensors = random_tensors(CONFIG, True)
    (tmp_path / "plain").mkdir()
    expected = load(write(tmp_path / "plain", tensors))
    wrapped = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
    wrapped |= {name: np.ones(3, np.float32) for name in ("model.visual.a.weight", "visual.b.bias")}
    wrapped["model.language_model.rotary_emb.inv_freq"] = np.ones(3, np.float32)
    jax.tree.map(np.testing.assert_array_equal, load(write(tmp_path, wrapped)), expected)


def test_norms_and_decays_stay_float32_and_the_rest_is_rounded(tmp_path):
    tensors = random_tensors(CONFIG, True)
    params = load(write(tmp_path, tensors), dtype="bfloat16")
    decay = "model.layers.0.linear_attn.A_log"
    vectors = params["linear_attention"]["vectors"][0]
    np.testing.assert_array_equal(vectors[: tensors[decay].size], tensors[decay])
    assert vectors.dtype == params["norms"].dtype == params["attention"]["norms"][0].dtype == jnp.float32
    rounded = tensors["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(params["embedding"], rounded)
    assert params["attention"]["in_proj"][0].dtype == jnp.bfloat16


def test_parameters_do_not_hang_on_the_file(tmp_path):
    """`device_put` may hand out pages of the map; what is loaded must not change with the file."""
    tensors = random_tensors(CONFIG, True)
    params = load(write(tmp_path, tensors))
    before = jax.tree.map(np.array, params)
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    jax.tree.map(np.testing.assert_array_equal, params, before)


def test_progress_counts_every_byte(tmp_path):
    tensors = random_tensors(CONFIG, False)
    seen: list[tuple[int, int]] = []
    write(tmp_path, tensors)
    load_params(tmp_path, CONFIG, dtype="float32", layout="layers", progress=lambda *at: seen.append(at))
    total = sum(value.nbytes for value in tensors.values())
    assert seen[-1] == (total, total) and seen == sorted(seen)


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_head_in_the_file_must_be_the_embedding(tmp_path, same):
    config = dataclasses.replace(CONFIG, tie_word_embeddings=True)
    tensors = random_tensors(config, True)
    head = tensors["model.embed_tokens.weight"] + (0 if same else 1)
    write(tmp_path, tensors | {"lm_head.weight": head})
    if same:
        assert "head" not in load(tmp_path, config)
    else:
        with pytest.raises(CheckpointError, match=r"lm_head.weight \(differs from model.embed_tokens.weight"):
            load(tmp_path, config)


def test_a_declared_drafter_must_be_there(tmp_path):
    tensors = {name: value for name, value in random_tensors(CONFIG, True).items() if not name.startswith("mtp.")}
    write(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"no tensor is named mtp\.\*; add the file"):
        load(tmp_path)
    save_file({"mtp.norm.weight": np.ones(1, np.float32)}, tmp_path / "mtp.safetensors")
    with pytest.raises(CheckpointError, match=r"leaves out mtp\.safetensors"):
        load(tmp_path)
    assert "mtp" not in load(tmp_path, dataclasses.replace(CONFIG, mtp_num_hidden_layers=0))


def test_a_drafter_can_be_left_out(tmp_path):
    write(tmp_path, random_tensors(CONFIG, True))
    assert "mtp" not in load(tmp_path, dataclasses.replace(CONFIG, mtp_num_hidden_layers=0))


def test_all_that_does_not_fit_is_listed(tmp_path):
    tensors = random_tensors(CONFIG, False)
    del tensors["model.layers.1.self_attn.q_norm.weight"]
    tensors["model.layers.9.self_attn.q_norm.weight"] = np.ones(8, np.float32)
    tensors["model.norm.weight"] = np.ones(31, np.float32)
    tensors["mtp.norm.weight"] = np.ones(32, ml_dtypes.float8_e4m3fn)
    with pytest.raises(CheckpointError) as error:
        load(write(tmp_path, tensors))
    message = str(error.value)
    assert str(tmp_path) in message
    assert "missing tensors: model.layers.1.self_attn.q_norm.weight;" in message
    assert "without a place in this model: model.layers.9.self_attn.q_norm.weight;" in message
    assert "model.norm.weight (shape [31], by config.json [32])" in message
    assert "mtp.norm.weight (F8_E4M3; F32, BF16, F16 can be read)" in message


def test_long_lists_are_cut_and_counted(tmp_path):
    tensors = {name: value for name, value in random_tensors(CONFIG, False).items() if ".experts." not in name}
    with pytest.raises(CheckpointError, match=r"and 40 more"):
        load(write(tmp_path, tensors))


def test_any_single_lost_tensor_is_named(tmp_path):
    for path in SMALL.glob("model*"):
        shutil.copyfile(path, tmp_path / path.name)
    config = model_config(SMALL)
    index = json.loads((SMALL / "model.safetensors.index.json").read_text())
    shards = {file: load_file(tmp_path / file) for file in set(index["weight_map"].values())}
    for lost, file in index["weight_map"].items():
        if lost.startswith("model.visual."):
            continue
        save_file({name: value for name, value in shards[file].items() if name != lost}, tmp_path / file)
        where = {name: at for name, at in index["weight_map"].items() if name != lost}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        with pytest.raises(CheckpointError) as error:
            load(tmp_path, config)
        assert f"missing tensors: {lost}" in str(error.value)
        save_file(shards[file], tmp_path / file)


def test_a_gpus_row_group_holds_all_rows_of_a_dispatch_up_to_64():
    groups = {rows: row_group_on_gpu(rows) for rows in (1, 8, 16, 17, 32, 33, 64, 500)}
    assert groups == {1: 16, 8: 16, 16: 16, 17: 32, 32: 32, 33: 64, 64: 64, 500: 64}
