"""`atlas-jax bench verify-cost`: what it refuses, and a measurement of a small random model."""

from __future__ import annotations

import dataclasses
import json

import pytest
from models import CONFIGS, RUN, params_of

from atlas_jax import verify_cost
from atlas_jax.bench_command import counts
from atlas_jax.cli import main
from atlas_jax.config import FULL, LINEAR
from atlas_jax.costs import Cost, merged, read_table, write_table
from atlas_jax.errors import RequestError
from atlas_jax.runtime import Runtime


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["tiny-agent", "--k", "1..17", "--max-drafts", "7"], "--k 17 is a verify of more rows than the 8 of 7 drafts"),
        (["tiny-agent", "--k", "40"], "more rows than the 32"),
        (["tiny-agent", "--k", "4..2"], "ranges rising"),
        (["tiny-agent", "--k", "x"], "numbers or ranges"),
        (["tiny-agent", "--context", "1..1000"], "64 numbers at most"),
        (["tiny-agent", "--shape", "qwen3.5-27b"], "name one model"),
        ([], "name one model"),
        (["tiny-agent", "--max-drafts", "99"], "must lie in 0 … 31"),
        (["tiny-agent", "--write", "/dev/null/x/y"], "--write /dev/null/x/y: Not a directory"),
        (["tiny-agent", "--write", "/"], "name a file"),
        (["tiny-agent", "--write", ""], "name a file"),
    ],
)
def test_what_cannot_be_measured_is_refused(capsys, args, message):
    assert main(["bench", "verify-cost", *args]) == 2
    assert message in capsys.readouterr().err


def test_numbers_and_ranges():
    assert counts("--k", "4,1..3,2") == [1, 2, 3, 4]
    with pytest.raises(RequestError, match="1 or more"):
        counts("--k", "0")


def test_a_table_keeps_what_was_measured_at_other_lengths_and_batches(tmp_path):
    costs, path = [Cost(256, 1, {1: 3.0, 4: 4.0}), Cost(4096, 1, {1: 5.0}, 0.5)], tmp_path / "table.json"
    write_table(path, costs, {})
    again = [Cost(4096, 1, {1: 6.0}), Cost(4096, 8, {1: 9.0})]
    write_table(path, merged(again, read_table(path)), {})
    assert read_table(path) == [*again, costs[0]]


@pytest.mark.long
def test_a_measurement_has_times_floors_and_ratios():
    config = dataclasses.replace(CONFIGS["dense"], layer_types=(LINEAR, FULL))
    run = dataclasses.replace(RUN, slots=1, max_drafts=1, rounds_per_dispatch=2)
    runtime = Runtime(config, run, params_of(config, run))
    speed, (measured,) = verify_cost.measure(runtime, [1, 2], [20], [1])
    assert speed > 0 and measured.cost.context == 20 and set(measured.cost.step_ms) == set(measured.floor_ms) == {1, 2}
    assert all(ms > 0 for ms in measured.cost.step_ms.values()) and json.dumps(measured.cost.step_ms)
    assert measured.cost.draft_ms is not None and runtime.loop.live
    assert len(runtime.generate([1, 2, 3], max_tokens=3, drafter="none").token_ids) == 3
