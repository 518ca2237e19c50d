"""Quantised checkpoints: every layout is read as what it stands for, put where the model looks, or refused by name."""

import copy
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantised import FORMATS, ct, gptq, pack_quantized
from safetensors.numpy import save_file
from test_load import CONFIG, random_tensors

from atlas_jax.errors import CheckpointError
from atlas_jax.weights.hf_config import recipe_in
from atlas_jax.weights.load import load_params
from atlas_jax.weights.quantised.codes import packed
from atlas_jax.weights.quantised.formats import Unsupported
from atlas_jax.weights.quantised.recipe import matches, recipe_of
from pallas_kernels import w4a16
from pallas_kernels.linear import linear
from pallas_kernels.w4a16 import ByLayer, SideBySide

LAYER = "model.layers.0.mlp.shared_expert.down_proj"


def plain(weight, K: int, layer: int | None = None) -> np.ndarray:
    """A weight of any form as an array [K, N]."""
    if isinstance(weight, SideBySide):
        return np.concatenate([plain(part, K, layer) for part in weight.parts], axis=-1)
    if isinstance(weight, w4a16.Packed):
        return np.asarray(w4a16.dequantise(weight, layer, K, "float32"))
    return np.asarray(weight if layer is None else weight[layer])


@pytest.mark.parametrize(("N", "K"), [(24, 96), (136, 320)])
@pytest.mark.parametrize("name", FORMATS)
def test_every_layout_is_read_as_what_it_stands_for(name, N, K):
    about, encode = FORMATS[name]
    layout = recipe_of(about).of(LAYER)
    assert layout is not None
    tensors, values = encode(np.random.default_rng(0), N, K)
    for keys, want in layout.tensors(N, K).items():
        (key,) = [key for key in keys.split("|") if key in tensors]
        assert tensors[key].shape in want.shapes
    for key in set(tensors) & set(layout.unused):
        del tensors[key]
    views = layout.prepare(tensors, N, K)
    views = {key: x.view(np.uint8) if x.dtype.name.startswith("float8") else x for key, x in views.items()}
    form = jax.jit(lambda views: packed(layout.codes(views, N, K), "bfloat16"))(views)
    np.testing.assert_allclose(plain(form, K), values.T, rtol=3e-7)
    if name.startswith(("gptq", "ct int4 act")):
        assert (form.order is not None) == ("act-order" in name)
        assert (form.zeros is None) == ("symmetric" in name or name.startswith("ct"))


def quantised(encode, keep=lambda module: False) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A checkpoint whose linear layers are quantised, but for those to `keep`; and the same model unquantised."""
    rng, tensors, values = np.random.default_rng(1), {}, {}
    for name, value in random_tensors(CONFIG, False).items():
        module = name.removesuffix(".weight")
        linear = value.ndim == 2 and "layers" in name and not name.startswith("mtp.")
        if not linear or module.endswith(("mlp.gate", "in_proj_ba", "shared_expert_gate")) or keep(module):
            tensors[name] = values[name] = value
            continue
        stored, weight = encode(rng, *value.shape)
        tensors |= {f"{module}.{key}": x for key, x in stored.items()}
        values[name] = weight.astype(np.float32)
    return tensors, values


def write(directory: pathlib.Path, tensors: dict[str, np.ndarray]) -> pathlib.Path:
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    return directory


def load(directory: pathlib.Path, about=None, layout: str = "layers"):
    recipe = None if about is None else recipe_of(about)
    return load_params(directory, CONFIG, dtype="float32", layout=layout, recipe=recipe)["params"]


CHANNEL = FORMATS["ct int4 channel asymmetric"]


def test_a_whole_model_lies_where_the_model_looks(tmp_path):
    """Qwen3-Next, whose projections are put in another order; its small projections stay as they are."""
    tensors, values = quantised(CHANNEL[1])
    got, expected = load(write(tmp_path, tensors), CHANNEL[0]), load(write(tmp_path / "plain", values))
    for block in ("linear_attention", "attention"):
        for name in ("in_proj", "out_proj"):
            for weight, want in zip(got[block][name], expected[block][name], strict=True):
                np.testing.assert_allclose(plain(weight, want.shape[-2]), want, rtol=3e-7)
    for name in ("gate_up", "down", "shared_gate_up", "shared_down"):
        for weight, want in zip(got["feed_forward"][name], expected["feed_forward"][name], strict=True):
            np.testing.assert_allclose(plain(weight, want.shape[-2]), want, rtol=3e-7)
    assert isinstance(got["linear_attention"]["in_proj"][0], SideBySide)
    np.testing.assert_array_equal(got["mtp"]["fc"], expected["mtp"]["fc"])
    np.testing.assert_array_equal(got["feed_forward"]["router"][1], expected["feed_forward"]["router"][1])


def test_layers_of_several_forms(tmp_path):
    """A layer that the checkpoint left alone stands in a stack of its own; so do projections of other order."""
    tensors, values = quantised(CHANNEL[1], keep=lambda module: "layers.1." in module or "linear_attn.out" in module)
    got, expected = load(write(tmp_path, tensors), CHANNEL[0], "stacked"), load(write(tmp_path / "plain", values))
    down = got["feed_forward"]["shared_down"]
    assert isinstance(down, ByLayer) and down.places == ((0, 0), (1, 0), (0, 1))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 7)), jnp.float32)
    for i in range(3):
        want = x @ expected["feed_forward"]["shared_down"][i]
        np.testing.assert_allclose(linear(x, down, i), want, atol=1e-5)
    assert isinstance(got["linear_attention"]["out_proj"], jax.Array)


@pytest.mark.parametrize("layout", ["layers", "stacked"])
def test_projections_of_several_schemes_side_by_side(tmp_path, layout):
    """One weight in memory, whose parts the checkpoint quantised in three ways: groups of two sizes, and FP8."""
    rng = np.random.default_rng(0)
    kinds = {
        "q": ("ct int4 g32", "q_proj"),
        "k": ("ct int4 g64 asymmetric", "k_proj"),
        "v": ("ct fp8 channel", "v_proj"),
    }
    groups = {}
    tensors = random_tensors(CONFIG, False)
    values = dict(tensors)
    for name, (kind, projection) in kinds.items():
        about, encode = FORMATS[kind]
        groups[name] = about["config_groups"]["group_0"] | {
            "targets": [f"re:.*{projection}$"],
            "format": about["format"],
        }
        for module in [x.removesuffix(".weight") for x in tensors if x.endswith(f"{projection}.weight")]:
            if not module.startswith("mtp."):
                stored, values[f"{module}.weight"] = encode(rng, *tensors.pop(f"{module}.weight").shape)
                tensors |= {f"{module}.{key}": x for key, x in stored.items()}
    about = ct("mixed-precision") | {"config_groups": groups}
    got = load(write(tmp_path, tensors), about, layout)
    values = {name: x.astype(np.float32) if x.dtype == np.float64 else x for name, x in values.items()}
    want = load(write(tmp_path / "plain", values), None, layout)
    pair = got["attention"]["in_proj"], want["attention"]["in_proj"]
    weight, expected = (x if layout == "stacked" else x[0] for x in pair)
    assert isinstance(weight, SideBySide) and len(weight.parts) == 3
    layer = 0 if layout == "stacked" else None
    np.testing.assert_allclose(
        plain(weight, expected.shape[-2], layer), expected if layer is None else expected[0], rtol=3e-7
    )


def test_what_does_not_belong_is_listed_and_scales_of_activations_are_not_needed(tmp_path):
    about, encode = FORMATS["fp8 tensor"]
    tensors, _ = quantised(encode)
    at = "model.layers.1.self_attn"
    tensors |= {f"{at}.q_proj.input_scale": np.ones((), np.float32), f"{at}.k_scale": np.ones((), np.float32)}
    load(write(tmp_path, tensors), about)
    del tensors[f"{at}.v_proj.weight_scale"]
    tensors[f"{at}.q_proj.bias"] = np.ones(4, np.float32)
    tensors[f"{at}.o_proj.weight_scale"] = np.ones(3, np.float32)
    with pytest.raises(CheckpointError) as error:
        load(write(tmp_path, tensors), about)
    for part in (
        f"missing tensors: {at}.v_proj.weight_scale_inv",
        f"without a place in this model: {at}.q_proj.bias",
        f"{at}.o_proj.weight_scale (shape [3], by config.json [] or",
        "quantised as fp8 (fp8)",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("encode", "message"),
    [
        (lambda r, N, K: gptq(r, N, K, 32, 1), "not all 8"),
        (lambda r, N, K: _changed(gptq(r, N, K, 32, 1, symmetric=True), "qzeros", -1), "16 or for 0"),
        (lambda r, N, K: _changed(gptq(r, N, K, 32, 1, symmetric=True), "g_idx", 0), "cannot be read exactly"),
    ],
)
def test_what_cannot_be_exact_is_refused(encode, message):
    layout = recipe_of(FORMATS["gptq symmetric"][0]).of(LAYER)
    assert layout is not None
    with pytest.raises(ValueError, match=message):
        layout.prepare(encode(np.random.default_rng(0), 24, 96)[0], 24, 96)


def _changed(encoded, name: str, value: int):
    return {**encoded[0], name: np.full_like(encoded[0][name], value)}, encoded[1]


def test_a_wrong_shape_inside_is_named(tmp_path):
    def encode(rng, N, K):
        tensors, values = pack_quantized(rng, N, K, None, symmetric=False)
        return tensors | {"weight_shape": np.array([N, K + 1])}, values

    with pytest.raises(CheckpointError, match=r"layers\.0\.linear_attn\.in_proj_qkvz: weight_shape says \[76, 33\]"):
        load(write(tmp_path, quantised(encode)[0]), CHANNEL[0])


@pytest.mark.parametrize(
    ("about", "name"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "hqq"}, "hqq"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "quark"}, "quark"),
        ({}, "None"),
        (["fp8"], "not an object"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 e5m2"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"blocks of \[64, 64\]"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "GPTQ with 8 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 16}, "groups of 16"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:a": {"bits": 3}}}, "GPTQ with 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:(": {}}}, "gptq with a damaged description"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'gemv'"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "without zero points"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "NVFP4_AWQ"),
        ({"quantization": {"quant_algo": "NVFP4", "group_size": 32}}, "groups of 32"),
        (ct("int-quantized", num_bits=8, type="int", strategy="channel"), "int-quantized"),
        (ct("pack-quantized", num_bits=8, type="int", strategy="channel"), "8 bits"),
        (ct("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32), "mxfp4-pack-quantized"),
        (ct("marlin-24", num_bits=4, type="int", strategy="group", group_size=128), "marlin-24"),
        (ct("pack-quantized", num_bits=4, type="int", strategy="tensor"), "tensor"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "without config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": 3}}, "damaged description"),
        (ct("pack-quantized", num_bits=4, type="int", strategy="channel", symmetric="no"), "symmetric 'no'"),
        (ct("pack-quantized", num_bits=4, type="int", strategy="channel", dynamic=True), "dynamic True"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": 1}, "sym 1"),
        (ct("pack-quantized") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        (ct("pack-quantized") | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    ],
)
def test_other_schemes_are_refused_by_name(about, name):
    with pytest.raises(Unsupported, match=name):
        recipe_of(about)


JUNK = st.sampled_from([None, "", "x", "re:(", -1, 0, 3, 10**30, 1.5, True, [], ["re:("], [3], {}, {"a": 3}])


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    yield at
    for key, x in inner:
        yield from places(x, (*at, key))


@hypothesis.given(st.sampled_from(list(FORMATS)), st.data())
def test_damaged_descriptions_are_refused_or_understood(name, data):
    """Whatever stands in a description in the place of what should: a refusal, when it is read, and nothing afterwards."""
    about = json.loads(json.dumps(FORMATS[name][0]))
    if name == "gptq":
        about["dynamic"] = {"-:.*mlp.*": {}, "+:.*k_proj": {"bits": 4}}
    if name == "modelopt fp8":
        about |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": {LAYER: {"quant_algo": "FP8"}}}
    for _ in range(data.draw(st.integers(1, 2))):
        *path, last = data.draw(st.sampled_from([place for place in places(about) if place] or [("a",)]))
        holder = about
        for key in path:
            holder = holder[key]
        holder[last] = copy.deepcopy(data.draw(JUNK))
    try:
        recipe = recipe_of(about)
    except Unsupported:
        return
    for module in (LAYER, "lm_head", "model.layers.0.mlp.down_proj"):
        layout = recipe.of(module)
        assert layout is None or layout.tensors(64, 128)


@pytest.mark.parametrize("name", FORMATS)
def test_any_tensor_that_is_lost_or_of_another_form_is_named(tmp_path, name):
    about, encode = FORMATS[name]
    module = "model.layers.1.self_attn.k_proj"
    rng = np.random.default_rng(0)
    tensors = random_tensors(CONFIG, False)
    N, K = tensors.pop(f"{module}.weight").shape
    # The other layers are left in floats, as a checkpoint may leave them.
    stored = {f"{module}.{key}": x for key, x in encode(rng, N, K)[0].items()}
    for key, x in stored.items():
        if key.endswith("input_scale"):
            continue
        others = {
            "missing tensors": None,
            "do not fit": np.zeros((*x.shape, 2), x.dtype),
            "do not fit:": x.astype(np.float64),
        }
        for says, other in others.items():
            changed = {k: v for k, v in (tensors | stored | {key: other}).items() if v is not None}
            with pytest.raises(CheckpointError, match=says.removesuffix(":")) as error:
                load(write(tmp_path, changed), about)
            assert key in str(error.value) or f"{module}.weight" in str(error.value)


def test_names_in_lists_of_exceptions():
    for module in ("model.layers.3.mlp.down_proj", "model.language_model.layers.3.mlp.down_proj"):
        for pattern in (
            "model.layers.3.mlp.down_proj",
            "language_model.model.layers.3.mlp.down_proj",
            "re:.*down_proj$",
            "re:model.layers.3",
        ):
            assert matches(module, pattern), (module, pattern)
        for pattern in ("down_proj", "layers.3", "re:down_proj", "Linear", "model.layers.3.mlp"):
            assert not matches(module, pattern), (module, pattern)


def test_expressions_that_never_end_are_refused_by_name(monkeypatch):
    monkeypatch.setattr("atlas_jax.weights.quantised.recipe.MATCH_S", 0.2)
    slow, about = "re:(.*?,?){40}[0-9]$", FORMATS["ct int4 g128"][0]
    target = {"g": about["config_groups"]["group_0"] | {"targets": [slow]}}
    for changed in ({"ignore": [slow]}, {"ignore": [], "config_groups": target}):
        recipe = recipe_of(about | changed)
        with pytest.raises(CheckpointError, match=r"\{40\}\[0-9\]\$' of quantization_config takes for ever"):
            recipe.of("model.language_model.layers.3.mlp.down_proj")
    recipe = recipe_of({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:" + slow[3:]: {}}})
    with pytest.raises(CheckpointError, match="for ever"):
        recipe.of("model.language_model.layers.3.mlp.down_proj")
    assert not matches("model.layers.3.mlp.down_proj", "re:(.*.*)*x$")


def test_two_settings_for_one_target():
    about = FORMATS["ct int4 g128"][0]
    group = about["config_groups"]["group_0"]
    other = group | {"weights": group["weights"] | {"group_size": 32}}
    recipe_of(about | {"config_groups": {"a": group, "b": copy.deepcopy(group)}})
    with pytest.raises(Unsupported, match="two settings for 'Linear'"):
        recipe_of(about | {"config_groups": {"a": group, "b": other}})


def test_groups_of_several_schemes():
    """Mixed precision: the group that names a module goes before the one of all linear layers; the file may be ModelOpt's own."""
    int4 = {"targets": ["Linear"], "format": "pack-quantized"}
    int4["weights"] = dict(num_bits=4, type="int", strategy="group", group_size=32, symmetric=True)
    eight = {"targets": ["re:.*self_attn.*"], "format": "float-quantized"}
    eight["weights"] = dict(num_bits=8, type="float", strategy="channel", symmetric=True)
    about = ct("mixed-precision") | {"config_groups": {"a": int4, "b": eight}}
    recipe = recipe_of(about)
    kind = lambda module: (layout := recipe.of(module)) and layout.scheme.kind  # noqa: E731
    assert kind("model.layers.0.mlp.up_proj") == "int4" and kind("model.layers.0.self_attn.q_proj") == "fp8"
    assert kind("lm_head") is None and kind("mtp.fc") is None and recipe.name == "compressed-tensors (fp8, int4-g32)"
    layers = {"model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16}}
    layers["model.layers.0.self_attn.q_proj"] = {"quant_algo": "FP8"}
    recipe = recipe_of({"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}})
    assert kind("model.language_model.layers.0.mlp.up_proj") == "nvfp4" and kind("lm_head") is None
    assert kind("model.layers.0.self_attn.q_proj") == "fp8"
    recipe = recipe_of(FORMATS["modelopt nvfp4"][0] | {"ignore": ["*in_proj_a", "model.layers.1*"]})
    assert kind("model.layers.0.linear_attn.in_proj_a") is None and kind("model.language_model.layers.1.mlp.x") is None
    assert kind("model.layers.2.mlp.x") == "nvfp4"
    recipe = recipe_of({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:.*k_proj": {}}})
    assert kind("model.layers.0.self_attn.k_proj") is None and kind("model.layers.0.self_attn.q_proj") == "int4"


def test_a_description_in_json_of_its_own(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert recipe_in(tmp_path) is None
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    recipe = recipe_in(tmp_path)
    assert recipe is not None and recipe.name == "modelopt (fp8)"
