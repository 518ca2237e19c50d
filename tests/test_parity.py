"""The numbers of Hugging Face's implementation, for random models of every supported form (float32, all 77 positions).

One case lies in tests/data, the others in the folder `shared`. Errors are absolute; logits are of size 3.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import Steps, model_of
from safetensors.numpy import load_file

from atlas_jax.config import RunConfig
from atlas_jax.models.hybrid import Hidden
from atlas_jax.state import Snapshot, TargetState
from atlas_jax.weights.hf_config import model_config, recipe_in
from atlas_jax.weights.load import load_params

SMALL = pathlib.Path(__file__).parent / "data" / "parity_small"
CASES = ("parity_small", "qwen3_5", "qwen3_5_moe", "qwen3_next")
CHUNKS = (1, 5, 16, 64, 77)
FEWER_CHUNKS = {"qwen3_5": (16, 77)}  # differs from the small case in widths only, and compiling takes long
LOGITS, STATE = 2e-4, 1e-4
RUN = RunConfig(slots=2, max_length=112, max_drafts=4, row_group=8, page_size=16)


class Run(NamedTuple):
    """What decoding the prompt token by token gave."""

    logits: np.ndarray
    hidden: np.ndarray
    draft_logits: np.ndarray  # of positions 1 …
    snapshots: list[Snapshot]  # after each token


class Case:
    """A reference model, what it should compute, and jitted steps that keep their input state alive."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.name, self.config = directory.name, model_config(directory)
        params = load_params(directory, self.config, dtype=RUN.dtype, layout=RUN.layout, recipe=recipe_in(directory))
        self.steps = Steps(self.config, RUN, params)
        self.expected = {name: value[0] for name, value in load_file(directory / "expected.safetensors").items()}
        self.tokens = self.expected["input_ids"].astype(np.int32)
        apply = self.steps.model.apply
        self._logits = jax.jit(functools.partial(apply, method="logits"))
        self._prefill = jax.jit(functools.partial(apply, method="prefill"))

    def chunk(self, at: int, size: int) -> np.ndarray:
        """Tokens of a chunk, padded."""
        tokens = self.tokens[at : at + size]
        return np.pad(tokens, (0, size - len(tokens)))

    def logits(self, hidden: Any) -> np.ndarray:
        return np.asarray(self._logits(self.steps.params, jnp.asarray(hidden)))

    def prefill(self, state: TargetState, tokens: np.ndarray, n: int) -> Any:
        """(post-norm hiddens, hiddens for the drafter, state); `state` can be used again."""
        of = lambda *x: jnp.asarray(x, jnp.int32)  # noqa: E731
        return self._prefill(self.steps.params, state, of(1), of(*tokens), of(0), of(n))

    @functools.cached_property
    def serial(self) -> Run:
        """The prompt token by token through verify and commit, the drafter fed with the same rows."""
        s, state = self.steps, self.steps.init()
        before = jnp.zeros((1, 1, self.config.hidden_size))
        logits, hidden, drafted, snapshots = [], [], [], []
        for at, token in enumerate(self.tokens):
            out, fed, state = s.verify(state, [1], [[token]], [1])
            state = s.commit(state, jnp.array([1]), jnp.array([1]), fed)
            draft, state = s.draft(state, [1], [[token]], before, [at], [1])
            before = fed
            logits.append(np.asarray(out)[0, 0])
            hidden.append(np.asarray(fed)[0, 0])
            drafted.append(self.logits(draft)[0])
            snapshots.append(jax.device_get(s.snapshot(state, jnp.int32(1))))
        return Run(np.stack(logits), np.stack(hidden), np.stack(drafted)[1:], snapshots)


@functools.cache
def load_case(directory: pathlib.Path) -> Case:
    return Case(directory)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    if request.param == SMALL.name:
        return load_case(SMALL)
    return load_case(request.getfixturevalue("shared") / "data" / "parity" / request.param)


def assert_near(got: Any, expected: Any, limit: float, what: str = "") -> None:
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape
    error = np.abs(got - expected).max()
    assert error <= limit, f"{what}: off by {error:.2g}, {limit:g} allowed"


def test_whole_sequences(case):
    forward = jax.jit(functools.partial(case.steps.model.apply, method="forward"))
    hidden = forward(case.steps.params, jnp.asarray(case.tokens)[None])
    assert_near(hidden.pre_norm[0], case.expected["hidden_pre_norm"], LOGITS)
    assert_near(hidden.post_norm[0], case.expected["hidden_post_norm"], LOGITS)
    assert_near(case.logits(hidden.post_norm[0]), case.expected["logits"], LOGITS)


def test_verify_and_draft_token_by_token(case):
    assert_near(case.serial.logits, case.expected["logits"], LOGITS)
    assert_near(case.serial.hidden, case.expected["hidden_post_norm"], LOGITS)
    assert_near(case.serial.draft_logits, case.expected["mtp_logits_from_post_norm"], LOGITS)


def test_draft_from_the_hidden_before_the_final_norm(case):
    state, drafted = case.steps.init(), []
    for at in range(1, 77):
        fed = case.expected["hidden_pre_norm"][None, at - 1 : at]
        out, state = case.steps.draft(state, [2], [[case.tokens[at]]], fed, [at], [1])
        drafted.append(case.logits(out)[0])
    assert_near(np.stack(drafted), case.expected["mtp_logits_from_pre_norm"], LOGITS)


@pytest.mark.parametrize("size", CHUNKS)
def test_prefill_of_every_length(case, size):
    """Whole chunks of `size`, then a part of a chunk whose rest is filled with other tokens."""
    if size not in FEWER_CHUNKS.get(case.name, CHUNKS):
        pytest.skip("covered by the small case")
    rng = np.random.default_rng(size)
    state = case.steps.init()
    for at in range(0, 77, size):
        whole = state
        for n in range(1, min(size, 77 - at) + 1):
            chunk = rng.integers(0, case.config.vocab_size, size)
            chunk[:n] = case.tokens[at : at + n]
            post, _, state = case.prefill(whole, chunk, n)
            length = at + n
            assert_near(case.logits(post)[:n], case.expected["logits"][at:length], LOGITS, f"logits at {length} tokens")
            saved = jax.device_get(case.steps.snapshot(state, jnp.int32(1)))
            assert saved.length == length and saved.ok
            for name in ("kv", "h", "conv", "hidden"):
                parts = (jax.tree.leaves(getattr(x, name)) for x in (saved, case.serial.snapshots[length - 1]))
                for got, serial in zip(*parts, strict=True):
                    assert_near(got, serial, STATE, f"{name} at {length} tokens")


def test_draft_after_prefill(case):
    """The first draft after a prompt of any length reads keys and values that the prefill left."""
    state, drafted = case.steps.init(), []
    for at in range(0, 76, 16):
        whole = state
        for n in range(1, min(16, 76 - at) + 1):
            _, fed, state = case.prefill(whole, case.chunk(at, 16), n)
            copy = jax.tree.map(jnp.copy, state)  # drafting donates its state
            out, _ = case.steps.draft(copy, [1], [[case.tokens[at + n]]], fed[None, n - 1 : n], [at + n], [1])
            drafted.append(case.logits(out)[0])
    assert_near(np.stack(drafted), case.expected["mtp_logits_from_post_norm"], LOGITS)


def test_greedy_answer(case):
    s, state, post = case.steps, case.steps.init(), None
    for at in range(0, 77, 16):
        post, _, state = case.prefill(state, case.chunk(at, 16), min(16, 77 - at))
    logits = [case.logits(post)[77 % 16 - 1]]
    for _ in range(23):
        out, fed, state = s.verify(state, [1], [[logits[-1].argmax()]], [1])
        state = s.commit(state, jnp.array([1]), jnp.array([1]), fed)
        logits.append(np.asarray(out)[0, 0])
    assert [int(x.argmax()) for x in logits] == case.expected["greedy_ids"].tolist()
    assert_near(np.stack(logits), case.expected["greedy_logits"], LOGITS)


def test_which_hidden_the_drafter_reads_is_a_choice_of_the_config():
    case = load_case(SMALL)
    hidden = Hidden(*(jnp.asarray(case.expected[f"hidden_{which}_norm"]) for which in ("pre", "post")))
    for which in ("pre_norm", "post_norm"):
        model = model_of(dataclasses.replace(case.config, mtp_hidden=which), RUN)
        np.testing.assert_array_equal(
            model.apply(case.steps.params, hidden, method="drafter_hidden"), getattr(hidden, which)
        )
