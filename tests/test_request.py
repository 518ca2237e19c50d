"""Sampling values that must be refused, each by a message that names the field and what is allowed."""

import numpy as np
import pytest

from atlas_jax.decode.request import SamplingParams
from atlas_jax.errors import AtlasError, RequestError

NAN, INF = float("nan"), float("inf")

GOOD = [
    {},
    dict(max_tokens=1, temperature=100, top_k=2**31 - 1, top_p=1, min_p=1, seed=2**32 - 1),
    dict(temperature=np.float32(0.5), top_k=np.int64(3), seed=0),
    dict(presence_penalty=-2, frequency_penalty=2, repetition_penalty=0.01),
    dict(logit_bias={0: -100, 31: 100.0}, stop=("a", "b" * 1024), stop_token_ids=(0, 31)),
    dict(stop=["a"], stop_token_ids=[1], logprobs=True, top_logprobs=20, ignore_eos=True),
    dict(stop_token_ids=tuple(range(16)), stop=tuple("abcdefghijklmnop")),
]

BAD = [
    ("max_tokens", value) for value in (0, -1, True, 1.0, "3", None, NAN, 2**31, 10**40)
] + [
    ("temperature", value) for value in (-0.1, NAN, INF, -INF, True, "1", None, 100.5, 10**400)
] + [
    ("top_k", value) for value in (-1, True, 1.5, NAN, 2**31)
] + [
    ("top_p", value) for value in (0, 0.0, -0.1, 1.1, NAN, True)
] + [
    ("min_p", value) for value in (-0.1, 1.1, NAN, False)
] + [
    (name, value) for name in ("presence_penalty", "frequency_penalty") for value in (-2.1, 2.1, NAN, INF, True)
] + [
    ("repetition_penalty", value) for value in (0, -1, NAN, INF, 101, True)
] + [
    ("logit_bias", value)
    for value in ({32: 1.0}, {-1: 1.0}, {True: 1.0}, {"1": 1.0}, {1: NAN}, {1: 101}, {1: True}, [(1, 1.0)], None)
] + [
    ("seed", value) for value in (-1, 2**32, 1.0, True, "1", NAN)
] + [
    ("stop", value) for value in ("abc", ("",), (1,), (b"a",), ("a",) * 17, ("x" * 1025,), None, {"a"})
] + [
    ("stop_token_ids", value) for value in (5, (32,), (-1,), (True,), (1.0,), ("a",), (1,) * 17, None, (2**70,))
] + [
    (name, value) for name in ("ignore_eos", "logprobs") for value in (1, 0, "yes", None)
] + [
    ("top_logprobs", value) for value in (-1, 21, True, 1.0, 1)
]  # fmt: skip


@pytest.mark.parametrize("values", GOOD)
def test_allowed_values_pass(values):
    SamplingParams(**values).validate(32)


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda x: str(x)[:24])
def test_bad_values_are_refused_by_name(name, value):
    with pytest.raises(RequestError) as refusal:
        SamplingParams(**{name: value}).validate(32)
    message = str(refusal.value)
    assert message.startswith(name)
    assert "\n" not in message and len(message) < 200
    assert isinstance(refusal.value, AtlasError)


def test_the_message_says_what_was_given_and_what_is_allowed():
    with pytest.raises(RequestError, match=r"temperature must be a number in 0 … 100, got nan"):
        SamplingParams(temperature=NAN).validate(32)
    with pytest.raises(RequestError, match=r"stop_token_ids must name token ids in 0 … 31.*got 32"):
        SamplingParams(stop_token_ids=(32,)).validate(32)


def test_greedy_and_penalised():
    assert SamplingParams().greedy and SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=0.01).greedy
    assert not SamplingParams(temperature=1.0, top_k=3).penalised
    assert SamplingParams(presence_penalty=0.1).penalised and SamplingParams(logit_bias={1: 1.0}).penalised
