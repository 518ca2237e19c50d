"""Few arguments a compiled round: small arrays of the state and of the parameters are packed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax.config import RunConfig
from atlas_jax.decode.drafters import drafter_named
from atlas_jax.decode.state import init_decode
from atlas_jax.state.record import Field, record
from atlas_jax.weights.presets import parameter_shapes, preset_config


@pytest.mark.parametrize(("shape", "count"), [("qwen3.5-27b", 31), ("qwen3.6-35b-a3b", 39), ("qwen3-next-80b", 39)])
def test_a_round_of_a_published_shape_has_fewer_than_40(shape, count):
    """Those of `round.dispatch`: parameters, state, slots and the number of rounds; one more each for the hybrid's state."""
    config, run = preset_config(shape), RunConfig(dtype="bfloat16", layout="stacked", row_group=16)
    assert config.has_mtp
    params = parameter_shapes(config, dtype=run.dtype, layout=run.layout)
    state = jax.eval_shape(lambda: init_decode(config, run))
    assert len(jax.tree.leaves((params, state))) + 2 == count < 40
    hybrid = jax.eval_shape(lambda: drafter_named("hybrid").init(config, run))
    assert len(jax.tree.leaves(hybrid)) == 1


FIELDS = (
    Field("a"),
    Field("b", (2, 3), "float32"),
    Field("c", (), "uint32"),
    Field("d", (4,)),
    Field("e", (), "bool"),
)


def test_a_record_keeps_every_bit_of_every_field():
    odd = np.array([[np.nan, -0.0, 1e-45], [np.inf, -np.inf, np.pi]], np.float32)
    made = record(3, FIELDS, a=-5, b=odd, c=np.uint32(2**32 - 1), e=True)
    for s in range(3):
        assert (int(made["a"][s]), int(made["c"][s]), bool(made["e"][s])) == (-5, 2**32 - 1, True)
        np.testing.assert_array_equal(np.asarray(made["b"][s]).view(np.int32), odd.view(np.int32))
        assert made["d"][s].tolist() == [0] * 4


@pytest.mark.parametrize("slots", [2, [1], [2, 0]])
def test_fields_are_set_in_some_slots_and_nowhere_else(slots):
    rng = np.random.default_rng(0)
    values = {f.name: rng.integers(0, 2, (3, *f.shape)) for f in FIELDS}
    made = record(3, FIELDS, **values)
    new = {"a": 7, "b": rng.normal(size=(*np.shape(slots), 2, 3)).astype(np.float32), "d": 3, "e": True}
    put = jax.jit(lambda r, s: r.put(s, **new))(made, jnp.asarray(slots, jnp.int32))
    for name, value in values.items():
        want = value.astype(made[name].dtype)
        if name in new:
            want[np.asarray(slots)] = new[name]
        np.testing.assert_array_equal(put[name], want, err_msg=name)
    at, one = jnp.array([[1, 3]]), jnp.array([1])
    moved = dataclasses.replace(made).put_at("d", one, at, at).add_at("d", one, at, at)
    assert moved["d"][1].tolist() == [values["d"][1][0], 2, values["d"][1][2], 6]
    np.testing.assert_array_equal(np.delete(moved.words, 1, 0), np.delete(made.words, 1, 0))
