"""Prompts of several sequences computed in one dispatch: each comes out as alone, bit for bit, wherever it stands in the batch."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import CONFIGS, RUN, assert_same, params_of, steps

from atlas_jax.config import FULL, LINEAR, Probes
from atlas_jax.decode.chunks import Chunks
from atlas_jax.engine.api import EngineConfig
from atlas_jax.engine.engine import Engine
from atlas_jax.errors import ConfigError
from atlas_jax.models import call
from atlas_jax.runtime import Runtime

T, S = 256, 4
TOKENS = np.random.default_rng(5).integers(0, 96, 600)
ON_CPU = jax.default_backend() == "cpu"
FAMILIES = [("dense", "float32"), ("moe", "float32")]
MORE = [("dense", "bfloat16"), ("moe", "bfloat16"), ("next", "float32")]
FAMILIES += [pytest.param(*x, marks=pytest.mark.long) for x in MORE]


def wide(family: str, dtype: str = "float32") -> Any:
    return steps(family, dtype, slots=S, max_length=320)


def text_of(slot: int, start: int, n: int) -> np.ndarray:
    return np.roll(TOKENS, 31 * slot)[start : start + n]


def batch(parts: dict[int, tuple[int, int]], seed: int = 0) -> tuple[Any, ...]:
    """Slots, tokens, begin and n of a ragged batch of slots' next tokens, {slot: (start, n)} in order; padding is random."""
    tokens, rows = np.random.default_rng(seed).integers(0, 96, T), np.zeros((3, S), np.int32)
    at = 0
    for i, (slot, (start, n)) in enumerate(parts.items()):
        rows[:, i] = slot, at, n
        tokens[at * 64 : at * 64 + n] = text_of(slot, start, n)
        at += -(-n // 64)
    return rows[0], tokens, rows[1], rows[2]


def outcome(s: Any, state: Any, outs: Any, given: Any) -> dict[int, Any]:
    """Of each slot with rows: hiddens, and all that the state has of it."""
    slots, _, begin, n = given
    rows = {int(slot): slice(64 * b, 64 * b + k) for slot, b, k in zip(slots, begin, n, strict=True) if k}
    return {
        slot: (*(np.asarray(x[at]) for x in outs), jax.device_get(s.snapshot(state, jnp.int32(slot))))
        for slot, at in rows.items()
    }


def cases() -> list[list[dict[int, tuple[int, int]]]]:
    """Batches one after another."""
    return [
        [{1: (0, 65), 2: (0, 1), 3: (0, 63)}],
        [{3: (0, 64), 4: (0, 64), 1: (0, 0), 2: (0, 128)}],
        [{2: (0, 256)}, {1: (0, 64), 2: (256, 64), 4: (0, 2), 3: (0, 64)}],  # one that goes on, beside new ones
    ]


@pytest.mark.parametrize(("family", "dtype"), FAMILIES)
def test_a_chunk_among_others_equals_the_chunk_alone(family, dtype):
    s = wide(family, dtype)

    def run(batches: list[dict[int, tuple[int, int]]], seed: int) -> dict[int, Any]:
        """In slots and pages full of noise."""
        state = s.init(garbage=seed)
        for slot in range(1, S + 1):
            state = s.free(state, jnp.int32(slot))
        found = {}
        for parts in batches:
            given = batch(parts, seed)
            *outs, state = s.ragged(state, *given)
            assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in outs)
            found |= outcome(s, state, outs, given)
        return found

    for seed, batches in enumerate(cases()):
        together = run(batches, seed)
        for slot in {slot for parts in batches for slot, (_, n) in parts.items() if n}:
            alone = run([{slot: parts[slot]} for parts in batches if slot in parts], seed + 10)
            assert_same(together[slot], alone[slot])
            assert alone[slot][-1].ok and alone[slot][-1].length == sum(p[slot][1] for p in batches if slot in p)


def test_other_slots_and_pages_are_not_touched():
    s = wide("dense")
    state = s.init(garbage=1)
    for slot in (1, 3):
        state = s.free(state, jnp.int32(slot))
    before = jax.tree.map(jnp.array, state)  # a copy: the state is donated
    *_, after = s.ragged(state, *batch({3: (0, 70), 1: (0, 3)}))
    other = [2, 4]
    for name in ("h", "conv", "journal_k", "journal_u", "journal_decay"):
        np.testing.assert_array_equal(getattr(after, name)[:, other], getattr(before, name)[:, other], err_msg=name)
    for name in ("rows", "base", "pending", "hidden", "ok"):
        np.testing.assert_array_equal(getattr(after, name)[np.array(other)], getattr(before, name)[np.array(other)])
    table = np.asarray(before.page_table)
    others = np.setdiff1d(np.arange(1, table.max() + 1), [*table[3, :3], table[1, 0]])  # pages of 32 tokens
    for x, y in zip(after.pages, before.pages, strict=True):
        np.testing.assert_array_equal(x[:, others], y[:, others])


@pytest.mark.parametrize("n", [-1, 321, 2**31 - 1, -(2**31)])
def test_a_count_out_of_bounds_stops_its_own_sequence_only(n):
    s = wide("dense")
    slots, tokens, begin, count = batch({1: (0, 70), 2: (0, 9)})
    *outs, state = s.ragged(s.init(), slots, tokens, begin, [70, n, 0, 0])
    alone = s.ragged(s.init(), slots, tokens, begin, [70, 0, 0, 0])
    assert state.ok.tolist()[1:] == [True, False, True, True] and state.length.tolist()[1:] == [70, 0, 0, 0]
    assert_same(s.snapshot(state, jnp.int32(1)), s.snapshot(alone[2], jnp.int32(1)))
    assert_same(np.asarray(outs[0])[:70], np.asarray(alone[0])[:70])
    for at, count in ((T // 64 - 1, 65), (2**26, 1), (-1, 1)):  # beyond the batch's ends
        *_, state = s.ragged(s.init(), slots, tokens, [0, at, 0, 0], [70, count, 0, 0])
        assert state.ok.tolist()[1:3] == [True, False]


@pytest.mark.long
def test_hiddens_from_further_back_are_each_sequences_own():
    """The probe that shifts what the drafter's layer reads: row p gets hidden p - 3."""
    s = wide("dense")
    earlier = jnp.asarray(np.random.default_rng(0).normal(size=(S, 2, CONFIGS["dense"].hidden_size)), jnp.float32)
    run = jax.jit(functools.partial(call, s.model, method="prefill"))

    def pages(slot: int, given: Any) -> Any:
        of = [jnp.asarray(x, jnp.int32) for x in given]
        mine = jnp.where((of[0] == slot)[:, None, None], earlier[slot - 1], 0)
        state = run(s.params, s.init(), *of, mine)[2]
        return jax.tree.map(lambda x: x[-1], s.snapshot(state, jnp.int32(slot)).kv)  # the drafter's layer

    together = batch({1: (0, 65), 2: (0, 2), 3: (0, 63)})
    for slot, n in ((1, 65), (2, 2), (3, 63)):
        assert_same(pages(slot, together), pages(slot, batch({slot: (0, n)})))


# ---- who goes together -------------------------------------------------------------------------------------------------

CONFIG = dataclasses.replace(CONFIGS["dense"], layer_types=(LINEAR, FULL))
PACKED = dataclasses.replace(
    RUN,
    max_length=512,
    max_drafts=2,
    rounds_per_dispatch=4,
    prefill_chunk=256,
    pack_prompts=True,
    snapshot_interval=256,
)


def test_chunks_go_together_that_fit_into_one_dispatch():
    chunks = Chunks(PACKED, 512)
    assert chunks.sizes == [256] and chunks.sequences(256) == 4
    assert chunks.together([70, 200, 64, 1]) == [0, 2, 3]  # 200 rows take four blocks
    assert chunks.together([0, 256, 0, 1]) == [0, 1, 2]
    assert chunks.together([1] * 6) == [0, 1, 2, 3]
    parts = [(3, np.arange(70)), (1, np.arange(64))]
    slots, tokens, begin, n = chunks.batch(parts)
    assert (slots.tolist(), begin.tolist(), n.tolist()) == ([3, 1, 0, 0], [0, 2, 0, 0], [70, 64, 0, 0])
    assert tokens[69] == 69 and tokens[128 + 63] == 63 and not tokens[70:128].any()
    alone = Chunks(dataclasses.replace(PACKED, pack_prompts=False), 512)
    assert alone.sizes == [16, 64, 256] and alone.together([5, 0, 5]) == [0, 1] and alone.sequences(256) == 1
    long = Chunks(dataclasses.replace(PACKED, slots=16, prefill_chunk=2048), 1024)
    assert long.sizes == [256, 1024, 2048] and long.sequences(1024) == 16
    assert long.together([300, 20, 700]) == [0, 2]  # each in the dispatch that it would have alone
    assert not Chunks(dataclasses.replace(PACKED, slots=1), 512).packs


@pytest.mark.skipif(not ON_CPU, reason="a row_group of 1 is for CPUs")
def test_single_rows_are_not_packed_on_a_cpu():
    assert not Chunks(dataclasses.replace(PACKED, row_group=1, pack_prompts=None), 512).packs
    with pytest.raises(ConfigError, match="pack_prompts needs a row_group of 4 or more on a CPU"):
        Chunks(dataclasses.replace(PACKED, row_group=1), 512)


@functools.cache
def runtime() -> Runtime:
    run = dataclasses.replace(PACKED, probes=Probes(fingerprints=True))
    return Runtime(CONFIG, run, params_of(CONFIG, run))


class Prompts:
    """How many sequences each dispatch of prompts computed, and the hidden that each prompt ended with: it depends on all that the
    state has of it."""

    def __init__(self, loop: Any) -> None:
        self.loop, self.counts, self.hidden = loop, [], {}
        self._prefill = loop.prefill

    def prefill(self, lives: Any) -> Any:
        self.counts.append(sum(bool(live.chunks) for live in lives))
        ready = self._prefill(lives)
        for live in ready:
            found = np.asarray(self.loop.state.target.hidden[live.slot])
            np.testing.assert_array_equal(found, self.hidden.setdefault(live.request.prompt.tobytes(), found))
        return ready


@pytest.fixture
def computed(monkeypatch) -> Prompts:
    loop = runtime().loop
    loop.cache.reset()
    computed = Prompts(loop)
    monkeypatch.setattr(loop, "prefill", computed.prefill)
    return computed


OPTIONS: dict[str, Any] = dict(drafter="mtp", drafts=2, max_tokens=6)
ENGINE = EngineConfig(drafter="mtp", drafts=2, buckets=(4,))  # one executable of rounds for all of it


def solo(prompts: list[list[int]], computed: Prompts, keep: bool = False) -> list[Any]:
    """Answers one after another; what they leave in the cache is forgotten, unless asked to `keep` it."""
    with Engine(runtime(), ENGINE) as engine:
        found = [engine.submit(engine.request(prompt, max_tokens=6)).result(300) for prompt in prompts]
    assert max(computed.counts) == 1
    if not keep:
        runtime().loop.cache.reset()
    computed.counts.clear()
    return found


def assert_equal(answers: list[Any], want: list[Any]) -> None:
    for answer, alone in zip(answers, want, strict=True):
        assert answer.token_ids == alone.token_ids
        assert answer.fingerprints.differed == 0 < answer.fingerprints.fed


def prompts_of(*lengths: int) -> list[list[int]]:
    return [TOKENS[i : i + n].tolist() for i, n in enumerate(lengths)]


def test_a_batch_of_prompts_equals_them_one_by_one(computed):
    prompts = prompts_of(66, 2, 1, 64)
    want = solo(prompts, computed)
    assert_equal(runtime().generate(prompts, **OPTIONS), want)
    assert computed.counts == [3]  # the third has nothing but its last token, which the first round reads


def test_warm_prompts_beside_cold_ones_equal_cold_ones(computed):
    prompts = prompts_of(330, 40, 3)
    want = solo(prompts, computed)
    solo(prompts[:1], computed, keep=True)
    answers = runtime().generate(prompts, **OPTIONS)
    assert [answer.restored for answer in answers] == [256, 0, 0] and computed.counts == [3]
    assert_equal(answers, want)


def test_a_prompt_waits_for_what_it_can_begin_with(computed):
    prompts = [[*TOKENS[:257].tolist(), i] for i in range(3)]
    want = solo(prompts, computed)
    answers = runtime().generate(prompts, **OPTIONS)
    assert [answer.restored for answer in answers] == [0, 256, 256]
    assert computed.counts == [1, 3]  # the rest of the first goes along with the others
    assert_equal(answers, want)


def test_an_engine_computes_waiting_prompts_together(computed):
    prompts = prompts_of(5, 64, 1, 130, 33, 17, 300, 64)
    want = solo(prompts, computed)
    with Engine(runtime(), ENGINE) as engine:
        long = engine.submit(engine.request(TOKENS[:3].tolist(), max_tokens=400, ignore_eos=True))
        next(long)
        computed.counts.clear()
        tickets = [engine.submit(engine.request(prompt, max_tokens=6)) for prompt in prompts]
        answers = [ticket.result(120) for ticket in tickets]
        long.cancel()
    assert_equal(answers, want)
    assert max(computed.counts) > 1 and len(computed.counts) < len(prompts)


def test_a_failed_dispatch_ends_those_that_it_computed(computed, monkeypatch):
    prompts = prompts_of(9, 4, 5)
    want = solo(prompts, computed)
    loop, failing = runtime().loop, itertools.count()

    def fails(lives: Any) -> Any:
        if len(lives) > 1 and not next(failing):
            raise RuntimeError("mine")
        return computed.prefill(lives)

    monkeypatch.setattr(loop, "prefill", fails)
    with pytest.raises(RuntimeError, match="mine"):
        runtime().generate(prompts, **OPTIONS)
    assert sorted(loop._free) == [1, 2, 3, 4]
    assert_equal(runtime().generate(prompts, **OPTIONS), want)
