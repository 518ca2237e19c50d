"""The choice of K on a simulated machine: rounds take a table's times, and drafts are accepted with given probabilities."""

from __future__ import annotations

import numpy as np
import pytest

from atlas_jax.costs import Cost, nearest, read_table, write_table
from atlas_jax.decode.k_policy import AutoK, Memory, Outcome, Rates
from atlas_jax.metrics import Source
from atlas_jax.replay.files import CostTable, read_cost

ROWS = (1, 2, 4, 8)
CPU = {1: 3.5, 2: 7.8, 4: 13.0, 8: 23.5}  # ms: a second row costs as much as the first
GPU = {1: 10.0, 2: 10.4, 4: 11.0, 8: 12.0}


class Machine:
    """Runs a policy's dispatches of eight rounds, results coming back one dispatch late, and counts tokens and time."""

    def __init__(self, times: dict[int, float], seed: int = 0) -> None:
        self.times, self.rng = times, np.random.default_rng(seed)
        self.tokens, self.ms, self.rows = 0, 0.0, list[int]()

    def run(self, policy: AutoK, chances: list[float], tokens: int, noise: float = 0.0) -> None:
        flying: list[Outcome] = []
        until = self.tokens + tokens
        while self.tokens < until:
            rows, limit = policy.choose()
            self.rows.append(rows)
            emitted = []
            for _ in range(min(8, limit or 8)):
                right = self.rng.random(rows - 1) < np.resize(chances, rows - 1)
                emitted.append(1 + int(np.cumprod(right).sum()))
            ms = self.times[rows] * (1 + noise * self.rng.standard_normal())
            self.tokens, self.ms = self.tokens + sum(emitted), self.ms + ms * len(emitted)
            column = lambda values: np.asarray(values)[:, None]  # noqa: E731
            source = Source.MTP if rows > 1 else Source.PLAIN
            n = len(emitted)
            flying.append(Outcome(rows, column([rows] * n), column([source] * n), column(emitted), ms / 1e3))
            if len(flying) > 1:
                policy.observe(flying.pop(0))

    @property
    def ms_a_token(self) -> float:
        return self.ms / self.tokens


def auto(**memory) -> AutoK:
    return AutoK(ROWS, Memory(Rates(ROWS[-1] - 1), **memory))


def best(times: dict[int, float], chances: list[float]) -> float:
    expected = {k: 1 + np.cumprod(np.resize(chances, k - 1)).sum() for k in ROWS}
    return min(times[k] / expected[k] for k in ROWS)


@pytest.mark.parametrize("times", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.7, 0.97])
def test_it_comes_close_to_the_best_fixed_number(times, chance):
    machine, policy = Machine(times), auto()
    machine.run(policy, [chance], 2000, noise=0.03)
    machine.tokens = machine.ms = 0
    machine.run(policy, [chance], 4000, noise=0.03)
    assert machine.ms_a_token < 1.07 * best(times, [chance])


@pytest.mark.parametrize("times", [CPU, GPU], ids=["cpu", "gpu"])
def test_text_that_defeats_every_draft_costs_two_percent_at_most(times):
    machine, policy = Machine(times), auto(expected_s={k: ms / 1e3 for k, ms in times.items()})
    machine.run(policy, [0.0], 6000)
    assert machine.ms_a_token < 1.02 * times[1]


def test_drafting_comes_back_when_the_text_changes():
    machine, policy = Machine(GPU), auto()
    machine.run(policy, [0.0], 3000)
    assert set(machine.rows[-10:]) == {1}
    machine.run(policy, [0.95], 6000)
    assert set(machine.rows[-10:]) == {8}


def test_noise_does_not_make_it_flip():
    machine, policy = Machine({1: 10.0, 2: 11.0, 4: 12.1, 8: 14.0}), auto()
    machine.run(policy, [0.5, 0.3], 3000, noise=0.1)
    machine.rows.clear()
    machine.run(policy, [0.5, 0.3], 5000, noise=0.1)
    assert sum(a != b for a, b in zip(machine.rows, machine.rows[1:], strict=False)) < 0.06 * len(machine.rows)


def test_finished_sequences_do_not_count():
    policy = AutoK(ROWS, Memory(Rates(7), round_s={k: ms / 1e3 for k, ms in GPU.items()}))
    source = np.asarray([[Source.MTP, Source.MTP]])
    for _ in range(40):
        policy.observe(Outcome(8, np.asarray([[8, 8]]), source, np.asarray([[8, 1]]), None))
    both = policy.speeds()
    policy.forget(1)
    assert policy.speeds()[8] < both[8] and policy.speeds()[8] > 0.6 * both[8]


def test_tables_are_kept_and_read_by_both(tmp_path):
    costs = [Cost(1024, 1, {1: 10.0, 4: 11.5}, 0.5), Cost(32768, 1, {1: 12.0}), Cost(1024, 8, {1: 20.0})]
    write_table(tmp_path / "a" / "t.json", costs, dict(device="x"))
    assert read_table(tmp_path / "a" / "t.json") == costs
    assert read_cost(str(tmp_path / "a" / "t.json")) == CostTable({1: 10.0, 4: 11.5}, 0.5)
    assert [nearest(costs, *at) for at in ((900, 1), (9000, 1), (40, 6))] == costs
    assert nearest([], 1, 1) is None and read_table(None) == read_table(tmp_path / "absent") == []
    (tmp_path / "bad").write_text('{"measured": [{}]}')
    assert read_table(tmp_path / "bad") == []
    assert costs[0].round_s(2, 3) == pytest.approx(0.011) and costs[0].round_s(4, 2) == pytest.approx(0.0125)
    assert costs[0].round_s(5, 1) is None


@pytest.mark.parametrize("times", [{1: -1.0}, {1: 0.0}, {1: float("nan")}, {0: 1.0}, {1: float("inf")}])
def test_a_table_of_impossible_times_is_none(tmp_path, times):
    write_table(tmp_path / "t.json", [Cost(256, 1, {1: 1.0}), Cost(512, 1, times)], {})
    assert read_table(tmp_path / "t.json") == []
    (tmp_path / "deep").write_text("[" * 100_000)
    assert read_table(tmp_path / "deep") == []
