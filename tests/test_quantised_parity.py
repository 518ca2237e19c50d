"""The numbers of Hugging Face's implementation with the weights that a quantised checkpoint stands for, and greedy answers,
plain and with drafts. One case lies in tests/data, the others in the folder `shared`."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import atlas_jax
from atlas_jax.models import HybridModel
from atlas_jax.weights.hf_config import model_config, recipe_in
from atlas_jax.weights.load import load_params

SMALL = pathlib.Path(__file__).parent / "data" / "quantised" / "ct_int4_g32"
CASES = ("q_ct_int4_g32", "q_gptq_g64", "q_awq_g64", "q_ct_nvfp4", "q_modelopt_nvfp4", "q_fp8_block")
LOGITS = 2e-4  # of logits of size 3; activations are float32


def expected_of(folder: pathlib.Path) -> dict[str, np.ndarray]:
    return {name: value[0] for name, value in load_file(folder / "expected.safetensors").items()}


def test_logits_and_the_likeliest_tokens():
    config, expected = model_config(SMALL), expected_of(SMALL)
    params = load_params(SMALL, config, dtype="float32", layout="layers", recipe=recipe_in(SMALL))
    model = HybridModel(config)
    tokens = np.concatenate([expected["input_ids"], expected["greedy_ids"]]).astype(np.int32)
    hidden = jax.jit(functools.partial(model.apply, method="forward"))(params, jnp.asarray(tokens)[None])
    logits = np.asarray(model.apply(params, hidden.post_norm[0], method="logits"))
    prompt = len(expected["input_ids"])
    assert np.abs(logits[:prompt] - expected["logits"]).max() <= LOGITS
    assert logits[prompt - 1 : -1].argmax(-1).tolist() == expected["greedy_ids"].tolist()


@pytest.mark.long
@pytest.mark.parametrize("case", ["small", *CASES])
def test_logits_and_greedy_answers(request, case):
    folder = SMALL if case == "small" else request.getfixturevalue("shared") / "data" / "parity" / case
    expected = expected_of(folder)
    runtime = atlas_jax.load(folder, dtype="float32", max_length=128, page_size=32, prefill_chunk=32)
    ids, answer = expected["input_ids"].tolist(), expected["greedy_ids"].tolist()
    assert np.abs(runtime.logits(ids) - expected["logits"]).max() <= LOGITS
    options = dict(max_tokens=len(answer), ignore_eos=True)
    assert runtime.generate(ids, drafter="none", **options).token_ids == answer
    assert runtime.generate(ids, drafter="mtp", drafts=3, **options).token_ids == answer
