"""The command line over a stand-in runtime: arguments, streams, exit codes. tests/test_cli_models.py has real ones."""

import json
import os
import pathlib
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from fake_runtime import FakeRuntime

HERE = pathlib.Path(__file__).resolve().parent


@pytest.fixture
def fake(monkeypatch):
    import atlas_jax

    runtime = FakeRuntime()
    monkeypatch.setitem(vars(atlas_jax), "load", runtime.load)  # without importing the real one
    return runtime


@pytest.fixture
def run(capsys):
    from atlas_jax import cli

    def run(*argv: str) -> tuple[int, str, str]:
        code = cli.main(argv)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def answer(*argv: str) -> list[str]:
    return ["generate", "m", *argv]


# ---- what is asked and what is printed


def test_generate_streams_text(fake, run):
    code, out, err = run(*answer("--prompt", "Hi"))
    assert (code, out, err) == (0, "Hello, wörld!\x1b[31m\n", "")
    assert fake.asked == [("Hi", dict(max_tokens=128))]
    assert fake.loaded[0] == "m"


def test_generate_prints_one_json_object(fake, run):
    code, out, _ = run(*answer("--prompt-ids", "1 2,3", "--json", "--logprobs", "--top-logprobs", "2"))
    assert code == 0 and out.count("\n") == 1
    assert out.isascii()
    got = json.loads(out)
    assert got["token_ids"] == [1, 2, 3] and got["acceptance"]["positions"][0]["unconditional"] == 1.0
    assert set(got) == {"token_ids", "text", "finish_reason", "acceptance", "timings"}
    assert fake.asked == [([1, 2, 3], dict(max_tokens=128, logprobs=True, top_logprobs=2))]


def test_every_option_reaches_the_runtime(fake, run, tmp_path):
    messages, tools = [dict(role="user", content="é")], [dict(type="function", function=dict(name="f"))]
    (tmp_path / "m.json").write_text(json.dumps(messages))
    (tmp_path / "t.json").write_text(json.dumps(tools))
    line = (
        f"--messages {tmp_path}/m.json --tools {tmp_path}/t.json --thinking --max-tokens 5 --drafter lookup --drafts 9 "
        "--temperature 0.5 --top-k 4 --top-p 0.9 --min-p 0.1 --presence-penalty 1 --frequency-penalty -1 "
        "--repetition-penalty 1.1 --seed 7 --stop a --stop b --ignore-eos --dtype bfloat16 --max-length 99"
    )
    assert run(*answer(*line.split(), "--stop-token-ids", "4 5"))[0] == 0
    assert fake.asked == [
        (
            messages,
            dict(
                tools=tools, enable_thinking=True, max_tokens=5, drafter="lookup", drafts=9, temperature=0.5, top_k=4,
                top_p=0.9, min_p=0.1, presence_penalty=1.0, frequency_penalty=-1.0, repetition_penalty=1.1, seed=7,
                stop=("a", "b"), stop_token_ids=(4, 5), ignore_eos=True,
            ),
        )
    ]  # fmt: skip
    options = fake.loaded[1]
    assert (options["dtype"], options["max_length"], options["max_drafts"]) == ("bfloat16", 99, 9)


def test_ids_are_shown_where_there_is_no_tokenizer(fake, run):
    fake.tokenizer = None
    assert run(*answer("--prompt-ids", "1"))[1] == "0 1 2 3 \n"
    code, _, err = run("chat", "m")
    assert code == 2 and "tokenizer" in err


def test_chat_remembers_the_conversation(fake, run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False, readline=iter(
        ["one\n", "\n", "two\n", "/new\n", "three\n", ""]).__next__))  # fmt: skip
    code, out, _ = run("chat", "m", "--system", "Be brief.")
    assert code == 0 and out.count("Hello") == 3
    system, reply = dict(role="system", content="Be brief."), dict(role="assistant", content="".join(fake.words))
    user = lambda text: dict(role="user", content=text)  # noqa: E731
    assert [prompt for prompt, _ in fake.asked] == [
        [system, user("one")],
        [system, user("one"), reply, user("two")],
        [system, user("three")],
    ]


def test_what_carries_over_is_a_setting(fake, run, monkeypatch):
    settings = ("drafter_context", "refeed", "prefix_cache")
    assert run(*answer("--prompt", "Hi"))[0] == 0
    assert not set(settings) & set(fake.loaded[1])
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False, readline=iter(["one\n", ""]).__next__))
    assert run("chat", "m", "--drafter-context", "blind", "--no-refeed", "--no-prefix-cache")[0] == 0
    assert [fake.loaded[1][name] for name in settings] == ["blind", False, False]


def test_how_a_served_model_is_run(fake):
    from atlas_jax import cli
    from atlas_jax.terminal import Progress

    line = "--http :0 --max-drafts 12 --prefill-chunk 512 --kv-pages 40 --host-snapshot-bytes 1000000"
    cli.load(cli.parser().parse_args(["serve", "m", *line.split()]), Progress())
    want = dict(max_drafts=12, prefill_chunk=512, kv_pages=40, host_snapshot_bytes=1000000)
    assert {name: fake.loaded[1][name] for name in want} == want
    cli.load(cli.parser().parse_args(["serve", "m", "--http", ":0", "--drafts", "9"]), Progress())
    assert fake.loaded[1]["max_drafts"] == 9 and not {*want} & {*fake.loaded[1]} - {"max_drafts"}


def test_heads_to_draft_with(fake, run):
    """Of every command that loads a model which drafts."""
    line = "--draft-head int4 --draft-vocabulary 99".split()
    assert run(*answer("--prompt", "Hi", *line))[0] == 0
    assert (fake.loaded[1]["draft_head"], fake.loaded[1]["draft_vocabulary"]) == ("int4", 99)
    for command in (["chat"], ["serve"], ["bench", "verify-cost"]):
        from atlas_jax import cli, draft_head_options

        args = cli.parser().parse_args([*command, "m", *line])
        assert draft_head_options.given(args) == dict(draft_head="int4", draft_vocabulary=99)
    for drafter in ("none", "lookup"):
        code, out, err = run(*answer("--prompt", "Hi", "--drafter", drafter, "--draft-vocabulary", "99"))
        assert (code, out) == (2, "") and "--draft-vocabulary" in err and drafter in err
    assert run(*answer("--prompt", "Hi", "--draft-head", "int8"))[0] == 2


def test_demo_compares_both_ways(fake, run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    code, out, _ = run("demo")
    assert code == 0
    assert fake.loaded[0] == "tiny-agent" and fake.loaded[1]["max_drafts"] == 3
    assert [o["drafter"] for _, o in fake.asked] == ["mtp", "none"] * 3
    assert all(o["tools"][0]["type"] == "function" for _, o in fake.asked)
    for text in ("Hello, wörld!", "unconditional", "no speculation", "times as fast, the same tokens"):
        assert text in out


def test_demo_fails_where_speculation_changes_tokens(fake, run, monkeypatch):
    plain = fake.completion()
    plain.token_ids = [1, 2, 4]
    monkeypatch.setattr(fake, "generate", lambda *a, **k: plain)
    code, out, err = run("demo")
    assert code == 1 and "speculation changed" in err and "DIFFERENT" in out


def test_an_answer_that_broke_off_is_an_error(fake, run):
    fake.finish_reason = "error"
    code, out, err = run(*answer("--prompt", "x", "--json"))
    assert code == 1 and json.loads(out)["finish_reason"] == "error" and "not finite" in err


# ---- bad input


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["generate", "m"], "--prompt"),
        (answer("--prompt", "a", "--prompt-ids", "1"), "not allowed with"),
        (answer("--prompt", "a", "--max-tokens", "many"), "--max-tokens: invalid int value: 'many'"),
        (answer("--prompt", "a", "--max-tokens", "0"), "max_tokens must be an integer in 1"),
        (answer("--prompt", "a", "--temperature", "nan"), "temperature must be a number in 0 … 100, got nan"),
        (answer("--prompt", "a", "--temperature", "-1"), "temperature"),
        (answer("--prompt", "a", "--top-p", "0"), "top_p must be above 0"),
        (answer("--prompt", "a", "--seed", "-1"), "seed"),
        (answer("--prompt", "a", "--drafts", "-1"), "drafts must be an integer in 0 … 31, got -1"),
        (answer("--prompt", "a", "--drafts", "1000000000"), "drafts"),
        (answer("--prompt", "a", "--drafter", "none", "--drafts", "3"), "'none' drafts nothing, and 3 drafts were"),
        (answer("--prompt", "a", "--dtype", "int8"), "invalid choice: 'int8'"),
        (answer("--prompt", "a", "--drafter-context", "carry"), "invalid choice: 'carry'"),
        (answer("--prompt", "a", "--stop", ""), "stop must hold strings of 1"),
        (answer("--prompt", "a", "--logprobs"), "--json"),
        (answer("--prompt", "a", "--json", "--top-logprobs", "21"), "top_logprobs must be an integer in 0 … 20"),
        (answer("--prompt", "a", "--thinking"), "--messages"),
        (answer("--prompt-ids", "1 x"), "--prompt-ids must be integers"),
        (answer("--prompt-ids", "1.5"), "--prompt-ids must be integers"),
        (answer("--prompt", "a", "--stop-token-ids", "-4"), "stop_token_ids"),
        (answer("--messages", "nowhere.json"), "nowhere.json: No such file"),
        (answer("--messages", "/"), "Is a directory"),
        (answer("--prompt", "\udce9"), "UTF-8"),
        (["generate", "missing", "--prompt", "a"], "no model 'missing'. Tried a directory"),
        (answer("--prompt", "a", "--frobnicate"), "unrecognized arguments: --frobnicate"),
    ],
)
def test_bad_input_is_answered_in_one_line(argv, says, fake, run):
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert err.startswith("atlas-jax: ") and err.count("\n") == 1 and says in err
    assert not fake.asked


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"role": "user"}', "JSON list"),
        (b"[]", "JSON list"),
        (b'["hi"]', "JSON list"),
        (b'[{"content": "no role"}]', "'role'"),
        (b'[{"role": "user", "content": "\\ud800"}]', "UTF-8"),
    ],
    ids=range(9),
)
def test_bad_message_files(content, says, fake, run, tmp_path):
    path = tmp_path / "messages.json"
    path.write_bytes(content)
    code, _, err = run(*answer("--messages", str(path)))
    assert code == 2 and err.count("\n") == 1 and says in err


# ---- processes


def process(script: str, **options: Any) -> subprocess.Popen:
    env = os.environ | dict(PYTHONPATH=os.pathsep.join([str(HERE), str(HERE.parent)]), PYTHONDONTWRITEBYTECODE="1")
    return subprocess.Popen([sys.executable, "-c", script], env=env, text=True, **options)


# Python leaves SIGINT alone where it begins with one ignored, as in a shell's background.
FAKED = """
import signal, sys, atlas_jax, fake_runtime
from atlas_jax import cli
signal.signal(signal.SIGINT, signal.default_int_handler)
atlas_jax.load = fake_runtime.FakeRuntime(pause_s={pause}, repeat=10_000).load
sys.argv[1:] = ["generate", "m", "--prompt", "x"]
sys.exit(cli.main())
"""


@pytest.mark.parametrize("argv", [["--help"], ["generate", "--help"], ["demo", "-h"], ["generate", "m", "--seed", "x"]])
def test_help_and_wrong_arguments_do_not_import_jax(argv):
    script = f"""
import sys
from atlas_jax import cli
try:
    code = cli.main({argv!r})
except SystemExit as end:
    code = end.code
assert not {{"jax", "flax", "rich", "numpy"}} & set(sys.modules), sorted(sys.modules)
sys.exit(code)
"""
    child = process(script, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = child.communicate(timeout=60)
    assert child.returncode == (2 if "x" in argv else 0), err
    assert out.startswith("usage") != ("x" in argv)


def test_ctrl_c_exits_with_130_and_without_a_traceback():
    child = process(FAKED.format(pause=0.05), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.read(5) == "Hello"
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (130, "")


def test_a_closed_stdout_ends_quietly():
    child = process(FAKED.format(pause=0), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stderr is not None
    assert child.stdout.read(5) == "Hello"
    child.stdout.close()
    assert child.wait(timeout=60) == 0
    assert child.stderr.read() == ""
    child.stderr.close()


def test_a_terminal_gets_no_control_characters(fake, run, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run(*answer("--prompt", "x"))[1] == "Hello, wörld!\N{REPLACEMENT CHARACTER}[31m\n"


def test_progress_is_shown_on_a_terminal_and_gone_before_the_answer(fake, run, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    code, out, err = run(*answer("--prompt", "x"))
    assert code == 0 and out == "Hello, wörld!\x1b[31m\n"
    assert "loading" in err and "compiling decode rows=4" in err
    assert err.rstrip().endswith("100.0 tokens/s; 6 tokens in 3 steps (2.00 a step), 5 of 5 drafts accepted]")
