"""A model on two devices: what one device computes, to rounding; the laws that hold on one, with ==; each device with its share."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import CONFIGS, RUN, params_of
from test_w4a16 import packed

import atlas_jax
from atlas_jax.config import FULL, LINEAR
from atlas_jax.decode.drafters import ScriptedDrafter
from atlas_jax.errors import ConfigError
from atlas_jax.runtime import Runtime
from atlas_jax.tensor_parallel.params import Columns, Rows, cuts, share
from atlas_jax.weights.presets import random_params
from pallas_kernels.linear import linear
from pallas_kernels.w4a16 import SideBySide

pytestmark = pytest.mark.skipif(jax.local_device_count() < 2, reason="needs two devices")

EVEN = dict(num_attention_heads=4, num_key_value_heads=2, linear_num_key_heads=2, linear_num_value_heads=4)
SMALL = dataclasses.replace(RUN, slots=2, max_drafts=3, rounds_per_dispatch=2)
CACHE = dict(snapshot_interval=32, snapshot_bytes=1 << 16, host_snapshot_bytes=1 << 20)
RNG = np.random.default_rng(0)
PROMPT = RNG.integers(0, 96, 65).tolist()  # whole chunks and the token that the first round reads: one size to compile
LOGGED: Any = dict(logprobs=True, top_logprobs=2)


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


@functools.cache
def runtime(family: str, devices: int, dtype: Any = "float32") -> Runtime:
    config = dataclasses.replace(CONFIGS[family], layer_types=(LINEAR, FULL), **EVEN)
    run = dataclasses.replace(SMALL, dtype=dtype, **CACHE)
    return Runtime(config, dataclasses.replace(run, tensor_parallel=devices), params_of(config, run))


def same(got, want):
    assert got.token_ids == want.token_ids
    assert got.logprobs == want.logprobs and got.top_logprobs == want.top_logprobs


@pytest.mark.parametrize(("family", "dtype"), [("dense", "float32"), long("moe", "float32"), long("next", "float32")])
def test_two_devices_compute_what_one_does(family, dtype):
    """To the rounding of sums that are added in another order; and the same with drafts as without, bit for bit."""
    want, got = (runtime(family, n, dtype).generate(PROMPT, max_tokens=16, drafts=3, **LOGGED) for n in (1, 2))
    assert got.token_ids == want.token_ids
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-4)
    np.testing.assert_array_equal(got.acceptance.counts, want.acceptance.counts)
    same(runtime(family, 2, dtype).generate(PROMPT, max_tokens=16, drafter="none", **LOGGED), got)


@pytest.mark.long
@pytest.mark.parametrize(("family", "dtype"), [("dense", "float32"), ("moe", "bfloat16"), ("next", "float32")])
def test_drafts_and_company_change_no_bit(family, dtype):
    r = runtime(family, 2, dtype)
    plain: Any = dict(max_tokens=16, drafter="none", **LOGGED)
    want = r.generate(PROMPT, **plain)
    for drafter in ("mtp", ScriptedDrafter(1.0), ScriptedDrafter(0.0)):
        got = r.generate(PROMPT, max_tokens=16, drafter=drafter, drafts=3, script=want.token_ids, **LOGGED)
        same(got, want)
    short = PROMPT[:20]
    for got, alone in zip(r.generate([PROMPT, short], **plain), (want, r.generate(short, **plain)), strict=True):
        same(got, alone)


def test_warm_turns_equal_cold_ones():
    """Snapshots of the shared state go to the host and back, too."""
    r = runtime("dense", 2)
    prompts = [PROMPT, RNG.integers(0, 96, 65).tolist(), [*PROMPT, *range(32)], [*PROMPT, *range(32), *PROMPT[:32]]]
    answer = functools.partial(r.generate, max_tokens=8, drafts=3, **LOGGED)
    r.loop.cache.reset()
    warm = [answer(prompt) for prompt in prompts]
    stats = r.cache_stats()
    assert stats.hits and stats.reuse.restored and stats.host_snapshots_used and not stats.poisoned
    for prompt, got in zip(prompts, warm, strict=True):
        r.loop.cache.reset()
        same(got, answer(prompt))


def test_each_device_has_its_share():
    r = runtime("dense", 2)
    state = r.loop.state.target
    for x in (*jax.tree.leaves(state.pages), *state.recurrent, r.params["params"]["embedding"]):
        assert [shard.data.nbytes for shard in x.addressable_shards] == [x.nbytes // 2] * 2
    for block in ("linear_attention", "attention", "feed_forward"):
        for path, x in jax.tree.leaves_with_path(r.params["params"][block]):
            shared = not x.sharding.is_fully_replicated
            assert shared == ("norms" not in jax.tree_util.keystr(path))


KINDS = ("plain", "int4 g32", "int4 g128 zeros", "nvfp4", "fp8", "fp8 blocks", "both")


def weight_of(kind: str, K: int, N: int) -> tuple[Any, np.ndarray]:
    if kind == "both":
        parts = [packed("int4 g64", K, N // 2), weight_of("plain", K, N // 2)]
        return SideBySide(tuple(w for w, _ in parts)), np.concatenate([v for _, v in parts], axis=1)
    if kind == "plain":
        values = np.random.default_rng(1).normal(size=(K, N))
        return jnp.asarray(values, jnp.float32), values
    return packed(kind, K, N)


@pytest.mark.parametrize("kind", KINDS)
def test_shares_of_products_make_the_whole(kind):
    """To the rounding of sums that are added in another order."""
    K, N = 512, 96
    weight, values = weight_of(kind, K, N)
    x = jnp.asarray(np.random.default_rng(2).normal(size=(4, K)), jnp.float32)
    whole, close = np.asarray(linear(x, weight)), dict[str, Any](rtol=1e-4, atol=1e-4)

    def product(x, rule, device):
        leaves, tree = jax.tree.flatten(weight)
        each = cuts(weight, rule, 2, "it")
        mine = jax.tree.unflatten(tree, [share(leaf, cut, device) for leaf, cut in zip(leaves, each, strict=True)])
        return np.asarray(linear(x, mine))

    rule = Columns((32, 16, 32), tail=16)
    for device in range(2):
        columns = np.r_[tuple(slice(a, b) for a, b in rule.spans(2)[device])]
        np.testing.assert_allclose(product(x, rule, device), whole[:, columns], **close)
    halves = [product(x[:, i * K // 2 : (i + 1) * K // 2], Rows(K), i) for i in range(2)]
    np.testing.assert_allclose(sum(halves), np.asarray(x, np.float64) @ values, **close)


def test_what_cannot_be_shared_is_refused():
    config = CONFIGS["dense"]
    with pytest.raises(ConfigError, match="linear_num_value_heads 3 evenly; tensor_parallel may be 1"):
        Runtime(config, dataclasses.replace(SMALL, tensor_parallel=2), {})
    with pytest.raises(ConfigError, match=r"needs 16 devices; JAX found \d"):
        heads = dict.fromkeys(EVEN, 16)
        Runtime(dataclasses.replace(config, **heads), dataclasses.replace(SMALL, tensor_parallel=16), {})
    with pytest.raises(ConfigError, match="tensor_parallel must be at least 1"):
        dataclasses.replace(SMALL, tensor_parallel=0)
    weight, _ = packed("int4 g64", 384, 32)
    with pytest.raises(
        ConfigError, match="down is quantised in blocks of 128 inputs; 2 devices would have 192 of its 384"
    ):
        cuts(weight, Rows(384), 2, "down")
    weight, _ = packed("int4 g64 order", 512, 32)
    with pytest.raises(ConfigError, match="down is quantised by GPTQ with act-order"):
        cuts(weight, Rows(512), 2, "down")


@pytest.mark.long
@pytest.mark.parametrize("weights", ["int4", "nvfp4", "fp8-blocks"])
@pytest.mark.parametrize("family", ["dense", "moe"])
def test_quantised_models_and_draft_heads(family, weights):
    sizes = dict(hidden_size=128, head_dim=64, linear_value_head_dim=64, linear_key_head_dim=64, vocab_size=256)
    inner = ("moe_intermediate_size", "shared_expert_intermediate_size") if family == "moe" else ("intermediate_size",)
    config = dataclasses.replace(CONFIGS[family], **EVEN, **sizes, **dict.fromkeys(inner, 256))
    params = random_params(config, dtype="float32", layout=SMALL.layout, weights=weights)
    answers = []
    for devices in (1, 2):
        run = dataclasses.replace(SMALL, tensor_parallel=devices, draft_head="int4")
        r = Runtime(config, run, params)
        answers.append((r.logits(PROMPT), r.generate(PROMPT, max_tokens=12, drafts=3)))
        same(r.generate(PROMPT, max_tokens=12, drafter="none"), answers[-1][1])
    (want, answer), (got, other) = answers
    np.testing.assert_allclose(got, want, atol=1e-3 * np.abs(want).max())
    assert other.token_ids == answer.token_ids


@pytest.mark.long
def test_a_directory_is_loaded_onto_two_devices():
    texts = [
        atlas_jax.load("tiny-agent", tensor_parallel=n, max_length=256).generate("The flight", max_tokens=24).text
        for n in (1, 2)
    ]
    assert texts[0] == texts[1]
