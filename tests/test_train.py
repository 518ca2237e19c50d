"""The training forward against the Hugging Face reference, its drafts against drafting step by step, and the corpus builder."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from atlas_jax.models import HybridModel, call
from atlas_jax.train import forward, mtp
from atlas_jax.weights.presets import resolve


@pytest.fixture
def case(shared):
    folder = shared / "data" / "parity" / "qwen3_5"
    params = {k: jnp.asarray(v) for k, v in load_file(folder / "model.safetensors").items()}
    return params, forward.Shape.read(folder / "config.json"), load_file(folder / "expected.safetensors")


def test_training_and_decoding_are_one_model():
    """The forward that trained tiny-agent and the module that decodes it; float32, so only the order of sums differs."""
    source = resolve("tiny-agent")
    assert source.directory is not None
    tensors = load_file_as_float32(source.directory / "model.safetensors")
    shape = forward.Shape.read(source.directory / "config.json")
    ids = np.random.default_rng(0).integers(9, 8192, (1, 70))
    with jax.default_matmul_precision("highest"):
        trained = forward.hidden(tensors, ids, shape) @ forward.head(tensors, shape).T
    params = source.load(dtype="float32", layout="layers")
    model = HybridModel(source.config)
    hidden = call(model, params, jnp.asarray(ids, jnp.int32), method="forward")
    np.testing.assert_allclose(trained, call(model, params, hidden.post_norm, method="logits"), atol=2e-3, rtol=1e-4)


def load_file_as_float32(path):
    with jax.default_device(jax.devices("cpu")[0]):
        return {k: jnp.asarray(v, jnp.float32) for k, v in load_file(path).items()}


def test_reference(case):
    p, shape, e = case
    with jax.default_matmul_precision("highest"):
        h = forward.hidden(p, e["input_ids"], shape)
        np.testing.assert_allclose(h @ forward.head(p, shape).T, e["logits"], atol=2e-4)
        rows = jnp.arange(h.shape[1] - 1)[None]
        n = mtp.chain(p, e["input_ids"], h, rows, shape, 1)[0]
        np.testing.assert_allclose(n @ forward.head(p, shape).T, e["mtp_logits_from_post_norm"], atol=2e-4)


@pytest.mark.long
def test_chain_is_drafting_step_by_step(case):
    p, shape, e = case
    ids, k, steps = e["input_ids"], 30, 3
    h = forward.hidden(p, ids, shape)
    chained = mtp.chain(p, ids, h, jnp.arange(60)[None], shape, steps)
    tokens, fed = ids[:, 1 : k + 2], h[:, : k + 1]
    for d in range(steps):
        x = mtp.joined(p, tokens, fed, shape)
        q, key, value, gate = mtp.attention_of(p, x, jnp.arange(x.shape[1]), shape)
        n = mtp.finish(p, x, forward.flash(q, key, value), gate, shape)
        np.testing.assert_allclose(n[:, -1], chained[d][:, k], atol=1e-5)
        tokens = np.concatenate([tokens, ids[:, k + 2 + d : k + 3 + d]], 1)
        fed = jnp.concatenate([fed, n[:, -1:]], 1)


def test_inverse_and_its_gradient():
    a = jnp.tril(jnp.asarray(np.random.default_rng(0).normal(size=(2, 64, 64)) * 0.2, jnp.float32), -1)
    c = jnp.asarray(np.random.default_rng(1).normal(size=a.shape), jnp.float32)
    plain = lambda x: jnp.linalg.inv(jnp.eye(64) + x)  # noqa: E731
    np.testing.assert_allclose(forward.inverse(a), plain(a), atol=1e-4)
    grads = [jax.grad(lambda x, f=f: (f(x) * c).sum())(a) for f in (forward.inverse, plain)]
    np.testing.assert_allclose(grads[0], jnp.tril(grads[1], -1), atol=2e-3)
