"""Experiments: what is played, what is compared, and how sure the comparison is."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import json
import xml.etree.ElementTree
from types import SimpleNamespace
from typing import Any

import jaxtyping
import numpy as np
import pytest
from models import CONFIGS, RUN, params_of
from rich.console import Console

import atlas_jax
from atlas_jax.cli import main, parser
from atlas_jax.config import FULL, LINEAR, Probes
from atlas_jax.decode.oracle import OracleChain
from atlas_jax.errors import RequestError
from atlas_jax.experiment.arms import ARMS, parse_arms
from atlas_jax.experiment.charts import line_chart
from atlas_jax.experiment.command import DEFAULT_ARMS
from atlas_jax.experiment.conversations import HELD_OUT, HELD_OUT_TOOLS, read_conversations
from atlas_jax.experiment.figures import difference, figures
from atlas_jax.experiment.play import Played, play
from atlas_jax.experiment.report import first_difference, show, to_dict, write
from atlas_jax.metrics import Acceptance, Event, Source
from bench import agentic

# ---- conversations and playing them


def say(role: str, content: str) -> dict[str, Any]:
    return dict(role=role, content=content)


MESSAGES = [say("system", "Be brief."), say("user", "Hi"), say("assistant", "Hello!"), say("user", "Bags?"),
            say("assistant", "Two."), say("user", "Thanks")]  # fmt: skip


def file_of(folder: Any, *rows: Any) -> Any:
    path = folder / "conversations.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_conversations_are_cut_where_the_assistant_speaks(tmp_path):
    tools = [dict(name="f")]
    path = file_of(tmp_path, dict(id="a", messages=MESSAGES), dict(messages=MESSAGES[:3], tools=tools))
    one, two = read_conversations(path)
    assert (one.name, two.name, one.tools, two.tools) == ("a", "2", None, tools)
    assert [(t.number, len(t.messages), t.recorded["content"]) for t in one.turns] == [(1, 2, "Hello!"), (2, 4, "Two.")]
    assert read_conversations(path, [dict(name="g")])[0].tools == [dict(name="g")]
    for rows, says in (
        ([[]], "line 1"),
        ([dict(messages=[])], "line 1"),
        ([dict(messages=MESSAGES[:2])], "nothing to play"),
        ([dict(messages=MESSAGES), dict(messages=MESSAGES, tools="f")], "line 2: tools must be a list"),
        ([dict(messages=MESSAGES, tools=[1])], r"line 1: tools\[0\] must be an object"),
    ):
        with pytest.raises(RequestError, match=says):
            read_conversations(file_of(tmp_path, *rows))
    with pytest.raises(RequestError, match="No such file"):
        read_conversations(tmp_path / "missing.jsonl")


def test_fifteen_conversations_are_in_the_package():
    conversations = read_conversations(HELD_OUT, json.loads(HELD_OUT_TOOLS.read_text()))
    assert len({c.name for c in conversations}) == 15
    assert sum(len(c.turns) for c in conversations) == 187 and all(c.tools for c in conversations)


class Echo:
    """A runtime that answers with the number of messages it was given."""

    run = SimpleNamespace(max_length=40)

    def __init__(self) -> None:
        self.asked: list[list[dict[str, Any]]] = []

    def encode(self, messages: Any, tools: Any = None) -> Any:
        return np.zeros(5 * len(messages), np.int32)

    def generate(self, messages: Any, **options: Any) -> Any:
        self.asked.append([*messages])
        n = len(messages)
        return SimpleNamespace(
            token_ids=[n, n], text=f"answer {n}", finish_reason="stop", acceptance=Acceptance.zero(), restored=5 * n - 10,
            timings=SimpleNamespace(compile_s=0.0, ttft_ms=1.0, tpot_ms=2.0), fingerprints=None,
        )  # fmt: skip


@pytest.fixture
def unchecked():
    """A stand-in is of another type than what it stands for."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.long
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("history", ["recorded", "own"])
def test_play_keeps_the_recorded_or_the_own_answers(tmp_path, history):
    longer = [*MESSAGES, say("assistant", "Bye."), say("user", "?"), say("assistant", "!")]
    (conversation,) = read_conversations(file_of(tmp_path, dict(messages=longer)))
    fake: Any = Echo()
    turns = list(play(fake, conversation, max_tokens=10, history=history))
    assert [p.turn for p in turns] == [1, 2, 3]  # for the fourth there is no room
    assert [(p.prompt, p.cached, p.replayed, p.warm) for p in turns][:2] == [(10, 0, 10, False), (20, 10, 10, True)]
    said = [m["content"] for m in fake.asked[-1]]
    middle = ["Hello!", "Two."] if history == "recorded" else ["answer 2", "answer 4"]
    assert said == ["Be brief.", "Hi", middle[0], "Bags?", middle[1], "Thanks"]


# ---- arms


def test_arms_are_known_and_do_not_contradict_themselves():
    both = parse_arms("full,blind+shifted+pre_norm")[1]
    assert both.run == dict(drafter_context="blind", probes=Probes(shift=1)) and both.config == dict(
        mtp_hidden="pre_norm"
    )
    assert [arm.name for arm in parse_arms(DEFAULT_ARMS)] == DEFAULT_ARMS.split(",")
    assert parse_arms("oracle")[0].scripted and not ARMS["full"].scripted
    for text, says in (
        ("full,deaf", "unknown arm 'deaf'; there are full,"),
        ("full,blind,full", "full is named twice"),
        ("blind+prefill_only", "sets drafter_context twice"),
        ("shifted+checked", "sets probes twice"),
        ("oracle+oracle", "sets the drafter twice"),
        ("", "unknown arm ''"),
    ):
        with pytest.raises(RequestError, match=says):
            parse_arms(text)


# ---- figures


def played(
    conversation: str, turn: int, hits: int, trials: int, tokens: tuple[int, ...] = (1, 2, 3), cached: int = 0
) -> Played:
    acceptance = Acceptance.zero(2)
    acceptance.counts[0, Source.MTP, : Event.ROUNDS, 0] = [trials, hits, trials, hits]
    acceptance.counts[0, Source.MTP, Event.ROUNDS, 1:3] = [trials - hits, hits]
    return Played(conversation, turn, 10, cached, tokens, "stop", acceptance, 5.0 + turn, 2.0, 0.5)


def test_figures_are_quotients_of_sums():
    f = figures([played("a", 1, 3, 4), played("a", 2, 1, 6, tokens=(1,))])
    assert (f["turns"], f["n"], f["tokens"], f["p1"], f["p2_uncond"], f["p2_cond"]) == (2, 10, 4, 0.4, None, None)
    assert f["tokens_per_round"] == 1.4 and f["ttft_ms"]["p50"] == 6.5 and f["mean"] == dict(ttft_ms=6.5, tpot_ms=2.0)
    assert figures([])["p1"] is None
    json.dumps(f, allow_nan=False)


def test_a_difference_and_its_standard_deviation():
    """With as many rounds in each conversation, the jackknife is the standard error of the mean of paired differences."""
    rng = np.random.default_rng(0)
    hits = rng.integers(0, 50, (2, 12))
    sides = [[played(str(c), 1, int(h), 50) for c, h in enumerate(row)] for row in hits]
    found = difference(sides[0], sides[1], "p1")
    per_conversation = (hits[0] - hits[1]) / 50
    assert found is not None and found.sd is not None and found.sds is not None
    np.testing.assert_allclose(found.value, per_conversation.mean())
    np.testing.assert_allclose(found.sd, per_conversation.std(ddof=1) / np.sqrt(12))
    np.testing.assert_allclose(found.sds, found.value / found.sd)
    alone = difference(sides[0][:1], sides[1][:1], "p1")
    assert alone is not None and alone.sd is None and alone.sds is None
    same = difference(sides[0], sides[0], "p1")
    assert same is not None and (same.value, same.sds) == (0, None)
    assert difference(sides[0], [], "p1") is None and difference(sides[0], sides[1], "p2_cond") is None


def test_the_standard_deviation_is_about_right():
    """Two arms without a difference, 200 times: the difference exceeds two standard deviations about as often as it should."""
    rng = np.random.default_rng(1)
    far = 0
    for _ in range(200):
        rates = rng.beta(8, 4, 15)  # conversations differ from each other
        sides = [[played(str(c), 1, int(rng.binomial(30, p)), 30) for c, p in enumerate(rates)] for _ in range(2)]
        found = difference(sides[0], sides[1], "p1")
        assert found is not None and found.sds is not None
        far += abs(found.sds) > 2
    assert 0.02 < far / 200 < 0.11  # 0.065 for Student's t with 14 degrees of freedom


# ---- reports


def test_charts_are_xml_and_within_their_frame():
    series: Any = {"a<b": [(1, 0.5, 0.4, 0.6), (2, 0.25, 0.1, 0.4)], "c": [(1, 1.0, 0.9, 1.0)], "empty": []}
    for text in (
        line_chart("Rates & more", "draft", "rate", series, whole=True),
        line_chart("ms", "turn", "ms", {"x": [(1, 3.25), (40, 17.0)]}, whole=False),
        line_chart("none", "turn", "ms", {}, whole=False),
        line_chart("zero", "turn", "ms", {"x": [(3, 0.0)]}, whole=False),
    ):
        root = xml.etree.ElementTree.fromstring(text)
        for circle in root.iter("{http://www.w3.org/2000/svg}circle"):
            assert 0 <= float(circle.get("cx", "")) <= 720 and 0 <= float(circle.get("cy", "")) <= 400
    assert "a&lt;b" in line_chart("", "", "", series, whole=True)


def test_reports_hold_what_was_found(tmp_path):
    results = {
        "full": [played("a", 1, 3, 4), played("a", 2, 3, 4, cached=8), played("b", 1, 4, 4)],
        "blind": [played("a", 1, 1, 4), played("a", 2, 2, 4, cached=8), played("b", 1, 3, 4)],
    }
    assert first_difference(results) is None
    found = to_dict(results, dict(setting={}))
    assert found["all"]["blind"]["differences"]["p1"]["value"] == pytest.approx(-4 / 12)
    assert found["warm"]["full"]["turns"] == 1 and found["all"]["full"]["by_turn"]["p1"] == [(1, 7 / 8), (2, 3 / 4)]
    names = {path.name for path in write(tmp_path / "new" / "folder", results, found)}
    assert names == {
        "experiment.json", "turns.csv", "acceptance_unconditional.svg", "acceptance_conditional.svg", "acceptance_by_turn.svg",
        "tpot_by_turn.svg",
    }  # fmt: skip
    rows = list(csv.DictReader(io.StringIO((tmp_path / "new" / "folder" / "turns.csv").read_text())))
    assert (
        len(rows) == 6
        and rows[3] | dict(arm="blind", conversation="a", matched_1="1", offered_1="4", rounds="4") == rows[3]
    )
    assert json.loads((tmp_path / "new" / "folder" / "experiment.json").read_text())["reference"] == "full"
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(show(found))
    text = console.export_text()
    assert "All turns less full" in text and "Warm turns" in text and "-0.333" in text
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="file"):
        write(tmp_path / "file" / "below", results, found)


def test_a_changed_answer_is_found():
    results = {"full": [played("a", 1, 1, 2)], "odd": [played("a", 1, 1, 2, tokens=(1, 2, 4))]}
    assert first_difference(results) == "arm odd answered turn 1 of a differently from full, from token 2 on"


# ---- all of it, on a small random model that talks


@pytest.fixture(scope="module")
def talking():
    from atlas_jax.experiment.conversations import DATA
    from atlas_jax.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(DATA / "tiny_agent")
    config = dataclasses.replace(CONFIGS["dense"], layer_types=(LINEAR, FULL), vocab_size=8192)
    run = dataclasses.replace(RUN, slots=1, max_length=192, max_drafts=3)
    return atlas_jax.Runtime(config, run, params_of(config, run), tokenizer)


@pytest.mark.long
def test_the_experiment_plays_every_arm_and_asserts_that_they_answer_alike(tmp_path, monkeypatch, capsys, talking):
    path = file_of(tmp_path, dict(id="a", messages=MESSAGES), dict(id="b", messages=MESSAGES[:3]))
    monkeypatch.setattr(atlas_jax, "load", lambda *args, **options: talking)
    arms = "full,oracle"
    command = ["experiment", "drafter-context", "--conversations", str(path), "--arms", arms, "--max-tokens", "9"]
    assert main([*command, "--max-length", "192", "--json", "--out", str(tmp_path / "out")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["all"]) == arms.split(",") and found["conversations"] == 2
    for arm in found["all"].values():
        assert arm["turns"] == 3 and arm["tokens"] == found["all"]["full"]["tokens"]
    assert (tmp_path / "out" / "turns.csv").exists()


def test_wrong_arguments_are_refused_before_a_model_is_loaded(tmp_path, capsys):
    path = str(file_of(tmp_path, dict(messages=MESSAGES)))
    for arguments, says in (
        (["--arms", "oracle,full"], "name another first"),
        (["--arms", "deaf"], "unknown arm"),
        (["--limit", "0"], "--limit must be 1 or more"),
        (["--conversations", str(tmp_path)], "directory"),
        (["--conversations", ""], "directory"),
        (["--drafts", "32"], "--drafts must lie in 1 … 31"),
        (["--out", f"{path}/results"], "Not a directory"),
    ):
        given = [] if "--conversations" in arguments else ["--conversations", path]
        assert main(["experiment", "drafter-context", *given, *arguments]) == 2
        assert says in capsys.readouterr().err
    assert isinstance(parser().parse_args(["experiment", "drafter-context"]), argparse.Namespace)


def test_the_oracle_says_what_it_needs(talking):
    for draft in (1, 0, True):
        with pytest.raises(RequestError, match="from 2 on"):
            OracleChain(draft)
    prompt = [1, 2, 3]
    with pytest.raises(RequestError, match="script"):
        talking.generate(prompt, drafter=OracleChain(2), drafts=3, max_tokens=2)
    with pytest.raises(RequestError, match="drafts"):
        talking.generate(prompt, drafter=OracleChain(3), drafts=2, script=[1], max_tokens=2)


# ---- the agentic benchmark


@pytest.mark.long
def test_conversations_in_a_row_leave_memory_flat_and_answers_alike(tmp_path, talking):
    """The short form of `bench/agentic.py --soak 300`; more conversations than the cache has room for."""
    rows = [dict(messages=[say("user", f"{i} {'bags ' * 8 * i}"), say("assistant", "Two."), say("user", "Sure?"),
                           say("assistant", "Yes.")]) for i in range(1, 4)]  # fmt: skip
    small = agentic.with_setting(talking, page_cache_bytes=0)
    conversations = read_conversations(file_of(tmp_path, *rows))
    console = Console(file=io.StringIO())
    found = agentic.soak(console, small, conversations, 9, dict(max_tokens=6, drafts=3), every=4)
    assert found["turns"] == 18 and found["checks"] == 6 and found["differences"] == 0
    assert small.cache_stats().hits and small.acceptance.total(warm=True).steps
    # the first readings come before all that is kept for once is there
    assert len(found["arrays_mb"]) == 9 and max(found["arrays_mb"][4:]) <= found["arrays_mb"][4]


@pytest.mark.parametrize(
    ("options", "says"),
    [("--limit 0", "--limit must be 1"), ("--soak -1", "--soak must be 1"), ("--drafts 99", "0 … 31"),
     ("--acceptance 2", "0 … 1"), ("--acceptance nan", "0 … 1"), ("--acceptance 0.5 --drafter mtp", "another drafter"),
     ("--soak 3 --acceptance 0.5", "leave out"), ("--soak 3 --no-cold", "leave out"),
     ("--conversations /absent", "No such file")],
)  # fmt: skip
def test_the_benchmark_refuses_what_makes_no_sense(capsys, options, says):
    with pytest.raises(SystemExit) as end:
        agentic.main(options.split())
    assert end.value.code == 2 and says in capsys.readouterr().err


def test_the_late_ratio_is_of_the_same_prompts():
    sides = [[dataclasses.replace(played("a", n, 1, 2), ttft_ms=ms) for n in range(4, 7)] for ms in (2.0, 10.0)]
    warm, cold = sides
    assert agentic.late_ratio(warm, cold) == pytest.approx(0.2) and agentic.late_ratio(warm[:1], cold[:1]) is None
    agentic.same(warm, cold)
    with pytest.raises(SystemExit, match="turn 4 of a is answered differently"):
        agentic.same(warm, [dataclasses.replace(p, token_ids=(9,)) for p in cold])
    text = Console(width=120, record=True, file=io.StringIO())
    agentic.report(text, dict(warm=warm, cold=cold))
    assert "0.20" in text.export_text()
