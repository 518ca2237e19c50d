import json
import pathlib
import shutil

import pytest

from atlas_jax.config import FULL, LINEAR
from atlas_jax.errors import CheckpointError, ConfigError
from atlas_jax.weights.inspect import inspect_model

SMALL = pathlib.Path(__file__).parent / "data" / "parity_small"


def test_a_checkpoint_that_loads():
    report = inspect_model(SMALL)
    assert report.refused == () and report.drafter == "present" and report.model_type == "qwen3_5"
    assert report.layers == {LINEAR: 3, FULL: 1}
    assert report.parameters["embedding"] == 384 * 128 and "head" not in report.parameters
    assert sum(report.parameters.values()) == report.active_parameters
    # bfloat16 throughout: what is stored is the parameters and the vision tower
    assert report.stored_bytes["BF16"] == 2 * sum(report.parameters.values()) + report.ignored_bytes
    text = report.text()
    assert "loads        yes" in text and "3 linear_attention, 1 full_attention" in text and "not loaded" in text
    assert json.loads(json.dumps(report.to_dict()))["state_bytes"] == report.state_bytes


def test_state_of_a_published_shape():
    report = inspect_model("shape:qwen3.5-27b")
    assert report.state_bytes["recurrent"] == 48 * 48 * 128 * 128 * 4
    assert report.state_bytes["convolution"] == 48 * (2 * 8 + 3) * 10240 * 2
    assert report.state_bytes["journal"] == 48 * 2 * 8 * 4 * (16 * 128 + 48 * 128 + 48)
    assert report.state_bytes["kv_per_token"] == 17 * 2 * 4 * 256 * 2
    assert 26e9 < sum(report.parameters.values()) < 28e9 and report.stored_bytes == {}


def test_experts_that_are_not_used():
    report = inspect_model("shape:qwen3.6-35b-a3b")
    assert 3e9 < report.active_parameters < 4e9 < 34e9 < sum(report.parameters.values())
    assert "of them active" in report.text()


def test_quantised_weights_are_named_and_other_schemes_refused(tmp_path):
    source = pathlib.Path(__file__).parent / "data" / "quantised" / "ct_int4_g32"
    report = inspect_model(source)
    assert report.refused == () and report.quantised == "compressed-tensors (int4-g32)" and report.unused == ()
    assert "quantised    compressed-tensors (int4-g32)\n" in report.text() and report.calibrated is None
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "hqq"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copyfile(source / "model.safetensors", tmp_path / "model.safetensors")
    (reason,) = inspect_model(tmp_path).refused
    assert "hqq" in reason


def test_an_unknown_model_is_described_as_far_as_it_can_be(shared):
    report = inspect_model(shared / "data" / "parity" / "qwen4_exp")
    assert report.model_type is None and report.parameters == {} and report.stored_bytes["F32"] > 0
    assert "qwen4_exp" in report.refused[0] and "type         unknown" in report.text()


@pytest.fixture
def broken(shared, tmp_path):
    source = shared / "data" / "parity" / "qwen3_5"
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(source / name, tmp_path / name)
    return tmp_path


def test_a_damaged_file_leaves_the_configuration(broken):
    path = broken / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    report = inspect_model(broken)
    assert report.parameters and report.stored_bytes == {}
    assert len(report.refused) == 1 and "model.safetensors" in report.refused[0]
    assert report.drafter == "declared, but not in the weights"


def test_tensors_of_another_model(broken):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"intermediate_size": 512}))
    (reason,) = inspect_model(broken).refused
    assert "tensors that do not fit" in reason


def test_nothing_there(tmp_path):
    with pytest.raises(CheckpointError, match="no such directory"):
        inspect_model(tmp_path / "none")
    with pytest.raises(ConfigError, match="there are"):
        inspect_model("shape:none")
    assert len(inspect_model(tmp_path).refused) == 2
