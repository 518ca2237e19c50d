"""Research switches: they change or check what the drafter is fed, and never what comes out."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import CONFIGS as LARGER
from models import RUN, params_of

from atlas_jax.config import FULL, LINEAR, Probes
from atlas_jax.decode.probes import fingerprint
from atlas_jax.errors import ConfigError
from atlas_jax.models import call
from atlas_jax.runtime import Runtime

CONFIG = dataclasses.replace(LARGER["dense"], layer_types=(LINEAR, FULL))
PROMPTS = [np.random.default_rng(7).integers(0, 96, n).tolist() for n in (9, 1, 40, 33)]
OFF, CHECKED, SHIFTED = Probes(), Probes(fingerprints=True), Probes(shift=2, fingerprints=True)


@functools.cache
def runtime(probes: Probes = OFF) -> Runtime:
    run = dataclasses.replace(RUN, rounds_per_dispatch=4, probes=probes)
    return Runtime(CONFIG, run, params_of(CONFIG, run))


@functools.cache
def answers(probes: Probes, drafter: str = "mtp") -> Any:
    return runtime(probes).generate(PROMPTS, max_tokens=20, drafter=drafter, drafts=0 if drafter == "none" else 3)


@pytest.mark.long
@pytest.mark.parametrize("probes", [CHECKED, SHIFTED], ids=["checked", "shifted"])
def test_no_probe_changes_the_output(probes):
    want = [a.token_ids for a in answers(OFF, "none")]
    assert [a.token_ids for a in answers(probes)] == want
    if probes is CHECKED:
        assert [a.token_ids for a in answers(probes, "random")] == want
        assert [a.acceptance.to_dict() for a in answers(probes)] == [a.acceptance.to_dict() for a in answers(OFF)]


@pytest.mark.parametrize("drafter", ["mtp", pytest.param("random", marks=pytest.mark.long)])
def test_the_drafter_is_fed_what_the_target_produced(drafter):
    for prompt, answer in zip(PROMPTS, answers(CHECKED, drafter), strict=True):
        found = answer.fingerprints
        assert found.differed == 0
        assert found.produced == answer.replayed - 1 + len(answer.token_ids)
        # Rows 1 … (or from those that the prefix cache had) of the prompt and of the answer; what the last round emitted would
        # be fed by the next one.
        rows = len(prompt) + len(answer.token_ids) - 1 - max(1, answer.restored)
        assert rows - 4 < found.fed <= rows
        assert answer.to_dict()["fingerprints"] == found._asdict()
    assert answers(OFF)[0].fingerprints is None and "fingerprints" not in answers(OFF)[0].to_dict()


@pytest.mark.long
def test_fingerprints_see_a_wrong_pairing():
    for answer in answers(SHIFTED):
        assert answer.fingerprints.differed == answer.fingerprints.fed > 0


@pytest.mark.long
def test_fingerprints_see_a_single_bit():
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(3, 64)), jnp.float32)
    for dtype in (jnp.float32, jnp.bfloat16):
        one = rows.astype(dtype)
        bits = jax.lax.bitcast_convert_type(one, f"uint{8 * one.dtype.itemsize}")
        seen = set(np.asarray(fingerprint(one)).tolist())
        for column in (0, 7, 63):
            for bit in (0, 5, 8 * one.dtype.itemsize - 1):
                other = bits.at[1, column].set(bits[1, column] ^ jnp.asarray(1 << bit, bits.dtype))
                prints = np.asarray(fingerprint(jax.lax.bitcast_convert_type(other, dtype)))
                assert prints[0] in seen and prints[2] in seen and prints[1] not in seen
                seen.add(int(prints[1]))
        assert 0 not in seen


@pytest.mark.long
def test_a_shift_pairs_each_row_with_an_earlier_hidden():
    """The drafter's keys are those of (token p, hidden p - 1 - shift), across chunks and into decoded rows."""
    r, other = runtime(OFF), runtime(SHIFTED)
    slot = 3
    prompt, answer = PROMPTS[slot - 1], other.generate(PROMPTS, max_tokens=20, drafter="mtp", drafts=3)[slot - 1]
    fed = len(prompt) + len(answer.token_ids) - 1 - 4
    tokens = jnp.asarray([*prompt, *answer.token_ids], jnp.int32)
    hidden = call(r.loop.model, r.params, tokens[None], method="forward").post_norm[0]
    assert other.loop._state is not None
    state = other.loop._state.target
    table = np.asarray(state.page_table[slot])
    values = np.asarray(state.pages.values[-1])[table]  # pages, heads, tokens, components
    got = np.moveaxis(values, 1, 2).reshape(-1, values.shape[1], values.shape[3])
    embedded = call(r.loop.model, r.params, tokens, method="embed")
    previous = jnp.concatenate([jnp.zeros((1 + 2, hidden.shape[1])), hidden])[: tokens.size]
    entered = lambda model, *xs: model.mtp.keys_values(model.drafter_norms, *xs)  # noqa: E731
    want = r.loop.model.apply(r.params, embedded, previous, jnp.arange(tokens.size), method=entered)[1]
    # prefill and decoding are other arithmetics than a whole pass: 1e-3 of values of order 1
    np.testing.assert_allclose(got[1:fed], np.asarray(want)[1:fed], atol=1e-3)


def test_probes_in_force_are_said():
    assert "shift=2" in runtime(SHIFTED).in_force and "Probes" not in runtime(OFF).in_force


def test_probes_need_a_drafter_with_a_layer():
    headless = dataclasses.replace(CONFIG, mtp_num_hidden_layers=0)
    with pytest.raises(ConfigError, match="this model has none"):
        Runtime(headless, dataclasses.replace(RUN, probes=SHIFTED), None)
