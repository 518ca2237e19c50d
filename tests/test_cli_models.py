"""The command line over real models: the packaged one answers, and damaged copies of it are refused in one line."""

import functools
import json
import pathlib
import shutil
import struct

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import atlas_jax
import atlas_jax.runtime
from atlas_jax import cli
from atlas_jax.weights.presets import PACKAGED

PACKAGE = PACKAGED["tiny-agent"]
WEIGHTS = "model.safetensors"

pytestmark = pytest.mark.skipif(not (PACKAGE / WEIGHTS).exists(), reason="the packaged weights are not there")


@pytest.fixture
def run(capsys):
    def run(*argv: str) -> tuple[int, str, str]:
        code = cli.main(argv)
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def refused(run):
    """Runs a command that must end with exit code 2, nothing on stdout, and one line that says all of `says`."""

    def refused(*argv: str, says: tuple[str, ...]) -> None:
        code, out, err = run(*argv)
        assert (code, out) == (2, "")
        assert err.startswith("atlas-jax: ") and err.count("\n") == 1
        for text in says:
            assert text in err

    return refused


# ---- answers


@functools.cache
def runtime():
    return atlas_jax.runtime.load("tiny-agent", max_length=256)


@pytest.fixture
def loaded_once(monkeypatch):
    """All commands of this part share one runtime, and so what it has compiled."""
    monkeypatch.setitem(vars(atlas_jax), "load", lambda model, **options: runtime())


@pytest.fixture(scope="module")
def messages(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("chat") / "messages.json"
    path.write_text(json.dumps([dict(role="user", content="Hello! I want to cancel my reservation Q7RW2K.")]))
    return str(path)


@pytest.mark.slow
def test_streamed_text_json_and_plain_decoding_agree(run, messages, loaded_once):
    asked = ("generate", "tiny-agent", "--messages", messages, "--max-tokens", "24")
    code, out, err = run(*asked, "--json")
    assert (code, err) == (0, "")
    got = json.loads(out)
    assert set(got) >= {"token_ids", "text", "finish_reason", "acceptance", "timings"}
    assert set(got["timings"]) == {"compile_s", "ttft_ms", "tpot_ms", "tokens_per_s", "queue_ms"}
    acceptance = got["acceptance"]
    assert acceptance["drafted"] > 0 and len(acceptance["positions"]) == 3
    # Every verify emits its own token and the drafts it accepts.
    assert len(got["token_ids"]) == acceptance["emitted"] == acceptance["steps"] + acceptance["accepted"]

    assert run(*asked) == (0, got["text"] + "\n", "")
    plain = json.loads(run(*asked, "--json", "--drafter", "none")[1])
    assert plain["token_ids"] == got["token_ids"] and plain["acceptance"]["drafted"] == 0


@pytest.mark.slow
def test_a_stop_string_cuts_text_and_tokens(run, messages, loaded_once):
    asked = ("generate", "tiny-agent", "--messages", messages, "--max-tokens", "24", "--json")
    whole = json.loads(run(*asked)[1])
    stop = whole["text"][8:11]
    code, out, _ = run(*asked, "--stop", stop)
    cut = json.loads(out)
    assert code == 0 and cut["finish_reason"] == "stop"
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])]
    assert len(cut["token_ids"]) < len(whole["token_ids"])


@pytest.mark.slow
def test_a_seed_repeats_a_sample_with_or_without_speculation(run, messages, loaded_once):
    asked = ("generate", "tiny-agent", "--messages", messages, "--max-tokens", "24", "--json")
    sampled = ("--temperature", "1.5", "--top-p", "0.95", "--presence-penalty", "0.5")
    ids = [
        json.loads(run(*asked, *sampled, "--seed", seed, "--drafter", drafter)[1])["token_ids"]
        for seed, drafter in (("1", "mtp"), ("1", "none"), ("2", "mtp"))
    ]
    assert ids[0] == ids[1] != ids[2]


def test_inspect_describes_the_model(run):
    code, out, _ = run("inspect", "tiny-agent")
    assert code == 0 and "qwen3_5" in out
    assert json.loads(run("inspect", "tiny-agent", "--json")[1])


# ---- requests that cannot work


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--prompt", ""], ("prompt is empty",)),
        (["--prompt-ids", ""], ("prompt is empty",)),
        (["--prompt-ids", "5 8192"], ("0 … 8191", "8192")),
        (["--prompt-ids", "-1"], ("0 … 8191", "-1")),
        (["--prompt-ids", "1 " * 300, "--max-length", "256"], ("300 tokens", "256", "max_length")),
        (["--prompt", "a", "--max-tokens", "300", "--max-length", "256"], ("300", "256")),
        (["--prompt", "a", "--max-length", "1000000"], ("max_length", "16384")),
        (["--prompt", "a", "--max-length", "0"], ("max_length",)),
        (["--prompt", "a", "--drafter", "oracle"], ("oracle", "none", "mtp")),
        (["--prompt", "a", "--stop-token-ids", "8192"], ("stop_token_ids", "8191")),
    ],
)
def test_requests_that_cannot_work(argv, says, refused):
    refused("generate", "tiny-agent", *argv, says=says)


def test_roles_that_the_template_does_not_know(refused, tmp_path):
    (tmp_path / "m.json").write_text(json.dumps([dict(role="oracle", content="x"), dict(role="user", content="x")]))
    refused("generate", "tiny-agent", "--messages", str(tmp_path / "m.json"), says=("role", "oracle", "assistant"))


# ---- checkpoints that cannot work


@pytest.fixture
def copy(tmp_path) -> pathlib.Path:
    """A copy of the packaged model, without its weights."""
    return pathlib.Path(shutil.copytree(PACKAGE, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")))


def asked(directory: pathlib.Path, *argv: str) -> tuple[str, ...]:
    return ("generate", str(directory), "--prompt", "a", *argv)


def config(directory: pathlib.Path, **changes) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def tensors() -> dict[str, np.ndarray]:
    return load_file(PACKAGE / WEIGHTS)


def test_paths_that_hold_no_model(refused, tmp_path, copy):
    refused("generate", "no-such-model", "--prompt", "a", says=("no-such-model", "tiny-agent"))
    refused("inspect", "no-such-model", says=("no-such-model",))
    refused(*asked(tmp_path), says=("config.json",))
    refused(*asked(copy), says=(WEIGHTS,))


def test_an_unknown_model_type(refused, copy):
    config(copy, model_type="llama")
    refused(*asked(copy), says=("llama", "qwen3_5"))


def test_missing_and_extra_tensors_are_named(refused, copy):
    some = tensors()
    name = next(name for name in some if "layers.3" in name)
    some["model.surprise.weight"] = some.pop(name)
    save_file(some, copy / WEIGHTS)
    refused(*asked(copy), says=(name, "model.surprise.weight"))


def test_a_wrong_shape_is_named(refused, copy):
    some = tensors()
    name = next(name for name, x in some.items() if x.ndim == 2 and "layers.3" in name)
    some[name] = np.ascontiguousarray(some[name][:-1])
    save_file(some, copy / WEIGHTS)
    refused(*asked(copy), says=(name,))


def test_mtp_without_its_tensors(refused, run, copy):
    save_file({name: x for name, x in tensors().items() if not name.startswith("mtp.")}, copy / WEIGHTS)
    refused(*asked(copy), says=("mtp.",))  # the configuration promises them
    config(copy, mtp_num_hidden_layers=0)
    refused(*asked(copy, "--drafter", "mtp"), says=("mtp.*", "drafter"))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 10**6) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 5) + b"{\xff\xff\xff}",
        struct.pack("<Q", 60) + b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,1000000]}}',
        struct.pack("<Q", 56) + b'{"a":{"dtype":"F32","shape":[-4],"data_offsets":[0,16]}}',
    ],
    ids=["empty", "short", "huge", "beyond", "list", "bytes", "offsets", "negative"],
)
def test_malicious_headers(data, refused, copy):
    (copy / WEIGHTS).write_bytes(data)
    refused(*asked(copy), says=(WEIGHTS,))


def test_a_truncated_file(refused, copy):
    data = (PACKAGE / WEIGHTS).read_bytes()
    (copy / WEIGHTS).write_bytes(data[: len(data) // 2])
    refused(*asked(copy), says=(WEIGHTS,))


def test_the_packaged_weights_hold_the_drafter():
    with safe_open(PACKAGE / WEIGHTS, "np") as file:
        assert any(name.startswith("mtp.") for name in file.keys())  # noqa: SIM118  # not a mapping
