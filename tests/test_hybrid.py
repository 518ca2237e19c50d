"""Lookup and the hybrid, and rounds of changing width: outputs and states equal plain decoding's, and the MTP head's rows are all
there when it drafts again."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import CONFIGS as LARGER
from models import RUN, assert_same, params_of

from atlas_jax import state as states
from atlas_jax.config import FULL, LINEAR
from atlas_jax.decode import arbitration as arb
from atlas_jax.decode.hybrid import HybridDrafter, judged
from atlas_jax.decode.k_policy import AutoK, Memory, Outcome, Rates
from atlas_jax.decode.lookup import LookupDrafter
from atlas_jax.decode.loop import Request
from atlas_jax.decode.protocol import DraftContext
from atlas_jax.decode.request import SamplingParams
from atlas_jax.errors import RequestError
from atlas_jax.metrics import Source
from atlas_jax.runtime import Runtime
from atlas_jax.state.record import Record

CONFIG = dataclasses.replace(LARGER["dense"], layer_types=(LINEAR, FULL))
LOGGED: dict[str, Any] = dict(logprobs=True, top_logprobs=2)
RNG = np.random.default_rng(5)
LOOP = RNG.integers(0, 96, 11).tolist()
PROMPTS = [LOOP * 4, RNG.integers(0, 96, 30).tolist(), LOOP * 2 + [1], [4]]
SAMPLED: dict[str, Any] = dict(temperature=0.3, top_k=8, presence_penalty=0.2, repetition_penalty=1.05, seed=3)
EAGER = HybridDrafter(least=0.0)  # drafts as much as there is room for


@functools.cache
def runtime() -> Runtime:
    run = dataclasses.replace(RUN, rounds_per_dispatch=4)
    return Runtime(CONFIG, run, params_of(CONFIG, run))


@functools.cache
def _snapshot():
    return jax.jit(states.snapshot)


def settled(slot: int, heads_layer: bool = False) -> Any:
    state = runtime().loop._state
    assert state is not None
    out = _snapshot()(state.target, jnp.int32(slot))
    return out if heads_layer else dataclasses.replace(out, kv=jax.tree.map(lambda x: x[:-1], out.kv))


def head_rows(slot: int) -> np.ndarray:
    """Keys and values of the MTP head that were fed, by position; position 0 has none."""
    state, snapshot = runtime().loop._state, settled(slot, heads_layer=True)
    upto = int(snapshot.length) - int(state.feed_count[slot])  # pyright: ignore[reportOptionalMemberAccess]
    keys, values = np.swapaxes(np.asarray(snapshot.kv.keys[-1]), 2, 3), np.asarray(snapshot.kv.values[-1])
    both = np.concatenate([keys, values], axis=-1)  # pages, heads, tokens, components
    return np.moveaxis(both, 2, 1).reshape(-1, both.shape[1], both.shape[3])[1 : upto + 1]


def same(got: Any, want: Any) -> None:
    for name in ("token_ids", "finish_reason", "logprobs", "top_logprobs"):
        assert getattr(got, name) == getattr(want, name)


class Rows:
    """A policy that takes numbers of rows from a list, again and again."""

    def __init__(self, rows: list[int]) -> None:
        self.rows, self._next, self.seen = tuple(sorted(set(rows))), list(rows), list[Outcome]()

    def choose(self) -> tuple[int, int | None]:
        self._next.append(self._next.pop(0))
        return self._next[-1], None

    def observe(self, outcome: Outcome) -> None:
        self.seen.append(outcome)

    def forget(self, key: int) -> None:
        pass


def decode(policy: Any, drafter: Any, prompt: list[int], n: int) -> list[int]:
    request = Request(np.asarray(prompt, np.int32), SamplingParams(max_tokens=n))
    return [t for step in runtime().loop.decode([request], drafter, policy, 2, lambda *_: None) for t in step.token_ids]


@pytest.mark.parametrize(
    "drafter", [pytest.param(LookupDrafter(1), marks=pytest.mark.long), EAGER], ids=["lookup", "hybrid"]
)
@pytest.mark.parametrize("options", [{}, pytest.param(SAMPLED, marks=pytest.mark.long)], ids=["greedy", "sampled"])
def test_output_and_state_are_those_of_plain_decoding(drafter, options):
    r, looked = runtime(), 0
    for prompt in PROMPTS:
        want = r.generate(prompt, max_tokens=40, drafter="none", **LOGGED, **options)
        state = settled(1)
        got = r.generate(prompt, max_tokens=40, drafter=drafter, drafts=7, **LOGGED, **options)
        same(got, want)
        assert_same(settled(1), state)
        looked += int(got.acceptance.counts[:, Source.LOOKUP].sum())
    assert looked  # else nothing was tested


@pytest.mark.long
def test_batches_and_stops():
    r = runtime()
    alone = [r.generate(p, max_tokens=40, drafter="none", **LOGGED) for p in PROMPTS]
    for got, want in zip(r.generate(PROMPTS, max_tokens=40, drafter=EAGER, drafts=7, **LOGGED), alone, strict=True):
        same(got, want)
    for at in range(0, 12, 3):
        stop = dict(stop_token_ids=(alone[0].token_ids[at],), max_tokens=40, **LOGGED)
        want = r.generate(PROMPTS[0], drafter="none", **stop)
        state = settled(1)
        same(r.generate(PROMPTS[0], drafter=EAGER, drafts=7, **stop), want)
        assert_same(settled(1), state)


def test_the_heads_rows_are_complete_after_rounds_without_it():
    """Bit for bit those of a run in which MTP drafts every round, whichever rounds lookup took or had no drafts at all."""
    r = runtime()
    for prompt in PROMPTS[:3]:
        want = r.generate(prompt, max_tokens=60, drafter="mtp", drafts=3, **LOGGED)
        complete = head_rows(1)
        r.generate(prompt, max_tokens=60, drafter=EAGER, drafts=7, **LOGGED)
        kept = [head_rows(1)]
        for rows in ([1, 1, 1, 1, 1, 1, 4], [8, 1, 4, 1, 8]):
            assert decode(Rows(rows), EAGER, prompt, 60) == want.token_ids
            kept.append(head_rows(1))
        for got in kept:
            n = min(len(got), len(complete))
            assert n > len(prompt)
            np.testing.assert_array_equal(got[:n], complete[:n])


def test_changing_the_number_of_rows_changes_nothing_else():
    r, rng = runtime(), np.random.default_rng(2)
    want = r.generate(PROMPTS[0], max_tokens=80, drafter="none", **LOGGED)
    state = settled(1)
    for _ in range(4):
        policy = Rows(rng.choice([1, 4, 8], 12).tolist())
        assert decode(policy, EAGER, PROMPTS[0], 80) == want.token_ids
        assert_same(settled(1), state)
        assert sum(int(outcome.emitted.sum()) for outcome in policy.seen) == 80
    auto = AutoK((1, 4, 8), Memory(Rates(7)))
    assert decode(auto, EAGER, PROMPTS[0], 80) == want.token_ids and auto.memory.rows in (1, 4, 8)
    assert_same(settled(1), state)


@pytest.mark.long
def test_auto_is_an_option():
    r = runtime()
    assert r.drafting(dict(drafter="none", drafts="auto"))[1] == 0
    drafter, drafts = r.drafting(dict(drafter="hybrid", drafts="auto"))
    assert r.loop.policy(drafter, drafts, 2, 1).rows == (1, 2, 4, 8, 16, 17)
    with pytest.raises(RequestError, match=r"'auto' or an integer in 0 … 16"):
        r.generate([1], drafts="many")


def test_values_are_checked():
    cases: tuple[dict[str, Any], ...] = (
        dict(min_match=0),
        dict(min_match=17),
        dict(chain=0),
        dict(sure=1.5),
        dict(least=1.5),
        dict(min_match=True),
    )
    for bad in cases:
        with pytest.raises(RequestError, match=r"min_match|chain|least|sure"):
            HybridDrafter(**bad)
    plain = dataclasses.replace(CONFIG, mtp_num_hidden_layers=0)
    with pytest.raises(RequestError, match=r"needs a checkpoint with mtp"):
        HybridDrafter().init(plain, RUN)


# ---- who drafts


def context(tokens: list[int], **changes: Any) -> DraftContext:
    row = jnp.asarray([tokens + [0] * (RUN.max_length - len(tokens))], jnp.int32)
    nothing: Any = None
    return DraftContext(
        slots=jnp.asarray([1]), tokens=row, length=jnp.asarray([len(tokens) - 1]), most=jnp.asarray([99]),
        running=jnp.asarray([True]), hidden=jnp.zeros((1, 64)), seed=jnp.zeros(1, jnp.uint32), vocab_size=96,
        logits=nothing, step=nothing, **changes)  # fmt: skip


def noted(state: Record, **values: Any) -> Record:
    return state.put(jnp.int32(1), **values)


def test_a_lookup_is_judged_by_what_followed_even_where_it_was_not_used():
    drafter = HybridDrafter()
    state = drafter.init(CONFIG, RUN)
    known = [1, 2, 3, 4, 5, 6, 1, 2]  # a match of two, at place 1; lookup would go on with 3 4 5
    for emitted, counts in (([3, 4, 9], [1, 0, 1, 1]), ([9], [0, 1, 0, 0]), ([3, 4], [1, 0, 1, 0])):
        last = noted(state, at=7, place=1, kind=1, chained=3, drafts=3)
        got = judged(context(known + emitted), last, 5)
        assert got[0, 1].tolist() == counts
        right = len(emitted) - 1
        assert got[0, arb.MTP + 1].tolist() == [min(right, 1), right < 1, max(right - 1, 0), right >= 1]


def test_lookup_is_given_up_where_it_fails_and_taken_up_where_it_would_work():
    drafter = HybridDrafter(least=0.0)
    state = drafter.init(CONFIG, RUN)
    known = [*range(1, 12), *range(1, 9)]  # a match of eight, after which 9 10 11 came
    wants = lambda s: bool(drafter.plan(context(known), s, 3)[0][0])  # noqa: E731
    assert not wants(state)
    for emitted, expected in (([20], True), ([9, 10, 11, 1, 2], False)):
        for _ in range(30):
            last = noted(state, at=18, place=7, kind=3, chained=0, drafts=3)
            state = noted(last, counts=judged(context(known + emitted), last, 3)[0])
        state = noted(state, kind=-1)
        assert wants(state) == expected


def test_rates_and_their_arithmetic():
    assert [int(arb.kind(m)) for m in (0, 1, 2, 3, 4, 15, 16)] == [-1, 0, 1, 1, 2, 3, 4]
    assert arb.outcome(0, True) == (0, 1, 0, 0) and arb.outcome(3, False) == (1, 0, 2, 0)
    assert arb.outcome(3, True) == (1, 0, 2, 1)
    assert arb.tokens(0.5, 0.5, 3) == pytest.approx(1 + 0.5 + 0.25 + 0.125, rel=1e-2)
    assert arb.worth(0.8, 0.5, 8, 0.15) == 3 and arb.worth(0.1, 0.9, 8, 0.15) == 0
