"""Forking a decoding state: one prefill of a prompt, two continuations from it that go on independently.

python examples/fork.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import atlas_jax
from atlas_jax import state as states

PROMPT = "The flight was cancelled because"
FIRST = (" of", " the")  # the two continuations begin with these
LENGTH = 24

runtime = atlas_jax.load("tiny-agent", slots=2, max_length=512)
model, params, tokenizer = runtime.loop.model, runtime.params, runtime.tokenizer
assert tokenizer is not None
prefill = jax.jit(functools.partial(model.apply, method="prefill"), donate_argnums=1)
verify = jax.jit(functools.partial(model.apply, method="verify"), donate_argnums=1)
commit = jax.jit(states.commit, donate_argnums=0)

state = states.init(runtime.config, runtime.run)
prompt = runtime.encode(PROMPT)
padded = np.pad(prompt, (0, 64 - prompt.size))
# One sequence, in slot 1, whose rows begin with the first block of the batch.
_, _, state = prefill(params, state, jnp.array([1]), jnp.asarray(padded), jnp.array([0]), jnp.array([prompt.size]))
state = states.fork(state, jnp.int32(1), jnp.int32(2))

slots, one = jnp.array([1, 2]), jnp.array([1, 1])
tokens = jnp.asarray([tokenizer.encode(text)[0] for text in FIRST])
texts = [[int(t)] for t in tokens]
for _ in range(LENGTH):
    logits, hidden, state = verify(params, state, slots, tokens[:, None], one)
    state = commit(state, slots, one, hidden)
    tokens = jnp.argmax(logits[:, 0], axis=-1)
    for text, token in zip(texts, tokens, strict=True):
        text.append(int(token))
for slot, text in enumerate(texts, 1):
    print(f"slot {slot}: {PROMPT}{tokenizer.decode(text)!r}")
