"""Law 4: a warm turn equals the cold run of the same tokens, bit for bit: tokens, log-probabilities, what was drafted and every
leaf of the settled state with the drafter's layer, wherever histories part, however the turn before ended, whatever was evicted."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CONFIGS, assert_same, params_of

from atlas_jax import state as states
from atlas_jax.cache.budget import budget
from atlas_jax.config import FULL, LINEAR, RunConfig
from atlas_jax.decode.drafters import drafter_named
from atlas_jax.decode.loop import Request
from atlas_jax.decode.request import SamplingParams
from atlas_jax.errors import ConfigError
from atlas_jax.runtime import Runtime
from atlas_jax.state import pool

CONFIG = dataclasses.replace(CONFIGS["dense"], layer_types=(LINEAR, FULL))
RUN = RunConfig(
    slots=2, max_length=256, max_drafts=3, row_group=4, page_size=8, prefill_chunk=16, snapshot_interval=32,
    page_cache_bytes=0, rounds_per_dispatch=4,
)  # fmt: skip
OFF: dict[str, Any] = dict(prefix_cache=False, page_cache_bytes=None, snapshot_interval=None)
SNAPSHOT = budget(CONFIG, RUN).snapshot_bytes
TOKENS = np.random.default_rng(3).integers(0, 96, 400).tolist()
ASKED: dict[str, Any] = dict(max_tokens=6, drafter="mtp", drafts=3, logprobs=True, top_logprobs=2)


@functools.cache
def params():
    return params_of(CONFIG, RUN)


def runtime(**changes: Any) -> Runtime:
    """One a test: what is cached is the test's own. What is compiled is shared where the arrays have the same shapes."""
    r = Runtime(CONFIG, dataclasses.replace(RUN, **changes), params())
    shapes = ("page_size", "prefill_chunk", "max_length")
    r.loop.executables._compiled = _executables(*(getattr(r.run, name) for name in shapes))
    assert r.loop.cache.budget.spare_pages == 0
    return r


@functools.cache
def _executables(*shapes: int) -> Any:
    return {}


@functools.cache
def _snapshot():
    return jax.jit(states.snapshot)


def settled(r: Runtime, slot: int = 1):
    state = r.loop._state
    assert state is not None
    return jax.device_get(_snapshot()(state.target, jnp.int32(slot)))


@functools.cache
def _cold() -> Runtime:
    return runtime()


@functools.cache
def cold(prompt: tuple[int, ...], **options: Any):
    """Answer and state of a run that finds nothing."""
    r = _cold()
    r.loop.cache.reset()
    answer = r.generate(list(prompt), **ASKED | options)
    assert answer.restored == answer.matched == 0
    return answer, settled(r)


def same(got: Any, want: Any) -> None:
    for name in ("token_ids", "finish_reason", "logprobs", "top_logprobs"):
        assert getattr(got, name) == getattr(want, name), name
    assert got.acceptance.to_dict() == want.acceptance.to_dict()


def check(r: Runtime, prompt: list[int], **options: Any):
    """Asks a runtime that may know part of the prompt; the answer and the state must be those of a cold run."""
    got = r.generate(prompt, **ASKED | options)
    want, state = cold(tuple(prompt), **options)
    same(got, want)
    assert_same(settled(r), state)
    assert got.restored <= got.matched < got.prompt_tokens == got.restored + got.replayed
    whole(r)
    return got


def whole(r: Runtime) -> None:
    """Between requests pages are held by the tree alone, each node's once, and rows of snapshots belong to nodes of the tree."""
    cache = r.loop.cache
    nodes = list(cache.tree)
    held = {node.page for node in nodes}
    assert len(held) == len(nodes) and 0 not in held
    for page in range(1, cache.pages.total + 1):
        assert cache.pages.holders(page) == (page in held)
    assert cache.pages.free + len(nodes) == cache.pages.total
    store = cache.snapshots
    assert {*store._device, *store._host} <= {*nodes} and not {*store._device} & {*store._host}
    assert sorted([*store._device.values(), *store._free]) == list(range(store.rows))
    assert not any(node.users for node in nodes)


# ---- warm equals cold


def test_every_length_and_every_split():
    """The prompt's first part was asked before, with every snapshot that there can be, and with none beyond each of them."""
    r = runtime()
    for length in [*range(1, 36), 47, 48, 49, 50, 63, 64, 65, 66, 80, 81]:
        prompt = TOKENS[:length]
        for known in range(16, length, 16):
            r.loop.cache.reset()
            other = r.generate(prompt[:known] + TOKENS[200:203], **ASKED)
            assert other.restored == 0
            got = check(r, prompt)
            assert got.restored == known and got.matched == known
            again = check(r, prompt)
            assert again.restored == (length - 1) // 16 * 16
        if length <= 16:
            assert check(r, prompt).restored == check(r, prompt).restored == 0


@pytest.mark.long
def test_a_second_request_for_the_same_200_tokens_computes_a_tenth():
    r = runtime()
    first, second = (r.generate(TOKENS[:200], **ASKED) for _ in range(2))
    same(second, first)
    assert second.restored == 192 and second.replayed == 8


@pytest.mark.long
def test_pages_chunks_and_intervals_that_differ():
    """An interval is a generator: chunks end where snapshots are due, here at 24, 32, 48, 64, 72 and 96; pages at every third."""
    r = runtime(page_size=32, prefill_chunk=24, snapshot_interval=32, max_length=96)
    ask = functools.partial(r.generate, max_tokens=4, drafter="none")

    def prompt_state(length: int) -> Any:
        """Without the drafter's rows that a decode without a drafter leaves unwritten."""
        state = settled(r)
        rows = np.arange(96).reshape(3, 1, 1, 32) < length - 1
        keys, values = state.kv.keys.copy(), state.kv.values.copy()
        keys[-1], values[-1] = np.where(rows, keys[-1], 0), np.where(np.swapaxes(rows, 2, 3), values[-1], 0)
        return keys, values, state.h, state.conv, state.hidden, state.length

    for length in (40, 70, 81):
        prompt = TOKENS[:length]
        r.loop.cache.reset()
        want, state = ask(prompt), prompt_state(length)
        for known in (20, 36, 64, 81):
            r.loop.cache.reset()
            ask(prompt[:known] + TOKENS[200:203])
            got = ask(prompt)
            same(got, want)
            assert_same(prompt_state(length), state)
            assert got.restored == min(known, length - 1) // 32 * 32
            whole(r)


@pytest.mark.long
def test_experts_in_bfloat16():
    """Rows of a chunk are sorted by expert: another way for one to depend on the others."""
    config = dataclasses.replace(CONFIGS["moe"], layer_types=(LINEAR, FULL))
    run = dataclasses.replace(RUN, dtype="bfloat16", max_length=96)
    r = Runtime(config, run, params_of(config, run))
    for length in (33, 50, 81):
        r.loop.cache.reset()
        want, state = r.generate(TOKENS[:length], **ASKED), settled(r)
        for known in (16, 32, 48, 80)[: length // 16]:
            r.loop.cache.reset()
            r.generate(TOKENS[:known] + TOKENS[200:203], **ASKED)
            got = r.generate(TOKENS[:length], **ASKED)
            same(got, want)
            assert_same(settled(r), state)
            assert got.restored == min(known, (length - 1) // 16 * 16)


def test_without_the_cache_the_answers_are_the_same():
    off = runtime(**OFF)
    for length in (20, 50, 50):
        got = off.generate(TOKENS[:length], **ASKED)
        want, state = cold(tuple(TOKENS[:length]))
        same(got, want)
        assert_same(settled(off), state)
        assert got.matched == got.restored == 0 and got.replayed == length
    assert off.cache_stats().pages_cached == off.cache_stats().snapshots == 0


@pytest.mark.long
def test_whatever_lies_in_pages_and_snapshots_before_does_not_matter():
    r = runtime()
    r.generate(TOKENS[:5], **ASKED)
    rng = np.random.default_rng(0)

    def noise(x: Any) -> Any:
        values = rng.normal(size=x.shape) * 50
        values[rng.random(x.shape) < 0.05] = np.nan
        return jnp.asarray(values, x.dtype)

    state, store = r.loop._state, r.loop.cache.snapshots
    assert state is not None and store._pool is not None
    target = dataclasses.replace(state.target, pages=jax.tree.map(noise, state.target.pages), h=noise(state.target.h))
    r.loop._state = dataclasses.replace(state, target=target)
    store._pool = dataclasses.replace(store._pool, leaves=jax.tree.map(noise, store._pool.leaves))
    for length in (40, 60, 40):
        check(r, TOKENS[:length])


# ---- turns, however the one before ended


def test_ten_turns_compute_what_is_new():
    """Append-only: at most the new tokens, the last answer, and the rest of a chunk."""
    r = runtime()
    history: list[int] = []
    got: Any = None
    for turn in range(10):
        history = history + TOKENS[200 + 9 * turn : 209 + 9 * turn]
        got = r.generate(history, **ASKED)
        assert got.replayed <= 9 + 6 + 16
        assert got.matched - got.restored < 16
        history += got.token_ids
    r.loop.cache.reset()
    same(r.generate(history[: got.prompt_tokens], **ASKED), got)


@pytest.mark.long
def test_turns_after_stops_inside_an_accepted_span():
    """What is cut off, whoever cuts it, is nowhere in what the next turn finds."""
    r = runtime()
    prompt = TOKENS[:40]
    answer = cold(tuple(prompt))[0].token_ids
    script = dict(drafter="forced-accept", drafts=3, script=answer)
    for keep in range(1, 6):
        got = r.generate(prompt, **ASKED | script, stop_token_ids=(answer[keep - 1],))
        assert got.finish_reason == "stop"
        check(r, prompt + got.token_ids + TOKENS[300:310])

        request = Request(np.asarray(prompt, np.int32), SamplingParams(max_tokens=6, stop=("x",)), np.asarray(answer))
        seen: list[int] = []

        def cut(index, tokens, keep=keep, seen=seen):
            seen.extend(tokens)
            return keep - (len(seen) - len(tokens)) if len(seen) >= keep else None

        list(r.loop.decode([request], drafter_named("forced-accept"), 3, 2, cut))
        whole(r)
        check(r, prompt + answer[:keep] + TOKENS[320:330])


@pytest.mark.long
@pytest.mark.parametrize("ending", ["closed", "abandoned", "raised"])
def test_turns_after_streams_that_were_not_read_to_the_end(ending):
    r = runtime()
    for length in (40, 50):
        stream = r.stream(TOKENS[:length], **ASKED | dict(max_tokens=30))
        next(stream)
        if ending == "closed":
            stream.close()
        elif ending == "raised":
            with pytest.raises(KeyError):
                stream.throw(KeyError("mine"))
        del stream
        whole(r)
        got = check(r, TOKENS[:length] + TOKENS[300:310])
        assert got.restored >= (length - 1) // 16 * 16


@pytest.mark.long
def test_a_call_that_fails_before_it_runs_costs_nothing():
    @dataclasses.dataclass(frozen=True)
    class Broken:
        name = "broken"

        def init(self, config, run):
            return ()

        def propose(self, *_: Any):
            raise KeyError("mine")

    r = runtime()
    check(r, TOKENS[:40])
    with pytest.raises(KeyError, match="mine"):
        r.generate(TOKENS[:40], **ASKED | dict(drafter=Broken()))
    assert check(r, TOKENS[:40]).restored == 32


def test_a_lost_state_is_a_cold_start():
    """Also if what finds it lost is the first step of a prompt, which nothing runs beside."""
    r = runtime()
    check(r, TOKENS[:40])
    state = r.loop._state
    assert state is not None
    for leaf in jax.tree.leaves(state):
        leaf.delete()  # as a step that fails half-way leaves it
    with pytest.raises(Exception, match="deleted"):
        r.generate(TOKENS[:40], **ASKED)
    assert check(r, TOKENS[:40]).restored == 0
    assert check(r, TOKENS[:40]).restored == 32


@pytest.mark.long
def test_one_batch_shares_what_its_first_prompt_brings():
    r = runtime()
    prompts = [TOKENS[:40], TOKENS[:33] + TOKENS[300:320]]
    got = r.generate(prompts, **ASKED)
    assert [g.restored for g in got] == [0, 32]
    for i, prompt in enumerate(prompts):
        want, state = cold(tuple(prompt))
        same(got[i], want)
        assert_same(settled(r, i + 1), state)
    table = np.asarray(r.loop._state.target.page_table)  # pyright: ignore[reportOptionalMemberAccess]
    assert (table[1, :4] == table[2, :4]).all() and {*table[1, 4:]} & {*table[2, 4:]} == {0}
    whole(r)


# ---- room


@pytest.mark.long
@pytest.mark.parametrize("changes", [dict(), dict(snapshot_bytes=0), dict(snapshot_bytes=2 * SNAPSHOT),
                                     dict(snapshot_bytes=SNAPSHOT, host_snapshot_bytes=2 * SNAPSHOT)],
                         ids=["full", "none", "two", "one and two on the host"])  # fmt: skip
def test_any_history_of_requests_in_little_room(changes):
    """Forked, repeated and foreign prompts, some abandoned, some spoilt on the way: always the cold run's bits, never an error."""
    r = runtime(**changes)
    step = st.tuples(
        st.sampled_from([0, 0, 1, 2]), st.integers(1, 12), st.integers(0, 2), st.sampled_from(["ask", "ask", "close", "spoil"])
    )  # fmt: skip

    @settings(max_examples=6)
    @given(st.lists(step, min_size=3, max_size=10))
    def history(steps):
        r.loop.cache.reset()
        for text, chunks, tail, what in steps:
            prompt = TOKENS[100 * text :][: 16 * chunks - 5] + TOKENS[390 : 390 + tail]
            if what == "close":
                stream = r.stream(prompt, **ASKED | dict(max_tokens=12))
                next(stream)
                stream.close()
            elif what == "spoil" and r.loop.cache.snapshots.on_device:
                spoil(r, list(r.loop.cache.snapshots._device.values())[tail % r.loop.cache.snapshots.on_device])
            else:
                check(r, prompt)
            whole(r)
            assert r.loop.cache.snapshots.on_device <= r.loop.cache.budget.snapshots

    history()


@pytest.mark.long
def test_the_entry_in_use_survives_and_the_oldest_goes():
    r = runtime(snapshot_bytes=3 * SNAPSHOT)
    hot = TOKENS[:40]
    check(r, hot)
    for i in range(8):
        check(r, TOKENS[100 + 20 * i : 118 + 20 * i])
        assert check(r, hot).restored == 32
    assert check(r, TOKENS[100:118]).restored == 0
    assert r.cache_stats().evicted > 0


@pytest.mark.long
def test_an_open_sessions_entry_goes_last():
    r = runtime(snapshot_bytes=2 * SNAPSHOT)
    session = r.session(TOKENS[:30], **ASKED)
    session.send(TOKENS[30:35])
    for i in range(4):
        check(r, TOKENS[100 + 20 * i : 118 + 20 * i])
    assert session.send(TOKENS[35:40]).restored == 32
    session.close()
    for i in range(4):
        check(r, TOKENS[100 + 20 * i : 118 + 20 * i])
    assert session.send(TOKENS[40:45]).restored == 0


@pytest.mark.long
def test_a_host_tier_brings_snapshots_back():
    r = runtime(snapshot_bytes=SNAPSHOT, host_snapshot_bytes=4 * SNAPSHOT)
    found: list[int] = []
    for _ in range(2):
        found = [check(r, text).restored for text in (TOKENS[:40], TOKENS[100:140])]
    assert found == [32, 32] and r.cache_stats().host_snapshots_used > 0


# ---- entries that cannot be trusted


def spoil(r: Runtime, row: int, how: str = "nan") -> None:
    store = r.loop.cache.snapshots
    assert store._pool is not None
    leaves, length = dict(store._pool.leaves), store._pool.length
    if how == "nan":
        leaves["h"] = leaves["h"].at[0, row, 0, 0, 0].set(jnp.nan)
    elif how == "bit":
        leaves["hidden"] = leaves["hidden"].at[row, 0].add(1e-3)
    else:
        length = length.at[row].add(16)
    store._pool = dataclasses.replace(store._pool, leaves=leaves, length=length)


@pytest.mark.parametrize("how", ["nan", "bit", "label"])
def test_a_spoilt_snapshot_is_a_miss(how):
    r = runtime()
    prompt = TOKENS[:60]
    check(r, prompt)
    store = r.loop.cache.snapshots
    spoil(r, max((node.depth, row) for node, row in store._device.items())[1], how)
    got = check(r, prompt)
    assert got.restored == 32 and r.cache_stats().poisoned == 1  # the one before it is sound
    assert check(r, prompt).restored == 48 and r.cache_stats().poisoned == 1


@pytest.mark.long
def test_a_spoilt_host_copy_is_a_miss():
    r = runtime(snapshot_bytes=SNAPSHOT, host_snapshot_bytes=4 * SNAPSHOT)
    store = r.loop.cache.snapshots
    hidden = lambda x, y: x._replace(leaves=x.leaves | dict(hidden=y(x.leaves["hidden"])))  # noqa: E731
    for change in (lambda x: x + 1, lambda x: x.astype(np.float16), lambda x: x[:-1]):
        for text in (TOKENS[:20], TOKENS[100:120]):
            check(r, text)
        for node, saved in list(store._host.items()):
            store._host[node] = hidden(saved, change)
        before = store.poisoned
        assert check(r, TOKENS[:20]).restored == 0
        assert store.poisoned == before + 1
        assert check(r, TOKENS[:20]).restored == 16


@pytest.mark.long
@pytest.mark.parametrize("layer", [0, 1], ids=["target", "drafter"])
def test_spoilt_pages_fail_one_request_at_most(layer):
    """Nobody checks pages before use; an answer that they spoil ends with an error and takes them out of the tree."""
    r = runtime()
    prompt = TOKENS[:60]
    check(r, prompt)
    state = r.loop._state
    assert state is not None
    page = next(iter(r.loop.cache.tree.root.children.values())).page
    values = state.target.pages.values.at[layer, page, 0, 3].set(jnp.nan)
    pages = state.target.pages._replace(values=values)
    r.loop._state = dataclasses.replace(state, target=dataclasses.replace(state.target, pages=pages))
    got = r.generate(prompt, **ASKED)
    if layer == 0:
        assert got.finish_reason == "error" and got.restored == 48
        whole(r)
        assert check(r, prompt).restored == 0
        assert check(r, prompt).restored == 48
    else:  # drafts alone are spoilt, and the output is the target's
        assert got.token_ids == cold(tuple(prompt))[0].token_ids


@pytest.mark.long
def test_a_snapshot_is_the_state_at_its_label_and_stays_so():
    """Labels say what was covered; decoding on, in the slot that it was taken from, changes no bit of it."""
    r = runtime()
    check(r, TOKENS[:60], max_tokens=30)
    store = r.loop.cache.snapshots
    rows = {node.depth * 8: row for node, row in store._device.items()}
    assert sorted(rows) == [32, 48]
    kept = jax.device_get(store._pool)
    r.generate(TOKENS[:60], **ASKED | dict(max_tokens=30))
    assert_same(jax.device_get(store._pool), kept)
    other = _cold()
    for label, row in rows.items():
        assert kept.length[row] == label
        other.loop.cache.reset()
        other.generate(TOKENS[: label + 1], **ASKED | dict(max_tokens=1))
        again: Any = other.loop.cache.snapshots
        node = next(node for node in again._device if node.depth * 8 == label)
        for name, axis in pool.SETTLED.items():
            assert_same(
                np.take(kept.leaves[name], row, axis),
                np.take(np.asarray(again._pool.leaves[name]), again._device[node], axis),
            )


def test_snapshots_hold_all_that_a_sequence_carries():
    """A new leaf of the state must be named: either snapshots hold it, or it is known to be worthless in a settled sequence."""
    known = {"pages", "slots"}
    fields = {f.name for f in dataclasses.fields(states.TargetState)}
    assert fields - {n for n in fields if n.startswith("journal_")} - known == set(pool.SETTLED)


# ---- settings and figures


@pytest.mark.parametrize(
    ("changes", "says"),
    [(dict(snapshot_interval=20), "multiple of the page size 8"), (dict(snapshot_interval=0), "at least 1"),
     (dict(snapshot_bytes=-1), "at least 0"), (dict(OFF, host_snapshot_bytes=5), "prefix_cache=False keeps nothing"),
     (dict(OFF, snapshot_bytes=5), "prefix_cache=False keeps nothing"),
     (dict(snapshot_bytes=0, host_snapshot_bytes=9), "host_snapshot_bytes needs snapshot_bytes")],
    ids=str,
)  # fmt: skip
def test_settings_that_cannot_work(changes, says):
    with pytest.raises(ConfigError, match=says):
        dataclasses.replace(RUN, **changes)


def test_figures():
    r = runtime()
    first, second = (r.generate(TOKENS[:45], **ASKED) for _ in range(2))
    third = r.generate(TOKENS[:30] + TOKENS[300:310], **ASKED)
    assert (first.matched, second.matched, second.restored, second.replayed) == (0, 32, 32, 13)
    assert (third.matched, third.restored, third.replayed) == (24, 0, 40)
    assert third.to_dict()["reuse"]["granularity_share"] == 24 / 40
    stats = r.cache_stats()
    assert (stats.requests, stats.hits) == (3, 1)
    assert stats.reuse == first.reuse + second.reuse + third.reuse
    assert stats.hit_share == 32 / 130
    assert stats.to_dict()["reuse"]["replayed"] == 98
    assert "prefix cache of" in r.in_force and "drafter context full" in r.in_force
