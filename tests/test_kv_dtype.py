"""Keys and values in eight bits: the same bits for every number of rows and every turn, half the memory, a bounded error."""

import dataclasses
import functools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from models import CONFIGS, RUN, Steps, assert_same, params_of
from models import steps as shared_steps

from atlas_jax.cache.budget import budget
from atlas_jax.config import RunConfig
from atlas_jax.runtime import Runtime
from pallas_kernels.paged_attention.pages import FLOAT8, stored

FP8 = "float8_e4m3fn"
TOKENS = np.random.default_rng(0).integers(0, 96, 80)


@functools.cache
def steps() -> Steps:
    plain = shared_steps("dense")
    return Steps(plain.config, dataclasses.replace(plain.run, kv_dtype=FP8), plain.params)


def test_rounding_is_to_nearest_and_keeps_what_is_too_large_in_bounds():
    x = np.array(
        [0.0, -0.0, 1.0, 1.0625, 1.1875, 447.0, 464.0, 1e9, -1e9, 2.0**-10, 3e-3, np.inf, -np.inf, np.nan], np.float32
    )
    got = np.asarray(stored(jnp.asarray(x), FLOAT8)).astype(np.float32)
    want = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    want[~np.isfinite(x)] = np.nan
    np.testing.assert_array_equal(got, want)
    for dtype in (jnp.float32, jnp.bfloat16):
        assert stored(jnp.asarray(x), jnp.dtype(dtype)).dtype == dtype


def test_rows_do_not_depend_on_how_many_there_are():
    s = steps()
    logits, state = s.feed(s.init(), 1, TOKENS[:40])
    assert state.pages.keys.dtype == state.pages.values.dtype == FLOAT8
    got, other = s.feed(s.free(s.init(garbage=1), jnp.int32(3)), 3, TOKENS[:40], 4)
    np.testing.assert_array_equal(got, logits)
    mine, theirs = (s.snapshot(x, jnp.int32(slot)) for x, slot in ((state, 1), (other, 3)))
    for x, y in zip(mine.kv, theirs.kv, strict=True):  # the drafter's layer, the last, was not fed
        np.testing.assert_array_equal(np.asarray(x[:-1]).view(np.uint8), np.asarray(y[:-1]).view(np.uint8))
    assert_same((mine.h, mine.conv, mine.hidden), (theirs.h, theirs.conv, theirs.hidden))


def test_the_error_is_that_of_eight_bits():
    """A key or value is off by at most 1/16 of itself; on logits of size 1 to 4 that leaves a few hundredths."""
    plain = shared_steps("dense")
    exact, _ = plain.feed(plain.init(), 1, TOKENS[:40])
    rounded, _ = steps().feed(steps().init(), 1, TOKENS[:40])
    error = np.abs(rounded - exact)
    assert 0 < error.max() < 0.1 * np.abs(exact).max()


@pytest.mark.long
def test_speculation_and_warm_turns_change_nothing():
    run = dataclasses.replace(RUN, slots=1, max_drafts=3, page_size=8, prefill_chunk=16, kv_dtype=FP8)
    r = Runtime(CONFIGS["dense"], run, params_of(CONFIGS["dense"], run))
    assert "keys and values in float8_e4m3fn" in r.in_force
    options = dict(max_tokens=12, logprobs=True, ignore_eos=True)
    prompt = TOKENS[:45].tolist()
    cold = r.generate(prompt, drafter="none", **options)
    warm = r.generate(prompt, drafter="mtp", drafts=3, **options)
    assert (cold.restored, warm.restored) == (0, 32)
    assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)


def test_a_page_weighs_half():
    config = CONFIGS["dense"]
    page = lambda **k: budget(config, RunConfig(dtype="bfloat16", **k)).page_bytes  # noqa: E731
    assert page(kv_dtype=FP8) * 2 == page()
