"""The round of decoding, compiled for GPUs: one command buffer, state in place."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import deviceless
import jax
import jax.numpy as jnp
import pytest
from deviceless import CAPTURE, assert_one_command_buffer
from models import CONFIGS, RUN, model_of

from atlas_jax.decode import round as rounds
from atlas_jax.decode.drafters import MtpChain
from atlas_jax.decode.state import init_decode
from atlas_jax.weights.presets import parameter_shapes

pytestmark = pytest.mark.skipif(deviceless.packages() is None, reason=deviceless.MISSING)


def compile_round(target: str, config: Any, run: Any, K: int) -> deviceless.Compiled:
    """`Executables.dispatch` for one sequence, without a model."""
    function = functools.partial(rounds.dispatch, model_of(config, run), MtpChain(), K, None, run.rounds_per_dispatch)
    params = parameter_shapes(config, dtype=run.dtype, layout=run.layout)
    state = jax.eval_shape(functools.partial(init_decode, config, run))
    slots, count = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    return deviceless.compile_for(target, function, params, state, slots, count, donate=(1,), compiler_options=CAPTURE)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h200", "gb10"])
def test_a_dispatch_is_one_command_buffer_and_its_state_stays_in_place(target):
    run = dataclasses.replace(RUN, dtype="bfloat16", layout="stacked", row_group=16)
    compiled = compile_round(target, CONFIGS["dense"], run, K=4)
    assert_one_command_buffer(compiled)
    assert compiled.alias_bytes == compiled.donated_bytes
