"""The numbers of Hugging Face's implementation with the weights that a quantised checkpoint stands for, and greedy answers, plain and
with drafts. One case lies in tests/data, the others in the folder `shared`."""

import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file

import atlas_jax

HERE = pathlib.Path(__file__).parent / "data" / "quantised"
CASES = ("q_ct_int4_g32", "q_gptq_g64", "q_awq_g64", "q_ct_nvfp4", "q_modelopt_nvfp4", "q_fp8_block")
LOGITS = 2e-4  # of logits of size 3; activations are float32


@pytest.mark.parametrize("case", ["ct_int4_g32", *(pytest.param(case, marks=pytest.mark.long) for case in CASES)])
def test_logits_and_greedy_answers(request, case):
    folder = HERE if case == "ct_int4_g32" else request.getfixturevalue("shared") / "data" / "parity"
    expected = {name: value[0] for name, value in load_file(folder / case / "expected.safetensors").items()}
    runtime = atlas_jax.load(folder / case, dtype="float32", max_length=128, page_size=32, prefill_chunk=32)
    ids, answer = expected["input_ids"].tolist(), expected["greedy_ids"].tolist()
    assert np.abs(runtime.logits(ids) - expected["logits"]).max() <= LOGITS
    options = dict(max_tokens=len(answer), ignore_eos=True)
    assert runtime.generate(ids, drafter="none", **options).token_ids == answer
    assert runtime.generate(ids, drafter="mtp", drafts=3, **options).token_ids == answer
