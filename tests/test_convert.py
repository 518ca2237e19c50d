"""Rounding of weights, converted checkpoints, and heads that only draft."""

import dataclasses
import errno
import json
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_load import CONFIG, random_tensors
from test_quantised_formats import plain

from atlas_jax.cli import main
from atlas_jax.config import RunConfig
from atlas_jax.convert_command import calibration_texts, own_texts
from atlas_jax.errors import CheckpointError, ConfigError
from atlas_jax.models.draft_head import draft_logits, with_draft_head
from atlas_jax.text.chat import render_chat
from atlas_jax.text.tokenizer import load_tokenizer
from atlas_jax.weights import convert as conversion
from atlas_jax.weights.convert import convert
from atlas_jax.weights.hf_config import model_config, recipe_in
from atlas_jax.weights.inspect import inspect_model
from atlas_jax.weights.load import load_params
from atlas_jax.weights.presets import PACKAGED
from atlas_jax.weights.quantised.calibration import calibrated, input_moments
from atlas_jax.weights.quantised.codes import packed
from atlas_jax.weights.quantised.rounding import rounded
from atlas_jax.weights.quantised.scheme import NVFP4, Scheme

SMALL = pathlib.Path(__file__).parent / "data" / "parity_small"
TOOLS = [dict(type="function", function=dict(name="look", parameters=dict(type="object", properties={})))]
SCHEMES = [Scheme("int4", 32), Scheme("int4", 128), NVFP4, Scheme("fp8", None), Scheme("fp8", 128)]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_rounding_is_to_the_nearest(scheme):
    """No value is further from its weight than half a step of its group; a search never makes the error larger."""
    N, K = 24, 200
    weight = np.random.default_rng(0).normal(size=(N, K)).astype(np.float32)
    weight[3] = 0
    values = [
        plain(packed(jax.jit(lambda w, s=s: rounded(w, scheme, search=s))(weight), "bfloat16"), K).T
        for s in (False, True)
    ]
    group = {"int4": scheme.group, "nvfp4": 16, "fp8": K}[scheme.kind]
    starts = range(0, K, group)
    largest = np.stack([np.abs(weight[:, i : i + group]).max(1) for i in starts], 1)
    step = {"int4": 0.51 / 7.5 * 1.01, "nvfp4": 1.2 / 6, "fp8": 0.07}[scheme.kind]
    limit = np.repeat(largest, group, 1)[:, :K] * step + 1e-6
    if scheme.kind == "int4":
        limit = np.where(
            weight * 7.5 > 7.4 * np.repeat(largest, group, 1)[:, :K] * 0.98, limit * 1.1, limit
        )  # 8 is no code
    assert (np.abs(values[0] - weight) <= limit).all()
    assert (values[0][3] == 0).all()
    assert ((values[1] - weight) ** 2).sum() <= ((values[0] - weight) ** 2).sum()


@pytest.mark.parametrize(
    ("options", "name"),
    [(["int4", "--group", "32"], "int4-g32"), pytest.param(["nvfp4"], "nvfp4", marks=pytest.mark.long)],
)
def test_a_converted_model_holds_what_rounding_gives(tmp_path, capsys, options, name):
    out = tmp_path / "out"
    assert main(["convert", str(SMALL), str(out), "--weights", *options]) == 0
    what, how = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"{out}: {SMALL} in {name}, not calibrated; [\d.]+ MB before, [\d.]+ MB now", what)
    assert f"atlas_jax.load('{out}')" in how
    report = inspect_model(out)
    assert report.calibrated is False and f"({name}), not calibrated" in report.text()
    assert report.refused == () and report.quantised == f"compressed-tensors ({name})" and report.unused == ()
    config = model_config(out)
    assert config == model_config(SMALL)
    got = load_params(out, config, dtype="bfloat16", layout="layers", recipe=recipe_in(out))["params"]
    want = load_params(SMALL, config, dtype="bfloat16", layout="layers")["params"]
    scheme = NVFP4 if name == "nvfp4" else Scheme("int4", 32)
    down = got["feed_forward"]["down"][2]
    expected = rounded(jnp.asarray(want["feed_forward"]["down"][2], jnp.float32).T, scheme)
    np.testing.assert_array_equal(down.codes, packed(expected, "bfloat16").codes)
    small = got["linear_attention"]["in_proj"][0].parts[1]
    np.testing.assert_array_equal(small, want["linear_attention"]["in_proj"][0][:, -small.shape[1] :])
    for leaf in ("embedding", "mtp"):
        jax.tree.map(np.testing.assert_array_equal, got[leaf], want[leaf])
    assert main(["convert", str(SMALL), str(out), "--weights", "int4"]) == 2  # it is there
    assert main(["convert", str(out), str(tmp_path / "again"), "--weights", "int4"]) == 2  # it is quantised
    assert main(["convert", str(SMALL), str(tmp_path / "a"), "--weights", "nvfp4", "--group", "32"]) == 2


def test_calibration_makes_products_err_less():
    rng = np.random.default_rng(0)
    K, N, scheme = 160, 32, Scheme("int4", 64)
    inputs = rng.normal(size=(1000, 40)) @ rng.normal(size=(40, K)) + 0.1 * rng.normal(size=(1000, K))
    weight = rng.normal(size=(N, K)).astype(np.float32)
    makes = (lambda: rounded(jnp.asarray(weight), scheme), lambda: calibrated(weight, scheme, inputs.T @ inputs / 1000))
    errors = [np.square(inputs @ (plain(packed(make(), "bfloat16"), K) - weight.T)).mean() for make in makes]
    assert errors[1] < 0.5 * errors[0]


@pytest.mark.long
def test_the_inputs_of_every_linear_layer_are_seen(tmp_path):
    texts = [np.arange(3, 60, dtype=np.int32)]
    seen = []
    convert(SMALL, tmp_path / "out", Scheme("int4", 32), texts=lambda: texts, calibrating=lambda *n: seen.append(n))
    assert inspect_model(tmp_path / "out").refused == () and inspect_model(tmp_path / "out").calibrated
    assert seen == [(0, 1), (1, 1)]
    config = model_config(SMALL)
    params = load_params(SMALL, config, dtype="float32", layout="layers")
    found = input_moments(config, params, texts)
    assert len(found) == 2 * config.num_layers + 2 * config.num_layers
    assert all(np.linalg.matrix_rank(x) > 10 for x in found.values())
    with pytest.raises(ConfigError, match="leave out --calibrate"):
        convert(SMALL, tmp_path / "other", NVFP4, texts=lambda: texts)


@pytest.mark.long
def test_a_model_writes_its_own_text():
    """Of chats where the model has a template, of nothing otherwise; no two alike."""
    for model in ("tiny-agent", str(SMALL)):
        texts = own_texts(model, count=3, tokens=20)
        assert [len(x) for x in texts] == [20] * 3 and len({x.tobytes() for x in texts}) == 3
        assert len({int(x[0]) for x in texts}) == (1 if model == "tiny-agent" else 3)


def test_nothing_is_written_or_loaded_for_a_target_that_is_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("atlas_jax.load", None, raising=False)
    (tmp_path / "file").touch()
    for texts in (["self"], [str(tmp_path / "none.jsonl")]):
        assert main(["convert", "tiny-agent", str(tmp_path), "--weights", "int4", "--calibrate", *texts]) == 2
        assert "is there already" in capsys.readouterr().err


def test_experts_in_one_tensor_are_written_one_by_one(tmp_path):
    config = json.loads((SMALL.parent / "parity_small" / "config.json").read_text())
    whole = dataclasses.replace(
        CONFIG, moe_intermediate_size=32, shared_expert_intermediate_size=64, linear_value_head_dim=16
    )  # inputs of whole groups
    fields = {
        k: v for k, v in dataclasses.asdict(whole).items() if k not in ("mtp_hidden", "eos_token_ids", "model_type")
    }
    text = fields | dict(model_type="qwen3_5_moe_text", num_hidden_layers=3, hidden_act="silu", rms_norm_eps=1e-6)
    text["layer_types"] = list(CONFIG.layer_types)
    text["rope_parameters"] = config["text_config"]["rope_parameters"] | {"partial_rotary_factor": 0.5}
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(text))
    save_file(random_tensors(model_config(source), True), source / "model.safetensors")
    convert(source, tmp_path / "out", Scheme("int4", 32), head=True)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1  # whoever may read one may read all
    assert "model.layers.1.mlp.experts.3.up_proj.weight_packed" in tensors and "lm_head.weight_packed" in tensors
    assert inspect_model(tmp_path / "out").refused == ()


def test_what_cannot_be_converted(tmp_path):
    with pytest.raises(ConfigError, match="leave out --head"):
        convert(SMALL, tmp_path / "out", NVFP4, head=True)
    with pytest.raises(CheckpointError, match="no such directory"):
        convert(tmp_path / "none", tmp_path / "out", NVFP4)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        convert(SMALL, tmp_path / "file" / "out", NVFP4)
    shutil.copyfile(SMALL / "config.json", tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        convert(tmp_path, tmp_path / "out", NVFP4)


def test_a_conversion_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(conversion, "save_file", full)
    for out in (tmp_path / "new", tmp_path / "empty"):
        if out.name == "empty":
            out.mkdir()
        with pytest.raises(CheckpointError, match=r"cannot be written.*No space left"):
            convert(SMALL, out, NVFP4)
        assert not out.exists()


def test_groups_must_divide_the_inputs(tmp_path):
    """Other readers of the format refuse such a checkpoint, so it is not written."""
    (tmp_path / "model").mkdir()
    config = json.loads((SMALL / "config.json").read_text())
    config["text_config"]["intermediate_size"] = 160
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    tensors = {name: x for file in SMALL.glob("model*.safetensors") for name, x in load_file(file).items()}
    for name, x in tensors.items():
        if name.endswith("down_proj.weight"):
            tensors[name] = np.ascontiguousarray(x[:, :160])
        elif name.endswith(("gate_proj.weight", "up_proj.weight")):
            tensors[name] = x[:160]
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"groups of 128 do not divide the inputs of .*down_proj.*160.*--group 32;?"):
        convert(tmp_path / "model", tmp_path / "out", Scheme("int4", 128))
    assert not (tmp_path / "out").exists()


LINES = [{"text": "words " * 40}, {"messages": [dict(role="user", content="Hi"), dict(role="assistant", content="Ho")]}]


def test_texts_to_calibrate_with(tmp_path):
    """Conversations are rendered as the model's own template does, with their tools or those given; long texts go first."""
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(map(json.dumps, [*LINES, LINES[1] | {"tools": TOOLS}])) + "\n\n")
    tokenizer = load_tokenizer(PACKAGED["tiny-agent"])
    assert tokenizer is not None

    def rendered(tools):
        return tokenizer.encode(render_chat(tokenizer, LINES[1]["messages"], tools=tools, add_generation_prompt=False))

    got = [x.tolist() for x in calibration_texts("tiny-agent", str(path))]
    assert sorted(map(len, got)) == sorted(map(len, [tokenizer.encode("words " * 40), rendered(None), rendered(TOOLS)]))
    assert rendered(None) in got and rendered(TOOLS) in got
    assert [x.tolist() for x in calibration_texts("tiny-agent", str(path), tools=TOOLS)].count(rendered(TOOLS)) == 2
    assert [x.tolist() for x in calibration_texts("tiny-agent", str(path), count=1, tokens=5)] == [
        tokenizer.encode("words " * 40)[-5:]
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "No such file"),
        ("", "no text in it"),
        ("{", "line 1"),
        ('{"text": "a"}\n[1]', "line 2: an object with messages (a list) or with a text"),
        ('{"text": 5}', "line 1"),
        ('{"messages": [{"role": "nobody", "content": "a"}]}', "line 1"),
        ('{"messages": 7}', "line 1"),
        ("\udcff", "not text in UTF-8"),
    ],
)
def test_damaged_texts_to_calibrate_with(tmp_path, capsys, text, says):
    path = tmp_path / "texts.jsonl"
    if text is not None:
        path.write_bytes(text.encode(errors="surrogateescape"))
    assert main(["convert", "tiny-agent", str(tmp_path / "out"), "--weights", "int4", "--calibrate", str(path)]) == 2
    err = capsys.readouterr().err
    assert says in err and "texts.jsonl" in err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--weights int4 --group 48", "choose from"),
        ("--weights fp8", "choose from"),
        ("--group 32", "--weights"),
        ("--weights nvfp4 --group 32", "leave out --group"),
        ("--weights nvfp4 --calibrate x", "--calibrate is for int4"),
        ("--weights int4 --tools x", "add --calibrate"),
        ("--weights int4 --tools x --calibrate self", "add --calibrate"),
        ("--weights nvfp4 --calibrate self", "--calibrate is for int4"),
        ("--weights int4 --search --calibrate x", "leave out --search"),
    ],
)
def test_arguments_of_convert(tmp_path, capsys, options, says):
    assert main(["convert", "tiny-agent", str(tmp_path / "out"), *options.split()]) == 2
    assert says in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_draft_heads():
    config = dataclasses.replace(CONFIG, vocab_size=64, eos_token_ids=(60,))
    head = jnp.asarray(np.random.default_rng(0).normal(size=(32, 64)), jnp.float32)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, 32)), jnp.float32)
    params = {"params": {"head": head}}
    assert with_draft_head(config, RunConfig(), params) is params
    for kind, size in (("int4", None), ("exact", 20), ("int4", 20)):
        run = RunConfig(draft_head=kind, draft_vocabulary=size)  # pyright: ignore[reportArgumentType]
        made = with_draft_head(config, run, params)["params"]
        assert made["head"] is head
        logits = np.asarray(draft_logits(made["draft_head"], x, 64))
        known = [*range(size or 64), *([60] if size else [])]
        exact = np.asarray(x @ head)
        np.testing.assert_allclose(logits[:, known], exact[:, known], atol=1.5 if kind == "int4" else 1e-5)
        assert np.isinf(np.delete(logits, known, axis=1)).all()
    with pytest.raises(ConfigError, match=r"no mtp\.\*"):
        with_draft_head(dataclasses.replace(config, mtp_num_hidden_layers=0), RunConfig(draft_head="int4"), params)
    for size in (64, 1000):
        with pytest.raises(ConfigError, match="leaves nothing out: this model has 64"):
            with_draft_head(config, RunConfig(draft_vocabulary=size), params)
    with pytest.raises(ConfigError, match="draft_vocabulary must be at least 1"):
        RunConfig(draft_vocabulary=0)
