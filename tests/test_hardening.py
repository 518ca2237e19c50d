"""Callers that err: whatever they give, the answer is right or a typed error in one line, and the next request is not harmed."""

from __future__ import annotations

import dataclasses
import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from models import CONFIGS, RUN, assert_same, params_of, steps

import atlas_jax
from atlas_jax.config import FULL, LINEAR, Probes, RunConfig
from atlas_jax.decode.drafters import Proposal
from atlas_jax.errors import ConfigError, RequestError, StateError
from atlas_jax.runtime import Runtime, is_batch
from atlas_jax.state import commit_guard, verify_guard
from pallas_kernels.linear import linear

PROMPT = [5, 6, 7]
OPTIONS: dict[str, Any] = dict(max_tokens=6)


@pytest.fixture(autouse=True)
def unchecked():
    """Callers have no annotations checked for them, so neither have these tests."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@functools.cache
def runtime() -> Runtime:
    config = dataclasses.replace(CONFIGS["dense"], layer_types=(LINEAR, FULL))
    run = dataclasses.replace(RUN, rounds_per_dispatch=4, max_drafts=3, max_length=64)
    return Runtime(config, run, params_of(config, run))


@functools.cache
def plain() -> list[int]:
    return runtime().generate(PROMPT, drafter="none", **OPTIONS).token_ids


def refused(says: str, prompt: Any = PROMPT, **options: Any) -> None:
    with pytest.raises(RequestError, match=says) as error:
        runtime().generate(prompt, **OPTIONS | options)
    assert "\n" not in str(error.value)
    assert runtime().generate(PROMPT, drafter="none", **OPTIONS).token_ids == plain()


# ---- prompts and options


@pytest.mark.parametrize(
    "prompt",
    [None, 5, 1.5, b"abc", bytearray(b"ab"), {"role": "user"}, {1, 2}, iter([1]), np.array(3), np.ones((2, 2), int), [1.5],
     np.ones(2), [True], [1, "a"], [[1], 5], ["a", None], [[[1]]], [b"a"], int],
    ids=lambda value: type(value).__name__,  # a repr may hold an address, which differs from worker to worker
)  # fmt: skip
def test_prompts_of_other_types(prompt):
    refused("a prompt is text|no tokenizer", prompt)


def test_arrays_are_prompts():
    for make in (np.asarray, jnp.asarray, functools.partial(np.asarray, dtype=np.uint8), tuple):
        assert runtime().generate(make(PROMPT), drafter="none", **OPTIONS).token_ids == plain()
        assert is_batch([make(PROMPT)])


def test_stops_alone_and_in_arrays():
    stop = plain()[1]
    for value in (stop, np.int64(stop), np.array([stop]), [np.uint8(stop)], {stop}):
        got = runtime().generate(PROMPT, drafter="none", stop_token_ids=value, **OPTIONS)
        assert got.token_ids == plain()[: plain().index(stop) + 1] and got.finish_reason == "stop"
    for value in (5.5, object(), np.array(5), [[5]], b"5", {5: 5}):
        refused("stop_token_ids", stop_token_ids=value)
    for value in (object(), 5, b"a", {"a": 1}):
        refused("stop", stop=value)


def test_chat_options_need_a_chat():
    refused("belong to a chat", tools=[])
    refused("belong to a chat", enable_thinking=False)


def test_the_smallest_top_p_keeps_one_token():
    """It must not round to zero, which stands for no filter."""
    sampled = dict(temperature=5.0, drafter="none", seed=3, **OPTIONS)
    assert runtime().generate(PROMPT, **sampled).token_ids != plain()
    assert runtime().generate(PROMPT, top_p=1e-300, **sampled).token_ids == plain()


@pytest.mark.parametrize(
    "field",
    [
        dict(row_group=12),
        dict(row_group=2),
        dict(slots=1.5),
        dict(max_length="600"),
        dict(page_size=True),
        dict(max_drafts=None),
        dict(layout="rows"),
        dict(drafter_context="carry"),
        dict(refeed="no"),
        dict(prefix_cache=1),
        dict(snapshot_bytes=1.5),
        dict(snapshot_interval=100),
    ],
)
def test_run_configurations_of_other_types(field):
    with pytest.raises(ConfigError, match=next(iter(field))):
        RunConfig(**field)


@pytest.mark.parametrize("field", [dict(shift=-1), dict(shift=1.5), dict(shift=True), dict(fingerprints=1)])
def test_probes_of_other_types(field):
    with pytest.raises(ConfigError, match=next(iter(field))):
        Probes(**field)
    with pytest.raises(ConfigError, match="must be a Probes"):
        RunConfig(probes=field)


def test_load_names_unknown_options():
    with pytest.raises(ConfigError, match=r"page_sise.*page_size"):
        atlas_jax.load("tiny-agent", page_sise=7)


@pytest.mark.parametrize("columns", [1, 2, 6])
def test_narrow_products_do_not_know_a_rows_place(columns):
    """Such as the gate of a shared expert, one column wide."""
    rng = np.random.default_rng(0)
    for group in (4, 8, 16):
        for depth in (64, 100, 256):
            x, weight = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((1, depth), (depth, columns)))
            y = np.asarray(jax.jit(linear)(jnp.tile(x, (group, 1)), weight))
            np.testing.assert_array_equal(y, np.tile(y[:1], (group, 1)))


# ---- drafters


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Proposes `count` times one token. Both are in the state, so that one executable serves them all."""

    token: Any = dataclasses.field(default=5, compare=False)
    count: Any = dataclasses.field(default=2, compare=False)
    kind: str = "int32"
    width: int = 0
    shape: tuple[int, ...] = dataclasses.field(default=(), compare=False)
    spoil: str = ""
    name = "fixed"

    def init(self, config, run):
        return np.int32(self.token), self.count, _zeros(self.shape)

    def propose(self, context, target, state, drafts):
        B = context.slots.shape[0]
        if self.spoil == "raises":
            raise KeyError("mine")
        if self.spoil == "target":
            every = jnp.arange(target.base.shape[0])
            target = dataclasses.replace(target.put(every, base=target.base + 1), h=target.h + 1)
        tokens = jnp.full((B, drafts + self.width), state[0]).astype(self.kind)
        count = jnp.full(B, state[1])
        source: Any = {"sources": jnp.full((B, drafts), 99), "real sources": jnp.zeros((B, drafts))}.get(self.spoil)
        return Proposal(tokens, count, target, state[:2] if self.spoil == "state" else state, source)


@functools.cache
def _zeros(shape):
    """The same array at every call, although what is donated is gone."""
    return jnp.zeros(shape)


@pytest.mark.parametrize(
    "drafter",
    [Fixed(token=96), Fixed(token=-1), Fixed(token=2**31 - 1), Fixed(token=-(2**31)), Fixed(count=-1), Fixed(count=100),
     Fixed(count=2**31 - 1), Fixed(count=-(2**31)), Fixed(kind="int8", spoil="target"),
     Fixed(shape=(3,)), Fixed(spoil="sources")],
    ids=lambda value: type(value).__name__,  # a repr may hold an address, which differs from worker to worker
)  # fmt: skip
def test_no_proposal_changes_the_output(drafter):
    for prompt in (PROMPT, PROMPT):  # the second request finds what the first left
        assert runtime().generate(prompt, drafter=drafter, drafts=2, **OPTIONS).token_ids == plain()


@pytest.mark.parametrize(
    ("drafter", "says"),
    [(Fixed(kind="float32"), "integers"), (Fixed(count=1.5), "integers"), (Fixed(width=1), r"tokens \(1, 2\)"),
     (Fixed(width=-1), r"tokens \(1, 2\)"), (Fixed(spoil="state"), "like that of init"),
     (Fixed(spoil="real sources"), "members of Source")],
    ids=lambda value: type(value).__name__,  # a repr may hold an address, which differs from worker to worker
)  # fmt: skip
def test_proposals_of_another_form_are_refused(drafter, says):
    refused(says, drafter=drafter, drafts=2)


def test_objects_that_are_no_drafters():
    @dataclasses.dataclass
    class Unhashable:
        name = "unhashable"
        init, propose = Fixed.init, Fixed.propose

    class Nameless:
        init, propose = Fixed.init, Fixed.propose

    class WithoutInit:
        name, propose = "x", Fixed.propose

    unhashable: Any = []
    for drafter in (Unhashable(), Fixed(kind=unhashable), Nameless(), WithoutInit(), Fixed, 5, b"mtp"):
        refused("drafter is one of", drafter=drafter)


def test_what_a_drafter_raises_reaches_the_caller():
    with pytest.raises(KeyError, match="mine"):
        runtime().generate(PROMPT, drafter=Fixed(spoil="raises"), drafts=2, **OPTIONS)
    assert runtime().generate(PROMPT, drafter="none", **OPTIONS).token_ids == plain()


# ---- calls beside a stream


def test_a_call_inside_ones_own_stream_is_refused():
    options = dict(drafter="none", max_tokens=40)
    stream = runtime().stream(PROMPT, **options)
    next(stream)
    refuse = functools.partial(pytest.raises, RequestError, match="has a stream")
    with refuse():
        runtime().generate(PROMPT, **options)
    with refuse():
        next(runtime().stream(PROMPT, **options))
    with refuse():
        runtime().logits(PROMPT)
    rest = [token for delta in stream for token in delta.token_ids]
    assert rest[-5:] == runtime().generate(PROMPT, **options).token_ids[-5:]


def test_a_call_of_another_thread_waits():
    stream: Any = runtime().stream(PROMPT, drafter="none", max_tokens=40)
    next(stream)
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(runtime().generate(PROMPT, drafter="none", **OPTIONS)))
    thread.start()
    assert not got
    stream.close()
    thread.join(60)
    assert got[0].token_ids == plain()


# ---- the functional layer


@pytest.mark.parametrize("n", [-1, 5, 2**31 - 1, -(2**31)])
def test_row_counts_out_of_bounds_run_no_row(n):
    s = steps("dense")
    hidden, state = s.verify(s.init(), [1, 2], [[5] * 4, [6] * 4], [n, 3])[1:]
    assert state.ok.tolist()[1:3] == [False, True] and state.rows.tolist()[1:3] == [0, 3]
    state = s.commit(state, jnp.asarray([1, 2]), jnp.asarray([0, 3]), hidden)
    want = s.verify(s.init(), [1, 2], [[5] * 4, [6] * 4], [0, 3])[1:]
    want = s.commit(want[1], jnp.asarray([1, 2]), jnp.asarray([0, 3]), want[0])
    assert_same(s.snapshot(state, jnp.int32(2)), s.snapshot(want, jnp.int32(2)))


def test_a_full_or_unsettled_slot_takes_no_more():
    s = steps("dense")
    state = s.init()
    for _ in range(RUN.max_length // 32):
        state = s.prefill(state, 1, [7] * 32, 32)[2]
    kept = s.snapshot(state, jnp.int32(1))
    state = s.prefill(state, 1, [7] * 32, 1)[2]
    assert state.ok.tolist()[1:] == [False, True, True, True]
    assert_same(dataclasses.replace(s.snapshot(state, jnp.int32(1)), ok=kept.ok), kept)
    hidden, state = s.verify(state, [1, 2], [[5] * 4, [6] * 4], [1, 3])[1:]
    assert state.rows.tolist()[1:3] == [0, 3]
    state = s.commit(state, jnp.asarray([1, 2]), jnp.asarray([0, 3]), hidden)
    state = s.prefill(state, 2, [7] * 32, 32)[2]  # three rows are pending
    assert not state.ok[2] and state.length.tolist()[1:3] == [RUN.max_length, 3]


def test_guards_name_the_number():
    state = steps("dense").init()
    with pytest.raises(StateError, match="tokens"):
        verify_guard(state, [1], [5], [1], 96)
    with pytest.raises(StateError, match=r"\[1\]"):
        commit_guard(state, [1], [1])
