"""Models with quantised weights: rows together equal rows alone, with ==, and what random weights are made of."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import CONFIGS, RUN, Steps, assert_same, params_of

from atlas_jax.errors import ConfigError
from atlas_jax.runtime import Runtime
from atlas_jax.weights.presets import random_params
from atlas_jax.weights.quantised.scheme import scheme_named
from pallas_kernels.w4a16 import FORMS, Int4, SideBySide

TOKENS = np.random.default_rng(0).integers(0, 96, 21)
long = functools.partial(pytest.param, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("family", "weights", "counts"),
    [
        ("dense", "int4-g32", (3,)),
        long("dense", "fp8", (2, 5, 9)),
        long("moe", "int4+head", (2, 5, 9)),
        long("moe", "nvfp4", (2, 5, 9)),
        long("next", "fp8-blocks", (2, 5, 9)),
    ],
)
def test_rows_together_equal_rows_alone(family, weights, counts):
    config = CONFIGS[family]
    params = random_params(config, dtype=RUN.dtype, layout=RUN.layout, weights=weights)
    s = Steps(config, RUN, params)
    logits, state = s.feed(s.init(), 1, TOKENS)
    expected = s.snapshot(state, jnp.int32(1))
    for K in counts:
        got, state = s.feed(s.init(), 2, TOKENS, K)
        np.testing.assert_array_equal(got, logits)
        got = s.snapshot(state, jnp.int32(2))
        kv = jax.tree.map(lambda x: x[:-1], (got.kv, expected.kv))  # but for the drafter's layer, which is not fed
        assert_same(dataclasses.replace(got, kv=kv[0]), dataclasses.replace(expected, kv=kv[1]))


@pytest.mark.parametrize("layout", ("layers", "stacked"))
def test_random_weights_are_packed_where_checkpoints_are(layout):
    make = functools.partial(random_params, CONFIGS["moe"], dtype="bfloat16", layout=layout, weights="int4-g32+head")
    params = jax.eval_shape(make)["params"]
    found = jax.tree.leaves_with_path(params, is_leaf=lambda x: isinstance(x, FORMS))
    packed = {jax.tree_util.keystr(path[:2]) for path, x in found if isinstance(x, FORMS)}
    named = {
        f"['{block}']['{name}']" for block in ("attention", "linear_attention") for name in ("in_proj", "out_proj")
    }
    named |= {f"['feed_forward']['{name}']" for name in ("gate_up", "down", "shared_gate_up", "shared_down")}
    assert packed == {"['head']", *named}
    projection = params["linear_attention"]["in_proj"]
    projection = projection if layout == "stacked" else projection[0]
    assert isinstance(projection, SideBySide) and isinstance(projection.parts[0], Int4)
    assert projection.parts[1].shape[-1] == 2 * CONFIGS["moe"].linear_num_value_heads


@pytest.mark.parametrize("name", ("int8", "int4-g16", "nvfp4-g32", "fp8-g128", "int4-blocks", "head", ""))
def test_unknown_schemes(name):
    with pytest.raises(ConfigError, match="int4-g32"):
        scheme_named(name)


def test_a_tied_head_stays():
    with pytest.raises(ConfigError, match="head is its embedding"):
        random_params(CONFIGS["dense"], dtype="float32", layout="layers", weights="int4+head")


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "head"), [("dense", dict(draft_head="int4", draft_vocabulary=40)), ("moe", dict(draft_head="int4"))]
)
def test_a_draft_head_changes_no_output(family, head):
    """Whatever the copy of the head makes of it: the answers are those of plain decoding."""
    config = CONFIGS[family]
    run = dataclasses.replace(RUN, slots=1, max_drafts=3, **head)
    runtime = Runtime(config, run, params_of(config, run))
    prompt = TOKENS.tolist()
    plain = runtime.generate(prompt, drafter="none", max_tokens=24, logprobs=True)
    drafted = runtime.generate(prompt, drafter="mtp", drafts=3, max_tokens=24, logprobs=True)
    assert drafted.token_ids == plain.token_ids and drafted.logprobs == plain.logprobs
