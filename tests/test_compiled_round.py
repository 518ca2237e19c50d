"""The round of decoding, and the prefill, compiled for GPUs: one command buffer, state in place."""

from __future__ import annotations

import dataclasses

import deviceless
import pytest
from compile_step import compile_prefill, compile_round
from deviceless import assert_fits, assert_in_place, assert_one_command_buffer
from models import CONFIGS, RUN

from atlas_jax.decode.drafters import HybridDrafter, MtpChain

pytestmark = pytest.mark.skipif(deviceless.packages() is None, reason=deviceless.MISSING)


@pytest.mark.slow
@pytest.mark.parametrize("target", [pytest.param("h200", marks=pytest.mark.long), "gb10"])
def test_a_dispatch_is_one_command_buffer_and_its_state_stays_in_place(target):
    run = dataclasses.replace(RUN, dtype="bfloat16", layout="stacked", row_group=16)
    compiled = compile_round(target, CONFIGS["dense"], run, MtpChain(), K=4)
    assert_one_command_buffer(compiled)
    assert_in_place(compiled)
    assert_fits(compiled)


@pytest.mark.long
def test_so_is_one_of_the_hybrid_whose_chain_ends_by_itself():
    run = dataclasses.replace(RUN, dtype="bfloat16", layout="stacked", row_group=16)
    compiled = compile_round("h200", CONFIGS["dense"], run, HybridDrafter(), K=8)
    assert_one_command_buffer(compiled)
    assert_in_place(compiled)


@pytest.mark.parametrize("target", [pytest.param("h200", marks=pytest.mark.long), "gb10"])
def test_chunks_of_several_prompts_are_one_command_buffer_and_their_state_stays_in_place(target):
    run = dataclasses.replace(RUN, dtype="bfloat16", layout="stacked", row_group=16)
    # Heads as they are published: of 32, the scan's eight warps have too little to do, and spill.
    config = dataclasses.replace(CONFIGS["dense"], linear_key_head_dim=128, linear_value_head_dim=128)
    compiled = compile_prefill(target, config, run, T=256, sequences=4)
    assert_one_command_buffer(compiled)
    assert_in_place(compiled)
    if target == "gb10":  # see test_compiled_kernels on what spills on an H200
        assert_fits(compiled)
