"""`bench/quality.py`: which conversations it measures on."""

import argparse
import json
import sys

import numpy as np
import pytest

from bench import quality


def test_quality_is_measured_on_conversations_of_either_form(tmp_path, monkeypatch):
    """As the API has tool calls, and as tau-bench's files do; with a message at the end that nobody answers."""
    rows = [json.loads(line) for line in quality.HELD_OUT.read_text().splitlines()[:3]]
    own, other = tmp_path / "own.jsonl", tmp_path / "tau.jsonl"
    own.write_text("\n".join(map(json.dumps, rows)))
    for row in rows:
        for message in row["messages"]:
            for call in message.get("tool_calls", ()):
                function = call.pop("function")
                call |= dict(id="call_1", name=function["name"], arguments=json.dumps(function["arguments"]))
        row["messages"].append(dict(role="user", content="###STOP###"))
    trained_on = rows[0] | dict(id="airline-1-0")
    other.write_text("\n".join(map(json.dumps, [*rows, trained_on])))
    args = argparse.Namespace(model="tiny-agent", count=6, tokens=3000)
    one, two = (quality.Text(argparse.Namespace(**vars(args), conversations=str(path))) for path in (own, other))
    assert len(one.texts) > 1 and one.first == two.first > 2000
    assert all(np.array_equal(a, b) for a, b in zip(one.texts, two.texts, strict=True))
    assert not one.others and [talk.name for talk in two.others] == ["airline-1-0"]
    for options, says in {
        "--conversations nowhere": "nowhere: No such file",
        "--tokens 99999": "lower --tokens",
    }.items():
        monkeypatch.setattr(sys, "argv", ["quality.py", *options.split()])
        with pytest.raises(SystemExit, match=f"quality: .*{says}"):
            quality.main()
