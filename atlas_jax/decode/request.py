"""What a request asks of decoding: its length, its sampling values, its stops."""

from __future__ import annotations

import dataclasses
import numbers
import reprlib
import typing
from collections.abc import Mapping
from typing import Any

from atlas_jax.errors import RequestError

GREEDY_BELOW = 1e-5  # temperatures under this one mean greedy, as in vLLM: dividing by them overflows float32
MAX_STOPS = 16  # stop ids, and stop strings, of one request
MAX_STOP_LENGTH = 1024  # characters of a stop string, which is also the most text that a stream ever holds back
MAX_TOP_LOGPROBS = 20
_INT32 = 2**31 - 1

_INTEGERS = {
    "max_tokens": (1, _INT32),
    "top_k": (0, _INT32),
    "top_logprobs": (0, MAX_TOP_LOGPROBS),
}
_REALS = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
}


@typing.no_type_check  # values come from outside; `validate` says what is wrong with them, not an annotation
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling values and stops of one request; the defaults are greedy decoding of 128 tokens.

    Attributes:
        temperature: 0 (and anything below 1e-5) is greedy: the argmax after bias and penalties, lowest id on ties.
        top_k: 0 keeps the whole vocabulary.
        presence_penalty, frequency_penalty: over generated tokens.
        repetition_penalty: over prompt and generated tokens; divides positive logits and multiplies negative ones.
        logit_bias: added to raw logits, -100 … 100; -100 all but bans a token.
        seed: 0 … 2^32-1; None draws one. A token depends on (seed, its position) and its distribution alone.
        stop: strings that end the answer; the text is cut before them. Special tokens are not text: see stop_token_ids.
        stop_token_ids: ids that end the answer, beside the model's end-of-text tokens.
        ignore_eos: lets the model's end-of-text tokens pass; stop ids and strings still end the answer.
        logprobs: log-probabilities of the raw distribution for each token; `top_logprobs` of the likeliest besides.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """Whether earlier tokens or a bias change the distribution, greedy or not."""
        neutral = self.presence_penalty == 0 and self.frequency_penalty == 0 and self.repetition_penalty == 1
        return not neutral or bool(self.logit_bias)

    def validate(self, vocab_size: int) -> None:
        """Checks every value against its range and the vocabulary.

        Raises:
            RequestError: naming the field, the value and what is allowed.
        """
        for name, (low, high) in _INTEGERS.items():
            _check(name, getattr(self, name), _is_integer, f"an integer in {low} … {high}", low, high)
        for name, (low, high) in _REALS.items():
            _check(name, getattr(self, name), _is_real, f"a number in {low:g} … {high:g}", low, high)
        if self.top_p == 0:
            raise RequestError("top_p must be above 0 (1 keeps the whole distribution), got 0", "top_p")
        if self.seed is not None:
            _check("seed", self.seed, _is_integer, f"None or an integer in 0 … {2**32 - 1}", 0, 2**32 - 1)
        for name in ("ignore_eos", "logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be True or False, got {reprlib.repr(getattr(self, name))}", name)
        if self.top_logprobs and not self.logprobs:
            raise RequestError(f"top_logprobs is {self.top_logprobs}, which needs logprobs=True", "top_logprobs")
        self._validate_stops(vocab_size)
        self._validate_bias(vocab_size)

    def _validate_stops(self, vocab_size: int) -> None:
        for name, kind in (("stop", "strings"), ("stop_token_ids", "token ids")):
            values = getattr(self, name)
            if not isinstance(values, (tuple, list)):
                raise RequestError(f"{name} must be a tuple of {kind}, got {reprlib.repr(values)}", name)
            if len(values) > MAX_STOPS:
                raise RequestError(f"{name} may hold at most {MAX_STOPS} {kind}, got {len(values)}", name)
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_LENGTH:
                raise RequestError(
                    f"stop must hold strings of 1 … {MAX_STOP_LENGTH} characters, got {reprlib.repr(text)}", "stop"
                )
        for token in self.stop_token_ids:
            _check_id("stop_token_ids", token, vocab_size)

    def _validate_bias(self, vocab_size: int) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(
                f"logit_bias must map token ids to numbers, got {reprlib.repr(self.logit_bias)}", "logit_bias"
            )
        for token, bias in self.logit_bias.items():
            _check_id("logit_bias", token, vocab_size)
            _check(f"logit_bias[{token}]", bias, _is_real, "a number in -100 … 100", -100, 100)


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)  # ranges refuse NaN and infinities


def _check(name: str, value: Any, kind: Any, allowed: str, low: float | int, high: float | int) -> None:
    if not kind(value) or not low <= value <= high:
        raise RequestError(f"{name} must be {allowed}, got {reprlib.repr(value)}", name.partition("[")[0])


def _check_id(name: str, token: Any, vocab_size: int) -> None:
    allowed = f"0 … {vocab_size - 1}, the ids of the vocabulary"
    if not _is_integer(token) or not 0 <= token < vocab_size:
        raise RequestError(f"{name} must name token ids in {allowed}; got {reprlib.repr(token)}", name)
