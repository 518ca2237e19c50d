"""A stand-in for `Engine`, so that the servers can be tested without a model: real tickets, a real tokenizer, made-up answers."""

import dataclasses
import itertools
import pathlib
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from atlas_jax.cache.stats import CacheStats, Reuse
from atlas_jax.completion import Completion, Delta, Timings
from atlas_jax.decode.drafters import NoDrafter, drafter_named
from atlas_jax.decode.request import SamplingParams
from atlas_jax.decode.stops import StopMatcher
from atlas_jax.engine.api import (
    Cancelled,
    DeadlineExceeded,
    EngineConfig,
    EngineFull,
    EngineStats,
    EngineStopping,
    GenerationRequest,
    InFlight,
    Score,
    StepFailed,
)
from atlas_jax.engine.ticket import Ticket
from atlas_jax.errors import GrammarError, RequestError
from atlas_jax.metrics import Acceptance, Event, Source
from atlas_jax.text.tokenizer import Tokenizer

MODEL = pathlib.Path(__file__).resolve().parent.parent / "atlas_jax" / "data" / "tiny_agent"
VOCABULARY = 8192


class FakeEngine:
    """Answers with `reply(prompt text)`, a token every `pause_s`. Each request has a thread of its own.

    Attributes:
        requests: all that were submitted.
        cancelled: ids of those whose ticket was cancelled before its end.
        fail_after: tokens after which every request fails; None: never.
    """

    def __init__(
        self, reply: Any = "Hello there, how can I help you?", pause_s: float = 0.0, max_waiting: int = 64
    ) -> None:
        self.tokenizer = Tokenizer(MODEL)
        self.reply = reply if callable(reply) else lambda text: reply
        self.pause_s = pause_s
        self.fail_after: int | None = None
        self.config = EngineConfig(max_waiting=max_waiting)
        self.runtime: Any = SimpleNamespace(
            tokenizer=self.tokenizer,
            config=SimpleNamespace(vocab_size=VOCABULARY, model_type="qwen3_5", eos_token_ids=(8185,)),
            run=SimpleNamespace(max_length=512, slots=4, max_drafts=7, dtype="float32"),
            default_drafter="none",
            encode=self._encode,
        )
        self.requests: list[GenerationRequest] = []
        self.cancelled: list[str] = []
        self.live: dict[str, Ticket] = {}
        self.state = "running"
        self.tokens = 0
        self._ids = itertools.count()
        self._began = time.monotonic()
        self._lock = threading.Lock()

    def _encode(self, ids):
        ids = list(ids)
        if not ids or not all(isinstance(i, (int, np.integer)) and 0 <= i < VOCABULARY for i in ids):
            raise RequestError(f"token ids must lie in 0 … {VOCABULARY - 1}")
        return np.asarray(ids, np.int32)

    def start(self) -> None:
        self.state = "running"

    def request(self, prompt, *, priority=0, deadline_s=None, id="", grammar=None, drafter=None, drafts=None, **given):
        if isinstance(given.get("stop"), str):
            given["stop"] = (given["stop"],)
        options: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
        params = SamplingParams(**options)
        params.validate(VOCABULARY)
        if drafter not in (None, "none"):
            drafter_named(drafter)
            raise RequestError("drafter must be none here", "drafter")
        return GenerationRequest(
            self._encode(prompt),
            params,
            NoDrafter(),
            0,
            priority=priority,
            deadline_s=deadline_s,
            id=id,
            grammar=grammar,
        )

    def submit(self, request):
        if self.state != "running":
            raise EngineStopping("the engine is draining")
        if request.grammar is not None and request.grammar.source == "(":
            raise GrammarError("regex: unclosed group")
        if len(self.live) >= self.config.max_waiting:
            raise EngineFull(f"{len(self.live)} requests are waiting")
        identity = request.id or f"r{next(self._ids)}"
        ticket = Ticket(identity, self._cancel)
        self.requests.append(request)
        self.live[identity] = ticket
        threading.Thread(target=self._answer, args=(request, ticket), daemon=True).start()
        return ticket

    def _cancel(self, ticket: Ticket) -> None:
        self.cancelled.append(ticket.id)

    def _answer(self, request: GenerationRequest, ticket: Ticket) -> None:
        text: Any = self.reply(self.tokenizer.decode(request.prompt.tolist(), skip_special_tokens=False))
        ids = self.tokenizer.encode(text)
        stream, stops, sent = self.tokenizer.stream(), StopMatcher(request.params.stop), []
        began, shown, piece = time.perf_counter(), "", ""
        logs: dict[str, Any] = {}
        finish = "length" if len(ids) > request.params.max_tokens else "stop"
        for token in ids[: request.params.max_tokens]:
            if self.pause_s:
                time.sleep(self.pause_s)
            error = None
            if ticket.id in self.cancelled:
                error = Cancelled("cancelled", self._completion(request, sent, shown, "cancelled"))
            elif request.deadline_s is not None and time.perf_counter() - began > request.deadline_s:
                error = DeadlineExceeded("the deadline has passed")
            elif self.fail_after is not None and len(sent) >= self.fail_after:
                error = StepFailed("the step failed")
            if error:
                del self.live[ticket.id]
                ticket.fail(error)
                return
            sent.append(token)
            with self._lock:
                self.tokens += 1
            piece = stops.push(stream.push(token))
            shown += piece
            if request.params.logprobs:
                top = [(token, -0.25), (1, -2.0)][: request.params.top_logprobs]
                logs = dict(logprobs=[-0.25], top_logprobs=[top] if request.params.top_logprobs else None)
            if stops.stopped:
                finish = "stop"
                break
            ticket.push(Delta([token], piece, **logs))
        rest = piece if stops.stopped else stops.push(stream.flush()) + stops.flush()
        shown += "" if stops.stopped else rest
        del self.live[ticket.id]
        ticket.push(Delta([], rest, finish, self._completion(request, sent, shown, finish)))

    def _completion(self, request, ids, text, finish):
        acceptance = Acceptance.zero(drafts=2)
        acceptance.counts[0, Source.MTP, : Event.ROUNDS, :2] = [[4, 4], [3, 2], [4, 3], [3, 2]]
        size = len(request.prompt)
        timings = Timings(0.0, 1.0, 1.0, 100.0)
        return Completion(list(ids), text, finish, acceptance, timings, Reuse(size, min(3, size), min(2, size)))

    def score(self, token_ids, top_logprobs=0, timeout=None):
        ids = self._encode(token_ids).tolist()
        logprobs = [-float(i % 7) for i in ids[1:]]
        tops = [[(i, -float(i % 7))][:top_logprobs] for i in ids[1:]] if top_logprobs else None
        return Score(ids, logprobs, tops)

    def stats(self):
        counts = {f.name: 0 for f in dataclasses.fields(CacheStats)} | dict(reuse=Reuse(10, 6, 5))
        acceptance = Acceptance.zero(drafts=2)
        acceptance.counts[0, Source.MTP, : Event.ROUNDS, :2] = [[40, 40], [33, 22], [40, 33], [33, 21]]
        acceptance.counts[0, Source.MTP, Event.ROUNDS, 1:4] = [7, 12, 21]
        return EngineStats(
            state=self.state,
            running=len(self.live),
            waiting=0,
            slots=4,
            max_waiting=self.config.max_waiting,
            submitted=len(self.requests),
            refused=0,
            finished=dict(stop=len(self.requests) - len(self.live)),
            prompt_tokens=10,
            restored_tokens=5,
            tokens=self.tokens,
            tokens_per_s=12.5,
            acceptance=acceptance,
            dispatches=3,
            pages=8,
            pages_free=5,
            cache=CacheStats(**counts),  # pyright: ignore[reportArgumentType]
            uptime_s=time.monotonic() - self._began,
            in_flight=[InFlight(i, 5, 2, 16, "none", 0.5) for i in list(self.live)],
        )

    def drain(self, timeout=None):
        self.state = "draining"
        end = time.monotonic() + (timeout or 60)
        while self.live and time.monotonic() < end:
            time.sleep(0.005)
        return not self.live

    def close(self) -> None:
        self.state = "stopped"
        for identity in list(self.live):
            self.cancelled.append(identity)
