import pathlib

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from atlas_jax.errors import CheckpointError, ConfigError
from atlas_jax.weights import presets
from atlas_jax.weights.hf_config import model_config
from atlas_jax.weights.presets import parameter_shapes, preset_config, preset_names, random_params, resolve


def test_published_shapes():
    assert preset_names() == ["qwen3-next-80b", "qwen3.5-27b", "qwen3.6-35b-a3b", "tiny-agent"]
    sizes = {}
    for name in preset_names():
        shapes = parameter_shapes(preset_config(name), dtype="bfloat16", layout="stacked")
        sizes[name] = sum(x.size for x in jax.tree.leaves(shapes)) / 1e9
    assert 79 < sizes["qwen3-next-80b"] < 82 and 26 < sizes["qwen3.5-27b"] < 28 and 34 < sizes["qwen3.6-35b-a3b"] < 36
    assert sizes["tiny-agent"] < 0.02


def test_the_tiny_preset_is_the_packaged_model():
    assert preset_config("tiny-agent") == model_config(presets.PACKAGED["tiny-agent"])


def test_an_unknown_shape_lists_the_known():
    with pytest.raises(ConfigError, match=r"'small'; there are: qwen3-next-80b, .*tiny-agent"):
        preset_config("small")


def test_shapes_of_an_installed_package_come_first(tmp_path, monkeypatch):
    monkeypatch.setattr(presets, "PACKAGE", tmp_path / "atlas_jax")
    with pytest.raises(ConfigError, match="install atlas-jax again"):
        preset_names()
    folder = tmp_path / "atlas_jax" / "configs"
    folder.mkdir(parents=True)
    (folder / "odd.toml").write_text('model_type = "qwen3_5"\nwidth = 3\n')
    assert preset_names() == ["odd"]
    with pytest.raises(ConfigError, match=r"odd\.toml: "):
        preset_config("odd")
    (folder / "odd.toml").write_text("model_type =")
    with pytest.raises(ConfigError, match=r"odd\.toml"):
        preset_config("odd")


@pytest.mark.parametrize("layout", ["layers", "stacked"])
def test_random_parameters(layout):
    config = preset_config("tiny-agent")
    params = random_params(config, dtype="bfloat16", layout=layout, seed=1)
    expected = parameter_shapes(config, dtype="bfloat16", layout=layout)
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
    again, other = (random_params(config, dtype="bfloat16", layout=layout, seed=seed) for seed in (1, 2))
    jax.tree.map(np.testing.assert_array_equal, params, again)
    embeddings = [np.asarray(tree["params"]["embedding"], np.float32) for tree in (params, other)]
    assert (embeddings[0] != embeddings[1]).mean() > 0.9
    assert abs(embeddings[0].std() * config.hidden_size**0.5 - 1) < 0.01


def test_resolve_a_shape():
    source = resolve("shape:tiny-agent")
    assert source.directory is None and source.config == preset_config("tiny-agent")
    assert source.load(dtype="float32", layout="layers")["params"]["embedding"].dtype == np.float32
    with pytest.raises(ConfigError, match="there are: "):
        resolve("shape:none")


def test_resolve_a_directory():
    folder = pathlib.Path(__file__).parent / "data" / "parity_small"
    source = resolve(folder)
    assert source.directory == folder and source.config.tie_word_embeddings
    embedding = source.load(dtype="bfloat16", layout="stacked")["params"]["embedding"]
    assert embedding.shape == (384, 128)


def test_resolve_a_packaged_model(tmp_path, monkeypatch):
    source = presets.PACKAGED["tiny-agent"]
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    monkeypatch.setitem(presets.PACKAGED, "tiny-agent", tmp_path)
    with pytest.raises(CheckpointError, match=rf"{tmp_path} has no weights"):
        resolve("tiny-agent")
    save_file({"mtp.norm.weight": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    assert resolve("tiny-agent").directory == tmp_path


def test_resolve_says_what_it_tried(tmp_path):
    with pytest.raises(CheckpointError) as error:
        resolve(tmp_path / "none")
    assert "not there" in str(error.value) and "shape:tiny-agent" in str(error.value)
    file = pathlib.Path(tmp_path / "file")
    file.touch()
    with pytest.raises(CheckpointError, match="it is a file"):
        resolve(file)
    with pytest.raises(CheckpointError, match="cannot be read"):
        resolve(tmp_path)  # a folder without config.json
