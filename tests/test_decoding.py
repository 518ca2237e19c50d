"""Decoding end to end on small random models: whatever is drafted, however it is batched, what comes out equals plain
decoding bit for bit: tokens, log-probabilities and every leaf of the settled state."""

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
from atlas_jax.decode.drafters import Proposal, ScriptedDrafter
from atlas_jax.errors import RequestError
from atlas_jax.metrics import Acceptance, Source
from atlas_jax.runtime import Runtime

# Two layers and one set of options keep the number and the cost of the executables down; test_exactness has all families.
CONFIGS = {name: dataclasses.replace(LARGER[name], layer_types=(LINEAR, FULL)) for name in ("dense", "moe")}
LOGGED = dict(logprobs=True, top_logprobs=2)
PROMPTS = [np.random.default_rng(7).integers(0, 96, n).tolist() for n in (9, 1, 40, 33)]
SAMPLED: dict[str, Any] = dict(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, presence_penalty=0.5, frequency_penalty=0.2,
               repetition_penalty=1.2, logit_bias={3: 2.0, 5: -50.0}, seed=11)  # fmt: skip


@functools.cache
def runtime(family: str, dtype: str = "float32", **changes) -> Runtime:
    run = dataclasses.replace(RUN, dtype=dtype, rounds_per_dispatch=4, **changes)
    return Runtime(CONFIGS[family], run, params_of(CONFIGS[family], run))


@functools.cache
def _snapshot(run):
    return jax.jit(states.snapshot)


def settled(r: Runtime, slot: int, drafter_layer: bool = False):
    state = r.loop._state
    assert state is not None
    out = _snapshot(r.run)(state.target, jnp.int32(slot))
    return out if drafter_layer else dataclasses.replace(out, kv=jax.tree.map(lambda x: x[:-1], out.kv))


def plain(r: Runtime, prompt, n=24, **options):
    answer = r.generate(prompt, max_tokens=n, drafter="none", **LOGGED, **options)
    return answer, settled(r, 1)


def same_answer(got, want):
    assert got.token_ids == want.token_ids
    assert got.finish_reason == want.finish_reason
    assert got.logprobs == want.logprobs
    assert got.top_logprobs == want.top_logprobs


LONG = pytest.mark.long


@pytest.mark.parametrize("drafts", [0, 3, *(pytest.param(n, marks=LONG) for n in (1, 2, 4, 5, 6, 7, 8, 16))])
def test_every_draft_length(drafts):
    r = runtime("dense")
    want, state = plain(r, PROMPTS[0])
    for acceptance in (1.0, 0.0, 0.6):
        drafter = ScriptedDrafter(acceptance)
        got = r.generate(PROMPTS[0], max_tokens=24, drafter=drafter, drafts=drafts, script=want.token_ids,
                         **LOGGED)  # fmt: skip
        same_answer(got, want)
        assert_same(settled(r, 1), state)
        if acceptance == 1.0:
            assert got.acceptance.steps == -(-24 // (drafts + 1))


@pytest.mark.parametrize(
    ("family", "dtype", "drafter"),
    [("dense", "float32", "random"),
     *(pytest.param(*case, marks=LONG) for case in
       [("dense", "float32", "mtp"),
        ("moe", "bfloat16", "mtp"), ("dense", "bfloat16", "mtp"), ("moe", "float32", "mtp"), ("moe", "bfloat16", "random")])],
)  # fmt: skip
def test_every_family(family, dtype, drafter):
    r = runtime(family, dtype)
    for prompt in PROMPTS[:3]:
        want, state = plain(r, prompt)
        got = r.generate(prompt, max_tokens=24, drafter=drafter, drafts=3, **LOGGED)
        same_answer(got, want)
        assert_same(settled(r, 1), state)


@pytest.mark.parametrize(
    ("family", "drafter"),
    [
        ("dense", "mtp"),
        *(pytest.param(*case, marks=LONG) for case in [("moe", "mtp"), ("dense", "none"), ("dense", "random")]),
    ],
)
def test_batches_of_mixed_lengths(family, drafter):
    r = runtime(family)
    alone = [plain(r, p, n) for p, n in zip(PROMPTS, (24, 24, 24, 24), strict=True)]
    for order in ((3, 2, 1, 0), (2, 0, 1), (0, 1)) if drafter == "mtp" else ((3, 2, 1, 0),):
        got = r.generate([PROMPTS[i] for i in order], max_tokens=24, drafter=drafter, drafts=None if drafter == "none" else 3,
                         **LOGGED)  # fmt: skip
        for slot, i in enumerate(order, 1):
            same_answer(got[slot - 1], alone[i][0])
            assert_same(settled(r, slot), alone[i][1])


@LONG
def test_rows_one_by_one():
    """What CPUs run by default: no padding, another product."""
    r = runtime("dense", row_group=1)
    want = [plain(r, p, 12) for p in PROMPTS[:3]]
    for drafter, drafts in (("mtp", 3), ("forced-accept", 5)):
        for prompt, (answer, state) in zip(PROMPTS, want, strict=False):
            got = r.generate(prompt, max_tokens=12, drafter=drafter, drafts=drafts, script=answer.token_ids, **LOGGED)
            same_answer(got, answer)
            assert_same(settled(r, 1), state)
    got = r.generate(PROMPTS[:3], max_tokens=12, drafter="mtp", drafts=3, **LOGGED)
    for one, (answer, _) in zip(got, want, strict=True):
        same_answer(one, answer)


def test_more_prompts_than_slots_run_in_waves():
    r = runtime("dense")
    prompts = [PROMPTS[i % 4] for i in range(6)]
    got = r.generate(prompts, max_tokens=8, drafts=3, **LOGGED)
    want = [plain(r, p, 8)[0].token_ids for p in PROMPTS]
    assert [g.token_ids for g in got] == [want[i % 4] for i in range(6)]


@pytest.mark.parametrize("family", ["dense", pytest.param("moe", marks=LONG)])
def test_sampling_with_a_seed_does_not_depend_on_drafts(family):
    r = runtime(family)
    cases: tuple[dict[str, Any], ...] = (
        SAMPLED,
        dict(temperature=1.0, seed=5),
        dict(repetition_penalty=1.5, presence_penalty=1.0),
    )
    for options in cases:
        want, state = plain(r, PROMPTS[2], **options)
        for drafter in ("mtp", "random"):
            got = r.generate(PROMPTS[2], max_tokens=24, drafter=drafter, drafts=3, **LOGGED, **options)
            same_answer(got, want)
            assert_same(settled(r, 1), state)
        got = r.generate(PROMPTS[2], max_tokens=24, drafter="forced-accept", drafts=3, script=want.token_ids,
                         **LOGGED, **options)  # fmt: skip
        same_answer(got, want)
        assert got.acceptance.steps == 6
    one, other = (
        r.generate(PROMPTS[2], max_tokens=24, temperature=1.0, seed=seed, drafts=3, **LOGGED).token_ids
        for seed in (1, 2)
    )
    assert one != other


def test_a_stop_id_inside_an_accepted_span_cuts_everything_there():
    r = runtime("dense")
    want, _ = plain(r, PROMPTS[0])
    for at in range(8):
        stop = want.token_ids[at]
        first = want.token_ids.index(stop)
        one, state = plain(r, PROMPTS[0], stop_token_ids=(stop,))
        assert one.token_ids == want.token_ids[: first + 1] and one.finish_reason == "stop"
        got = r.generate(PROMPTS[0], max_tokens=24, drafter="forced-accept", drafts=7, script=want.token_ids,
                         stop_token_ids=stop, **LOGGED)  # fmt: skip
        same_answer(got, one)
        assert_same(settled(r, 1), state)
        assert got.acceptance.emitted == len(got.token_ids)


@pytest.mark.parametrize("n", range(1, 10))
def test_length_cuts_everything_there(n):
    r = runtime("dense")
    want, state = plain(r, PROMPTS[0], n)
    got = r.generate(PROMPTS[0], max_tokens=n, drafter="mtp", drafts=3, **LOGGED)
    same_answer(got, want)
    assert got.finish_reason == "length" and len(got.token_ids) == n
    assert_same(settled(r, 1), state)


def test_a_sequence_may_fill_its_slot():
    r = runtime("dense")
    room = RUN.max_length - len(PROMPTS[2])
    want, state = plain(r, PROMPTS[2], room)
    got = r.generate(PROMPTS[2], max_tokens=room, drafter="mtp", drafts=7, **LOGGED)
    same_answer(got, want)
    assert_same(settled(r, 1), state)
    with pytest.raises(RequestError, match="a sequence holds 160"):
        r.generate(PROMPTS[2], max_tokens=room + 1)


def test_a_cut_on_the_host_equals_having_stopped_there():
    """What a stop string does: the loop is told after a round how many of its tokens the answer keeps."""
    from atlas_jax.decode.drafters import drafter_named
    from atlas_jax.decode.loop import Request
    from atlas_jax.decode.request import SamplingParams

    r = runtime("dense")
    want, _ = plain(r, PROMPTS[0])
    prompt = np.asarray(PROMPTS[0], np.int32)
    for keep in range(1, 8):
        request = Request(prompt, SamplingParams(max_tokens=24, stop=("x",)), np.asarray(want.token_ids))
        seen: list[int] = []

        def cut(index, tokens, keep=keep, seen=seen):
            seen.extend(tokens)
            return keep - (len(seen) - len(tokens)) if len(seen) >= keep else None

        steps = list(r.loop.decode([request], drafter_named("forced-accept"), 7, 2, cut))
        got = [t for s in steps for t in s.token_ids]
        assert got == want.token_ids[:keep] and steps[-1].finish_reason == "stop"
        state = settled(r, 1)
        _, expected = plain(r, PROMPTS[0], keep)
        assert_same(state, expected)


def test_the_drafter_layer_is_a_function_of_the_tokens():
    """Accepted rows are fed again with the target's hiddens, so its cache does not depend on what was drafted."""
    r = runtime("dense")
    states_ = []
    want, _ = plain(r, PROMPTS[0])
    for drafter, drafts in (("forced-accept", 7), ("forced-reject", 3), ("mtp", 3)):
        r.generate(PROMPTS[0], max_tokens=24, drafter=drafter, drafts=drafts, script=want.token_ids, **LOGGED)
        snapshot = settled(r, 1, drafter_layer=True)
        # the last round's rows are fed by the next one, which never came
        upto = int(snapshot.length) - 1 - drafts
        values = np.asarray(snapshot.kv.values)[-1]  # pages, heads, tokens, components
        rows = np.moveaxis(values, 2, 1).reshape(-1, values.shape[1], values.shape[3])
        states_.append(rows[1 : upto + 1])
    shortest = min(len(s) for s in states_)
    for rows in states_[1:]:
        np.testing.assert_array_equal(rows[:shortest], states_[0][:shortest])


@LONG  # tests/test_engine.py has the same of the engine
def test_numbers_that_are_not_finite_end_one_request_only():
    """Token 95 has an embedding that is not a number: whoever reads it fails, whoever runs beside it does not notice."""
    weights = dict(runtime("dense").params["params"])
    weights["head"] = weights["embedding"].T
    weights["embedding"] = weights["embedding"].at[95].set(jnp.nan)
    config = dataclasses.replace(CONFIGS["dense"], tie_word_embeddings=False)
    r = Runtime(config, runtime("dense").run, {"params": weights})
    options = dict(max_tokens=16, drafter="mtp", drafts=3, logit_bias={95: -100.0})
    clean = [[t % 90 for t in p] for p in PROMPTS]
    want = r.generate(clean, **options)
    assert all(w.finish_reason == "length" for w in want)
    got = r.generate([clean[0], [5, 95, 7], clean[2], clean[3]], **options)
    assert got[1].finish_reason == "error" and got[1].token_ids == []
    assert [got[i].token_ids for i in (0, 2, 3)] == [want[i].token_ids for i in (0, 2, 3)]
    again = r.generate(clean, **options)
    assert [g.token_ids for g in again] == [w.token_ids for w in want]


def test_counters_count():
    r = runtime("dense")
    want, _ = plain(r, PROMPTS[0])
    script = dict(script=want.token_ids, max_tokens=24, drafts=3, **LOGGED)
    right = r.generate(PROMPTS[0], drafter="forced-accept", **script).acceptance
    for counts in (right.offered, right.matched, right.reached, right.accepted):
        assert np.asarray(counts)[:3].tolist() == [6, 6, 6] and not np.asarray(counts)[3:].any()
    assert np.asarray(right.histogram).tolist()[4] == 6
    wrong = r.generate(PROMPTS[0], drafter="forced-reject", **script).acceptance
    assert wrong.steps == 24 and not np.asarray(wrong.accepted).any() and np.asarray(wrong.matched)[0] == 0
    assert np.asarray(wrong.reached)[0] == np.asarray(wrong.offered)[0] and not np.asarray(wrong.reached)[1:].any()
    some = r.generate(PROMPTS[0], drafter=ScriptedDrafter(0.5), **script).acceptance
    # position 2 is scored whether or not position 1 was right
    assert np.asarray(some.offered)[1] > np.asarray(some.reached)[1] > 0
    for part in (right, wrong, some):
        assert part.emitted == 24
        assert part.drafts_accepted in (24 - part.steps, 24 - part.steps + 1)


@pytest.mark.long
def test_synthetic_acceptance_by_place():
    """Rates hold for each place, where the drafts before were right, also while the MTP head drafts; the answer stays the same."""
    r = runtime("dense")
    want, state = plain(r, PROMPTS[0])
    script = dict(script=want.token_ids, max_tokens=24, drafts=3, **LOGGED)
    got = r.generate(PROMPTS[0], drafter=ScriptedDrafter((1.0, 0.0, 1.0), mtp=True), **script)
    same_answer(got, want)
    assert_same(settled(r, 1), state)
    assert np.asarray(got.acceptance.histogram).tolist()[:5] == [0, 0, 12, 0, 0]
    assert np.asarray(got.acceptance.accepted)[:3].tolist() == [12, 0, 0]
    rates = (0.9, 0.6, 0.3)
    accepted = [
        r.generate(PROMPTS[0], drafter=ScriptedDrafter(rates, mtp=True), seed=i, **script).acceptance for i in range(24)
    ]
    total = Acceptance.merge(accepted)
    for rate, reached, right in zip(rates, total.reached, total.accepted, strict=False):
        assert abs(right / reached - rate) < 4 * (rate * (1 - rate) / reached) ** 0.5
    for wrong in ((), (0.5, 1.5), -0.1):
        with pytest.raises(RequestError, match="acceptance"):
            ScriptedDrafter(wrong)


@dataclasses.dataclass(frozen=True)
class Alternating:
    """Drafts token 0 and says that even places came from lookup and odd ones from the MTP head."""

    name = "alternating"

    def init(self, config, run):
        return ()

    def propose(self, context, target, state, drafts):
        tokens = jnp.zeros((context.length.shape[0], drafts), jnp.int32)
        source = jnp.broadcast_to(jnp.where(jnp.arange(drafts) % 2, Source.MTP, Source.LOOKUP), tokens.shape)
        return Proposal(tokens, jnp.full(tokens.shape[0], drafts), target, state, source)


def test_counters_know_where_drafts_came_from():
    r = runtime("dense")
    r.acceptance.reset()
    got = [r.generate(PROMPTS[0], max_tokens=6, drafter=d, drafts=3, **LOGGED)
           for d in ("mtp", "random", Alternating())]  # fmt: skip
    mtp, random, both = (g.acceptance for g in got)
    assert set(mtp.by_source()) - {"plain"} == {"mtp"}  # plain: a last round with room for one token has no draft
    assert set(random.by_source()) <= {"plain", "custom"} and "custom" in random.by_source()
    parts = both.by_source()
    assert set(parts) - {"plain"} == {"mtp", "lookup"}
    assert not parts["mtp"].offered[[0, 2]].any() and not parts["lookup"].offered[1] and parts["mtp"].offered[1]
    assert parts["lookup"].steps and not parts["mtp"].steps  # a round is its first draft's
    assert r.acceptance.total().to_dict() == Acceptance.merge([mtp, random, both]).to_dict()


def test_the_log_counts_what_was_broken_off():
    r = runtime("dense")
    r.acceptance.reset()
    stream = r.stream(PROMPTS[0], max_tokens=100, drafter="mtp", drafts=3, **LOGGED)
    seen = sum(len(next(stream).token_ids) for _ in range(2))
    stream.close()
    assert r.acceptance.total().emitted >= seen
    before = r.acceptance.total()
    answer = r.generate(PROMPTS[0], max_tokens=5, drafter="mtp", drafts=3, **LOGGED)
    assert (r.acceptance.total() - before).to_dict() == answer.acceptance.to_dict()


def test_one_executable_per_row_count_and_no_second_trace(count_traces):
    r = runtime("dense")
    r.generate(PROMPTS[0], max_tokens=6, drafter="mtp", drafts=3, **LOGGED)
    with count_traces() as traces:
        for prompt in (PROMPTS[0], PROMPTS[0][:5]):
            r.generate(prompt, max_tokens=12, drafter="mtp", drafts=3, **LOGGED)
            r.generate(prompt, max_tokens=12, drafter="mtp", drafts=3, **SAMPLED, **LOGGED)
    assert not {k: v for k, v in traces.items() if k in ("dispatch", "prefill", "open_slot", "start_slot")}, traces


def test_state_is_updated_in_place():
    r = runtime("dense")
    r.generate(PROMPTS[0], max_tokens=2, drafter="mtp", drafts=3, **LOGGED)
    state_bytes = sum(x.nbytes for x in jax.tree.leaves(r.loop._state))
    decode = [c.result() for key, c in r.loop.executables._compiled.items() if key[0] == "decode"]
    assert decode and all(c.memory_analysis().alias_size_in_bytes >= state_bytes for c in decode)


def test_closing_a_stream_leaves_a_usable_runtime():
    r = runtime("dense")
    want, _ = plain(r, PROMPTS[0])
    stream = r.stream(PROMPTS[0], max_tokens=100, drafter="mtp", drafts=3, **LOGGED)
    next(stream)
    stream.close()
    got = r.generate(PROMPTS[0], max_tokens=24, drafter="mtp", drafts=3, **LOGGED)
    same_answer(got, want)


def test_rounds_per_dispatch_do_not_matter():
    want, _ = plain(runtime("dense"), PROMPTS[0])
    r = Runtime(
        CONFIGS["dense"], dataclasses.replace(runtime("dense").run, rounds_per_dispatch=1), runtime("dense").params
    )
    got = r.generate(PROMPTS[0], max_tokens=24, drafter="mtp", drafts=3, **LOGGED)
    same_answer(got, want)
