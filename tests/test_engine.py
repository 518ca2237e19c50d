"""The engine: whoever comes, goes or fails beside it, a request's tokens are those of its solo run, and nothing leaks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import itertools
import random
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from models import CONFIGS, RUN, params_of

from atlas_jax.cache.pages import PagePool
from atlas_jax.completion import Delta
from atlas_jax.config import FULL, LINEAR
from atlas_jax.decode.drafters import NoDrafter
from atlas_jax.decode.group import Group
from atlas_jax.engine import warm_up
from atlas_jax.engine.api import (
    Cancelled,
    DeadlineExceeded,
    EngineConfig,
    EngineFull,
    EngineStopping,
    StepFailed,
)
from atlas_jax.engine.engine import Engine
from atlas_jax.engine.ticket import Ticket
from atlas_jax.errors import ConfigError, RequestError
from atlas_jax.runtime import Runtime
from atlas_jax.text.tokenizer import Tokenizer

CONFIG = dataclasses.replace(CONFIGS["dense"], layer_types=(LINEAR, FULL))
SMALL = dataclasses.replace(RUN, max_drafts=3, rounds_per_dispatch=4)
TOKENS = np.random.default_rng(7).integers(0, 96, 400).tolist()
LOGGED = dict(logprobs=True, top_logprobs=20)
SAMPLED: dict[str, Any] = dict(temperature=0.9, top_k=40, top_p=0.95, presence_penalty=0.5, seed=11)


class Letters(Tokenizer):
    """Token i is one character."""

    def __init__(self) -> None:
        pass

    def encode(self, text: str) -> list[int]:
        return [ord(c) - 32 for c in text]

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(32 + t) for t in token_ids)

    def stream(self, *, skip_special_tokens: bool = True) -> Any:
        return self

    def push(self, token: int) -> str:
        return chr(32 + token)

    def flush(self) -> str:
        return ""


@functools.cache
def runtime() -> Runtime:
    return Runtime(CONFIG, SMALL, params_of(CONFIG, SMALL), Letters())


@functools.cache
def solo(prompt: tuple[int, ...], **options: Any) -> Any:
    """Plain decoding, alone. Must be asked for before an engine has the runtime."""
    return runtime().generate([*prompt], drafter="none", **LOGGED, **options)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(runtime(), EngineConfig(buckets=(4,))) as engine:
        yield engine
        assert engine.drain(30)
        assert engine.state == "draining"
        nothing_held(engine)


def nothing_held(engine: Engine) -> None:
    """All slots are free, and pages are held by the tree alone."""
    loop = runtime().loop
    stats = engine.stats()
    assert stats.running == stats.waiting == 0 and stats.in_flight == []
    assert sorted(loop._free) == list(range(1, SMALL.slots + 1))
    assert not loop._lives and not loop._drafters and not loop._users
    pages: PagePool = loop.cache.pages
    assert pages.free + len(loop.cache.tree) == pages.total
    assert not any(node.users for node in loop.cache.tree)


def ids(ticket: Ticket) -> list[int]:
    return [t for delta in ticket for t in delta.token_ids]


# ---- law 1


def test_staggered_requests_with_cancels_equal_their_solo_runs():
    rng = random.Random(3)
    kinds: list[dict[str, Any]] = [{}, dict(temperature=0.9, seed=5), SAMPLED, {}]
    cases = []
    for i in range(18):
        prompt = tuple(TOKENS[rng.randrange(20) : rng.randrange(21, 110)])
        options = kinds[i % 4] | dict(max_tokens=rng.randrange(1, 40))
        if i % 4 == 3:  # a stop that is met
            text = solo(prompt, **options).text
            options["stop"] = ("never", text[len(text) // 2 :][:2])
        cases.append((prompt, options, solo(prompt, **options)))
    asks: list[dict[str, Any]] = [{}, LOGGED, dict(drafter="none")]
    with Engine(runtime(), EngineConfig(buckets=(4,), drafts=3)) as engine:
        for kind in asks:  # so that all of them are compiled when it begins
            engine.submit(engine.request(TOKENS[:3], max_tokens=1, **kind)).result(300)
        tickets = []
        for i, (prompt, options, _) in enumerate(cases):
            tickets.append(engine.submit(engine.request([*prompt], **options | asks[i % 3])))
            time.sleep(rng.random() * 0.02)
            if i % 6 == 4:
                tickets[i].cancel()
        for i, (ticket, (_, _, want)) in enumerate(zip(tickets, cases, strict=True)):
            if i % 6 == 4:
                try:
                    got = ids(ticket)
                except Cancelled as cancelled:
                    got = cancelled.completion.token_ids if cancelled.completion else []
                assert got == want.token_ids[: len(got)]
                continue
            deltas = [*ticket]
            assert [t for delta in deltas for t in delta.token_ids] == want.token_ids
            assert "".join(delta.text for delta in deltas) == want.text == ticket.result().text
            assert deltas[-1].finish_reason == want.finish_reason and deltas[-1].completion is ticket.completion
            if asks[i % 3] is LOGGED:
                assert ticket.result().logprobs == want.logprobs and ticket.result().top_logprobs == want.top_logprobs
                assert [p for delta in deltas for p in delta.logprobs or []] == want.logprobs
        finished = engine.stats().finished
        assert finished["stop"] and finished["cancelled"] and sum(finished.values()) == len(cases) + len(asks)
        nothing_held(engine)


# ---- who is next


def test_a_prompt_is_computed_between_rounds(engine, monkeypatch):
    """Never two chunks of prompts in a row while somebody is running."""
    loop, happened = runtime().loop, []
    loop.cache.reset()

    def noted(what: str, f: Any) -> Any:
        def call(*args: Any) -> Any:
            happened.append(what)
            return f(*args)

        return call

    monkeypatch.setattr(loop, "prefill", noted("chunk", loop.prefill))
    monkeypatch.setattr(loop, "dispatch", noted("rounds", loop.dispatch))
    running = engine.submit(engine.request(TOKENS[:5], max_tokens=140))
    next(running)
    others = [engine.submit(engine.request(TOKENS[i : i + 120], max_tokens=2)) for i in (10, 20)]
    for other in others:
        other.result(60)
    while_running = happened[happened.index("rounds") :]
    assert while_running.count("chunk") >= 8
    assert all(pair != ("chunk", "chunk") for pair in itertools.pairwise(while_running))
    running.cancel()


def test_priorities_and_ageing():
    from atlas_jax.completion import Answer
    from atlas_jax.engine.queue import Job, WaitingQueue, next_prompt

    r = runtime()
    queue = WaitingQueue(8, ageing_s=2.0)
    engine = Engine(r)

    def job(priority: int, submitted: float) -> Job:
        request = engine.request(TOKENS[:4], priority=priority)
        return Job(request, Ticket("x", lambda _: None), Answer(None, request.params), submitted)

    old, urgent, later = job(0, 10.0), job(2, 13.0), job(2, 13.5)
    for each in (later, urgent, old):
        queue.add(each)
    assert queue.ranked(14.0) == [urgent, later, old]
    old.submitted = 8.0  # five seconds before: two steps and a half
    assert queue.ranked(14.0) == [old, urgent, later]

    class Prompt:
        def __init__(self, left: int) -> None:
            self.left = left

    for each, left in ((old, 900), (urgent, 40), (later, 40)):
        each.live = Prompt(left)  # pyright: ignore[reportAttributeAccessIssue]
    assert next_prompt([old, urgent, later], 0) is urgent and next_prompt([old, urgent, later], 1) is old


def test_the_queue_is_bounded_and_refusals_say_so():
    r = runtime()
    engine = Engine(r, EngineConfig(buckets=(4,), max_waiting=2))
    with pytest.raises(EngineStopping, match="is stopped"):
        engine.submit(engine.request(TOKENS[:4]))
    with engine:
        with pytest.raises(RequestError, match="lent to an engine"):
            r.generate(TOKENS[:4])
        with pytest.raises(RequestError, match="lent to an engine"):
            Engine(r).start()
        long = [engine.submit(engine.request(TOKENS[:4], max_tokens=150, ignore_eos=True)) for _ in range(2)]
        tickets = long
        with pytest.raises(EngineFull, match="2 of 2 places in the queue are taken, and all 4 slots"):
            for _ in range(20):
                tickets.append(engine.submit(engine.request(TOKENS[:4], max_tokens=150, ignore_eos=True)))
        assert engine.stats().refused == 2
        for ticket in tickets:
            ticket.cancel()
        for ticket in tickets:
            with pytest.raises(Cancelled):
                ticket.result(30)
        for bad, told in (
            (dict(max_tokens=500), "a sequence holds 160"),
            (dict(deadline_s=0), "deadline_s must be None or a number above 0"),
            (dict(deadline_s=float("nan")), "deadline_s must be"),
            (dict(priority="high"), "priority must be an integer"),
            (dict(drafts=9), "drafts must be"),
            (dict(colour=1), "unknown option colour"),
        ):
            with pytest.raises(RequestError, match=told):
                engine.submit(engine.request(TOKENS[:4], **bad))
        nothing_held(engine)
        running = engine.submit(engine.request(TOKENS[:4], max_tokens=150))
        assert not engine.drain(0.0)
        with pytest.raises(EngineStopping, match="draining"):
            engine.submit(engine.request(TOKENS[:4]))
        assert engine.drain(30) and running.completion
    assert engine.state == "stopped" and r.generate(TOKENS[:4], max_tokens=2, drafter="none", **LOGGED).token_ids
    with pytest.raises(ConfigError, match="the largest must be 4"):
        Engine(r, EngineConfig(buckets=(1, 2))).start()
    assert Engine(r, EngineConfig(buckets=(4,))).drain()


def test_deadlines_end_those_that_run_and_those_that_wait():
    want = solo(tuple(TOKENS[:4]), max_tokens=150).token_ids
    with Engine(runtime(), EngineConfig(buckets=(4,))) as engine:
        _deadlines(engine, want)
        nothing_held(engine)


def _deadlines(engine: Engine, want: list[int]) -> None:
    first = [engine.submit(engine.request(TOKENS[:4], max_tokens=150, deadline_s=0.05)) for _ in range(6)]
    began = time.perf_counter()
    reached = 0
    for ticket in first:
        try:
            ticket.result(30)
        except DeadlineExceeded as error:
            reached += 1
            if error.completion:
                assert error.completion.token_ids == want[: len(error.completion.token_ids)]
    assert reached == engine.stats().finished["deadline"] and reached >= 2
    assert time.perf_counter() - began < 5


@pytest.mark.long
def test_requests_wait_for_pages():
    """Three slots' worth of pages for six slots: who fits runs, the others wait, everybody's answer is the same."""
    run = dataclasses.replace(SMALL, slots=6, kv_pages=15, page_cache_bytes=0)
    r = Runtime(CONFIG, run, params_of(CONFIG, run))
    want = [r.generate(TOKENS[:n], drafter="none", max_tokens=100 - n) for n in (9, 40, 60)]
    with pytest.raises(RequestError, match="do not fit into 15 pages together"):
        r.generate([TOKENS[:60]] * 6, drafter="none", max_tokens=90)
    with Engine(r, EngineConfig(buckets=(8,))) as engine:
        most = 0
        tickets = [engine.submit(engine.request(TOKENS[:n], max_tokens=100 - n)) for n in (9, 40, 60) * 4]
        while not all(ticket.done for ticket in tickets):
            most = max(most, engine.stats().running)
            time.sleep(0.002)
        assert [t.result().token_ids for t in tickets] == [w.token_ids for w in want] * 4
        assert 1 < most < 6
        assert r.loop.cache.pages.free + len(r.loop.cache.tree) == 15


# ---- failures


def test_numbers_that_are_not_finite_end_one_request_only(monkeypatch):
    want = solo(tuple(TOKENS[:40]), max_tokens=30)
    with Engine(runtime(), EngineConfig(buckets=(4,))) as engine:
        loop = runtime().loop
        prefill = loop.prefill

        def spoilt(lives: Any) -> Any:
            out = prefill(lives)
            for live in lives:
                if live.request.prompt.size != 13:
                    continue
                target = loop.state.target
                loop.state = dataclasses.replace(
                    loop.state, target=dataclasses.replace(target, h=target.h.at[:, live.slot].set(jnp.nan))
                )
            return out

        monkeypatch.setattr(loop, "prefill", spoilt)
        tickets = [engine.submit(engine.request(TOKENS[:n], max_tokens=30)) for n in (40, 13, 40)]
        with pytest.raises(StepFailed, match="not finite") as failed:
            raise AssertionError(ids(tickets[1]))
        assert failed.value.completion is not None and failed.value.completion.token_ids == []
        assert ids(tickets[0]) == ids(tickets[2]) == want.token_ids
        nothing_held(engine)


@dataclasses.dataclass(frozen=True)
class Broken:
    name = "broken"

    def init(self, config, run):
        return ()

    def propose(self, *_: Any):
        raise KeyError("mine")


def test_a_failed_step_ends_those_whose_state_is_in_doubt(monkeypatch, caplog):
    want = solo(tuple(TOKENS[:40]), max_tokens=30)
    with Engine(runtime(), EngineConfig(buckets=(4,))) as engine:
        loop = runtime().loop
        beside = engine.submit(engine.request(TOKENS[:40], max_tokens=30))
        broken = engine.submit(engine.request(TOKENS[:9], drafter=Broken()))
        with pytest.raises(StepFailed, match="mine"):  # found while compiling: nobody else has anything to do with it
            broken.result(60)
        assert ids(beside) == want.token_ids

        dispatch, calls = loop.dispatch, []

        def fails(*args: Any) -> Any:
            calls.append(0)
            if len(calls) == 3:
                loop.state.requests.words.delete()  # as a step that fails half-way leaves it
            return dispatch(*args)

        monkeypatch.setattr(loop, "dispatch", fails)
        tickets = [engine.submit(engine.request(TOKENS[:40], max_tokens=30)) for _ in range(6)]
        ended = []
        for ticket in tickets:
            try:
                ended.append(ids(ticket) == want.token_ids)
            except StepFailed as error:
                ended.append("deleted" in str(error))
        assert all(ended) and 1 <= engine.stats().finished["error"] - 1 <= 4 < len(calls)
        nothing_held(engine)
        assert ids(engine.submit(engine.request(TOKENS[:40], max_tokens=30))) == want.token_ids
        nothing_held(engine)


def test_an_error_of_the_engine_itself_is_not_the_end(engine, monkeypatch, caplog):
    worker = engine._worker
    admit, calls = worker._admit, []

    def fails() -> None:
        calls.append(0)
        if len(calls) == 2:
            raise ZeroDivisionError("a mistake")
        admit()

    monkeypatch.setattr(worker, "_admit", fails)
    with pytest.raises(StepFailed, match="a mistake"):
        engine.submit(engine.request(TOKENS[:4], max_tokens=100)).result(30)
    assert engine.submit(engine.request(TOKENS[:4], max_tokens=5)).result(30).token_ids


# ---- tickets


def test_async_readers_slow_readers_and_readers_that_go_away(engine):
    async def read(n: int, pause: float) -> list[int]:
        out: list[int] = []
        async for delta in engine.submit(engine.request(TOKENS[:n], max_tokens=20)):
            out += delta.token_ids
            await asyncio.sleep(pause)
        return out

    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*(read(n, pause) for n, pause in ((40, 0.0), (40, 0.05), (40, 0.2))))

    one, two, three = asyncio.run(all_of_them())
    assert one == two == three and len(one) == 20

    async def leaves() -> None:
        await anext(engine.submit(engine.request(TOKENS[:9], max_tokens=100)))

    asyncio.run(leaves())  # the event loop is closed; the request goes on
    late = engine.submit(engine.request(TOKENS[:9], max_tokens=10))
    late.result(30)
    deltas = [*late]
    assert len(deltas) == 1 and deltas[0].completion is late.completion  # joined


def test_a_ticket_gives_what_is_unread_before_its_error():
    ticket = Ticket("x", lambda _: None)
    ticket.push(Delta([1], "a"))
    ticket.push(Delta([2], "b", logprobs=[0.5]))
    ticket.fail(Cancelled("gone"))
    delta = next(ticket)
    assert (delta.token_ids, delta.text, delta.logprobs) == ([1, 2], "ab", [0.5])
    with pytest.raises(Cancelled):
        next(ticket)
    with pytest.raises(StopIteration):
        next(ticket)
    with pytest.raises(TimeoutError):
        Ticket("y", lambda _: None).result(0.0)


# ---- score


def test_scores_are_those_of_the_logits():
    r = runtime()
    logits = r.logits(TOKENS[:75]).astype(np.float64)[:-1]
    want = (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )
    chosen = want[np.arange(74), TOKENS[1:75]]
    with Engine(r, EngineConfig(buckets=(4,))) as engine:
        running = engine.submit(engine.request(TOKENS[:5], max_tokens=100))
        score = engine.score(TOKENS[:75], top_logprobs=2, timeout=120)
        assert score.token_ids == TOKENS[:75]
        np.testing.assert_allclose(score.logprobs, chosen, atol=2e-5)  # float32 sums over 96 tokens
        assert score.top_logprobs is not None and len(score.top_logprobs) == 74
        for (a, b), row in zip(score.top_logprobs, want, strict=True):
            assert a[0] == row.argmax() and a[1] >= b[1]
        with pytest.raises(RequestError, match="at least two tokens"):
            engine.score([1])
        assert len(running.result(30).token_ids) == 100
        nothing_held(engine)


# ---- leaks


def _many(engine: Engine, count: int) -> None:
    rng = random.Random(0)

    def client(seed: int) -> None:
        mine = random.Random(seed)
        for _ in range(count // 8):
            n = mine.randrange(1, 60)
            ticket = engine.submit(engine.request(TOKENS[mine.randrange(100) :][:n], max_tokens=mine.randrange(1, 6)))
            if mine.random() < 0.2:
                ticket.cancel()
            with contextlib.suppress(Cancelled):
                ticket.result(60)

    clients = [threading.Thread(target=client, args=(rng.random(),)) for _ in range(8)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    nothing_held(engine)


def _objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def test_hundreds_of_requests_leave_nothing(engine):
    _many(engine, 80)
    before = _objects()
    _many(engine, 160)
    assert _objects() < before + 2000  # a request that stayed would be dozens of objects each


@pytest.mark.long
def test_ten_thousand_requests_leave_nothing(engine):
    import resource

    _many(engine, 1000)
    before, peak = _objects(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _many(engine, 10_000)
    assert _objects() < before + 5000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < peak + 64 * 1024  # KiB
    assert sum(engine.stats().finished.values()) >= 11_000


def test_drafts_that_the_engine_is_set_to_are_not_for_plain_decoding():
    engine = Engine(runtime(), EngineConfig(drafter="mtp", drafts=3))
    assert engine.request([1]).drafts == 3 and engine.request([1], drafter="none").drafts == 0
    with pytest.raises(RequestError, match="'none' drafts nothing"):
        engine.request([1], drafter="none", drafts=2)


def test_numbers_of_drafts_share_dispatches_and_are_kept(monkeypatch):
    """Fixed numbers up to that which is compiled need nothing compiled, and hold for each request on its own."""
    want = solo(tuple(TOKENS[:20]), max_tokens=40, ignore_eos=True).token_ids
    with Engine(runtime(), EngineConfig(buckets=(4,), drafts=3)) as engine:
        made, together, step = len(runtime().loop.executables), list[int](), Group.step
        monkeypatch.setattr(Group, "step", lambda self, *args: together.append(len(self.lives)) or step(self, *args))
        ask = functools.partial(engine.request, TOKENS[:20], max_tokens=40, ignore_eos=True)
        tickets = {n: engine.submit(ask(drafts=n)) for n in (0, 1, 3, 2)}
        answers = {n: ticket.result(300) for n, ticket in tickets.items()}
        assert len(runtime().loop.executables) == made
        assert max(together) == 4
    for n, answer in answers.items():
        assert answer.token_ids == want
        offered = answer.acceptance.offered.tolist()
        assert all(offered[:n]) and not any(offered[n:])


def test_what_is_not_compiled_in_time_is_compiled_beside_the_requests(monkeypatch):
    go, real, said = threading.Event(), warm_up.dispatches, list[str]()
    monkeypatch.setattr(warm_up, "dispatches", lambda *args, **more: [go.wait, *real(*args, **more)])
    monkeypatch.setattr(runtime().loop.executables, "progress", said.append)
    config = EngineConfig(buckets=(4,), drafts=3, warm_up_s=0.05)
    with Engine(runtime(), config) as engine:
        assert said[-1].endswith("are still to be compiled, beside the requests; the others are ready")
        ticket = engine.submit(engine.request(TOKENS[:20], max_tokens=3))
        with pytest.raises(TimeoutError):
            ticket.result(0.2)
        go.set()
        assert len(ticket.result(300).token_ids) == 3
    with pytest.raises(ConfigError, match="there are answers, logprobs, grammars, scores"):
        EngineConfig(warm_up=("everything",))


def test_what_the_first_request_of_a_kind_waits_for_is_told(monkeypatch, caplog):
    caplog.set_level("INFO", warm_up.__name__)
    monkeypatch.setattr(warm_up, "dispatches", lambda *args, **more: [lambda: None])
    monkeypatch.setattr(runtime().loop, "compile_score", lambda *_: None)
    compiled = warm_up.Compiled(runtime().loop, (4,), threading.Condition())
    kind = warm_up.Kind(NoDrafter(), 0, logged=True, guided=True)
    while not compiled.ready(kind):
        time.sleep(0.01)
    compiled.close()
    for top in (False, True, False):
        compiled.prepare_score(top)
    began, ready, *scores = (record.getMessage() for record in caplog.records)
    assert "(drafter none, drafts 0, log-probabilities, a format), which waits" in began
    assert re.fullmatch(r"compiled in \d+\.\d s: drafter none, .*", ready)
    assert len(scores) == 4 and compiled.late == 3


def test_a_warm_up_that_fails_is_told_at_the_start(monkeypatch):
    def fail() -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(warm_up, "dispatches", lambda *args, **more: [fail])
    engine = Engine(runtime(), EngineConfig(buckets=(4,), drafter="none"))
    with pytest.raises(RuntimeError, match="no room"):
        engine.start()
    assert engine.state == "stopped"
