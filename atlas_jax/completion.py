"""What a request yields: the collected answer, its pieces, its timings."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from atlas_jax.cache.stats import Reuse
from atlas_jax.decode.live import Step
from atlas_jax.decode.probes import Fingerprints
from atlas_jax.decode.request import SamplingParams
from atlas_jax.decode.stops import StopMatcher
from atlas_jax.metrics import Acceptance
from atlas_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Timings:
    """Seconds and milliseconds of one completion; compilation is not part of the others."""

    compile_s: float
    ttft_ms: float  # from the call to the first token
    tpot_ms: float  # mean time of each token after the first
    tokens_per_s: float  # of the whole answer, the prompt's prefill included
    queue_ms: float = 0.0  # of ttft_ms, what a request waited for a slot of the engine

    def to_dict(self) -> dict[str, float]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Completion:
    """One answer. `finish_reason`: "stop" (a stop id or string), "length", or "error" (logits were not finite)."""

    token_ids: list[int]
    text: str
    finish_reason: str
    acceptance: Acceptance
    timings: Timings
    reuse: Reuse
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    fingerprints: Fingerprints | None = None  # with that probe on

    @property
    def prompt_tokens(self) -> int:
        return self.reuse.prompt

    @property
    def matched(self) -> int:
        """Prompt tokens that the prefix cache held the keys and values of."""
        return self.reuse.matched

    @property
    def restored(self) -> int:
        """Prompt tokens that were not computed: those before the snapshot that was restored."""
        return self.reuse.restored

    @property
    def replayed(self) -> int:
        """Prompt tokens that were computed."""
        return self.reuse.replayed

    def to_dict(self) -> dict[str, Any]:
        out = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("acceptance", "timings", "reuse"):
            out[name] = out[name].to_dict()
        out["prompt_tokens"] = self.prompt_tokens
        out["fingerprints"] = self.fingerprints and self.fingerprints._asdict()
        return {k: v for k, v in out.items() if v is not None}


@dataclasses.dataclass(frozen=True)
class Delta:
    """A piece of a streamed answer; the last one carries the whole completion."""

    token_ids: list[int]
    text: str
    finish_reason: str | None = None
    completion: Completion | None = None
    logprobs: list[float] | None = None  # of these tokens, where asked for
    top_logprobs: list[list[tuple[int, float]]] | None = None


class Answer:
    """Collects one request's tokens into text, up to a stop string."""

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        self.params = params
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[list[tuple[int, float]]] = []
        self.first_at = self.last_at = 0.0
        self.finish_reason: str | None = None
        self._tokenizer = tokenizer
        self._decoder = tokenizer.stream() if tokenizer else None
        self._stops = StopMatcher(params.stop)
        self._pieces: list[str] = []

    def cut(self, token_ids: list[int]) -> int | None:
        """Feeds a round's tokens to the stop matcher; how many of them the answer keeps if a stop string is complete."""
        for i, token in enumerate(token_ids):
            self._pieces.append(self._stops.push(self._decoder.push(token) if self._decoder else ""))
            if self._stops.stopped:
                return i + 1
        return None

    def add(self, step: Step) -> str:
        """Takes a step's tokens; returns the text that may now be shown."""
        now = time.perf_counter()
        if step.token_ids:
            self.first_at, self.last_at = self.first_at or now, now
        self.token_ids += step.token_ids
        self.logprobs += step.logprobs or []
        self.top_logprobs += step.top_logprobs or []
        self.finish_reason = step.finish_reason
        if not self.params.stop and self._decoder:
            self._pieces += [self._decoder.push(token) for token in step.token_ids]
        if self.finish_reason and self._decoder and not self._stops.stopped:
            self._pieces.append(self._stops.push(self._decoder.flush()) + self._stops.flush())
        text, self._pieces = "".join(self._pieces), []
        return text

    def logged(self, step: Step) -> tuple[list[float] | None, list[list[tuple[int, float]]] | None]:
        """What a step's delta says of log-probabilities: what the request asked for."""
        return step.logprobs, step.top_logprobs if self.params.top_logprobs else None

    def complete(
        self,
        acceptance: Acceptance,
        reuse: Reuse,
        began: float,
        compile_s: float = 0.0,
        queue_s: float = 0.0,
        fingerprints: Fingerprints | None = None,
    ) -> Completion:
        """The answer so far, as a whole.

        Args:
            began: when it was asked for, as `time.perf_counter` says; compiling is not counted.
            queue_s: how long it waited then.
        """
        count, elapsed = len(self.token_ids), self.last_at - began
        timings = Timings(
            compile_s=compile_s,
            ttft_ms=1e3 * (self.first_at - began) if count else 0.0,
            tpot_ms=1e3 * (self.last_at - self.first_at) / (count - 1) if count > 1 else 0.0,
            tokens_per_s=count / elapsed if count and elapsed > 0 else 0.0,
            queue_ms=1e3 * queue_s,
        )
        text = self._tokenizer.decode(self.token_ids) if self._tokenizer else ""
        if self.params.stop and self._tokenizer:
            text = StopMatcher(self.params.stop).cut(text)
        logged = self.params.logprobs
        return Completion(
            token_ids=self.token_ids,
            text=text,
            finish_reason=self.finish_reason or "error",
            acceptance=acceptance,
            timings=timings,
            reuse=reuse,
            logprobs=self.logprobs if logged else None,
            top_logprobs=self.top_logprobs if logged and self.params.top_logprobs else None,
            fingerprints=fingerprints,
        )
