"""Sampling on the device, one row at a time: penalties, filters, the draw, log-probabilities.

A row is one position of one sequence, and every function here treats it by itself. Verify has K rows a sequence, and
row t must be sampled as if the drafts before it had been emitted: `row_counts` gives it exactly those tokens. A draw
depends on the request's seed, the token's position and the row's distribution, so that a request yields the same tokens
whatever was drafted, and a draft may be kept exactly when it equals the draw.

The order in which a sum over the vocabulary adds is the compiler's choice and may follow the number of rows: callers
pass rows through `by_row_group`, as `pick` does, so that the shape is always the same.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax.decode.request import SamplingParams
from atlas_jax.shapes import Array, Bool, Float, Int, UInt32
from atlas_jax.state.record import Field, Record
from pallas_kernels.rows import by_row_group, live_rows


def sampler_fields(vocab: int) -> tuple[Field, ...]:
    """Sampling values and token history of a slot. Functions below take any `Record` that has them; slot 0 is the sentinel: padding
    may write it, nobody reads it."""
    return (
        Field("counts", (vocab,)),  # how often each token was generated
        Field("seen", (vocab,), "bool"),  # tokens of the prompt
        Field("bias", (vocab,), "float32"),
        Field("temperature", (), "float32"),  # 0 is greedy
        Field("top_k"),  # 0 keeps all
        Field("top_p", (), "float32"),
        Field("min_p", (), "float32"),
        Field("presence", (), "float32"),
        Field("frequency", (), "float32"),
        Field("repetition", (), "float32"),
        Field("seed", (), "uint32"),
        Field("plain", (), "bool"),  # greedy without penalties or bias: the pick is the argmax of the raw logits
    )


# Of every slot: greedy, without penalties, bias or history.
NEUTRAL: dict[str, Any] = dict(top_p=1, repetition=1, plain=True)


def slot_values(params: SamplingParams, prompt: Sequence[int] | np.ndarray, vocab: int) -> dict[str, Any]:
    """`sampler_fields` for a validated request, whose history starts empty: values of fixed types and shapes, so that setting them
    compiles once."""
    seen, bias = np.zeros(vocab, bool), np.zeros(vocab, np.float32)
    seen[np.asarray(prompt, np.int64)] = True
    for token, value in params.logit_bias.items():
        bias[token] = value
    neutral = not params.penalised
    return dict(
        temperature=np.float32(0.0 if params.greedy else params.temperature),
        top_k=np.int32(min(params.top_k, vocab)),
        top_p=np.float32(max(params.top_p, np.finfo(np.float32).tiny)),  # 0 would mean no filter
        min_p=np.float32(params.min_p),
        presence=np.float32(params.presence_penalty),
        frequency=np.float32(params.frequency_penalty),
        repetition=np.float32(params.repetition_penalty),
        seed=np.uint32(secrets.randbits(32) if params.seed is None else params.seed),
        plain=np.bool_(params.greedy and neutral),
        counts=np.int32(0),
        seen=seen,
        bias=bias,
    )


def count_tokens(state: Record, slots: Int[Array, " B"], tokens: Int[Array, "B K"], n: Int[Array, " B"]) -> Record:
    """Adds the first `n` tokens of each sequence, just emitted, to its slot's counts."""
    emitted = jnp.arange(tokens.shape[1]) < n[:, None]
    added = emitted.astype(jnp.int32)
    return state.add_at("counts", slots, jnp.where(emitted, tokens, 0), added)


def row_counts(counts: Int[Array, "B V"], tokens: Int[Array, "B K"]) -> Int[Array, "B K V"]:
    """Counts as each row of a verify must see them.

    tokens[:, 0] is the last emitted token, which `counts` already holds; tokens[:, 1:] are drafts. Row t has read the
    drafts 1 … t, so it sees them added, each once.
    """
    rows, sequences = [counts], jnp.arange(tokens.shape[0])
    for t in range(1, tokens.shape[1]):
        rows.append(rows[-1].at[sequences, tokens[:, t]].add(1))
    return jnp.stack(rows, axis=1)


def process(
    logits: Float[Array, "R V"],
    counts: Int[Array, "R V"],
    seen: Bool[Array, "R V"],
    bias: Float[Array, "R V"],
    temperature: Float[Array, " R"],
    top_k: Int[Array, " R"],
    top_p: Float[Array, " R"],
    min_p: Float[Array, " R"],
    presence: Float[Array, " R"],
    frequency: Float[Array, " R"],
    repetition: Float[Array, " R"],
) -> Float[Array, "R V"]:
    """The logits that tokens are drawn from; what the filters remove is -inf, and the likeliest token always stays.

    In this order: bias; repetition over prompt and generated tokens; frequency and presence over generated ones;
    temperature (not for greedy rows); top-k, which keeps all that tie with the k-th; top-p, which keeps the fewest
    tokens whose mass after top-k reaches p, the lowest ids among equals; min-p, relative to the likeliest. With neutral
    values the logits pass unchanged. Rows of zeros, with which row groups are padded, ask for no filter.
    """
    column = lambda x: x[:, None]  # noqa: E731
    generated = counts > 0
    x = logits + bias
    penalised = jnp.where(x < 0, x * column(repetition), x / column(repetition))
    x = jnp.where(seen | generated, penalised, x)
    x = x - column(frequency) * counts - column(presence) * generated
    x = x / column(jnp.where(temperature > 0, temperature, 1.0))
    filtered = (top_k > 0) | ((top_p > 0) & (top_p < 1))
    # Costly, hence left out where no row asks for it. A row that does not ask keeps all of itself either way.
    x = jax.lax.cond(filtered.any(), _top_k_top_p, lambda x, *_: x, x, top_k, top_p)
    likely = x >= x.max(-1, keepdims=True) + column(jnp.log(min_p))
    return jnp.where(likely, x, -jnp.inf)


def _top_k_top_p(x: Float[Array, "R V"], top_k: Int[Array, " R"], top_p: Float[Array, " R"]) -> Float[Array, "R V"]:
    """Thresholds found by bisection: some thirty sums a row, where a sort is ten times the work."""
    V = x.shape[-1]
    column = lambda x: x[:, None]  # noqa: E731
    key = _ordered(x)
    low, high = key.min(-1), key.max(-1)
    k = jnp.where(top_k > 0, jnp.minimum(top_k, V), V)
    kth = _largest(lambda t: (key >= column(t)).sum(-1) >= k, low, high)
    mass = jnp.where(key >= column(kth), jnp.exp(x - x.max(-1, keepdims=True)), 0.0)
    wanted = top_p * mass.sum(-1)
    last = _largest(lambda t: jnp.where(key >= column(t), mass, 0.0).sum(-1) >= wanted, low, high)
    above, tied = key > column(last), key == column(last)
    missing = wanted - jnp.where(above, mass, 0.0).sum(-1)
    needed = jnp.ceil(missing / jnp.where(tied, mass, 0.0).max(-1)).astype(jnp.int32)
    nucleus = above | (tied & (jnp.cumsum(tied, axis=-1) <= column(jnp.maximum(needed, 1))))
    nucleus |= column((top_p <= 0) | (top_p >= 1))  # at 1, rounding must not drop the tail
    return jnp.where(nucleus & (key >= column(kth)), x, -jnp.inf)


def _ordered(x: Float[Array, "R V"]) -> Int[Array, "R V"]:
    """Integers in the order of the floats."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)  # one zero
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _largest(
    holds: Callable[[Int[Array, " R"]], Bool[Array, " R"]], low: Int[Array, " R"], high: Int[Array, " R"]
) -> Int[Array, " R"]:
    """The largest integer of low … high for which `holds`, which holds at `low` and never again once it fails."""

    def halve(bounds):
        low, high = bounds
        middle = (low | high) - ((low ^ high) >> 1)  # rounded up, without overflow
        here = holds(middle)
        return jnp.where(here, middle, low), jnp.where(here, high, middle - 1)

    return jax.lax.while_loop(lambda bounds: (bounds[0] < bounds[1]).any(), halve, (low, high))[0]


def draw(
    processed: Float[Array, "R V"], seed: UInt32[Array, " R"], position: Int[Array, " R"], greedy: Bool[Array, " R"]
) -> Int[Array, " R"]:
    """One token a row: the argmax (lowest id on ties) where greedy, otherwise a sample of softmax(processed).

    The sample is the argmax after adding Gumbel noise whose key is (seed, position); no other row or call changes it.
    """

    # 64 bits a value ("high"): with 32, noise ends at 16, and a vocabulary's long tail would never be drawn.
    def noise(seed, position):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), seed), position)
        return jax.random.gumbel(key, processed.shape[-1:], jnp.float32, mode="high")

    noisy = processed + jax.vmap(noise)(seed, position)
    return jnp.argmax(jnp.where(greedy[:, None], processed, noisy), axis=-1).astype(jnp.int32)


def pick(
    state: Record,
    slots: Int[Array, " B"],
    logits: Float[Array, "B K V"],
    tokens: Int[Array, "B K"],
    position: Int[Array, " B"],
    n_rows: Int[Array, " B"],
    row_group: int,
) -> Int[Array, "B K"]:
    """The target's own token after each row of a verify, `row_group` rows at a time; undefined from row `n_rows` on.

    Args:
        tokens: what the rows read: the last emitted token, which `state` has counted (unless it is the prompt's last),
            and drafts.
        position: of the token that row 0 picks; row t picks the one at position + t.
    """
    B, K, V = logits.shape
    flat, count = logits.reshape(B * K, V), live_rows(n_rows, K)
    best = lambda x: jnp.argmax(x, axis=-1).astype(jnp.int32)  # noqa: E731
    greedy = lambda: by_row_group(best, row_group, count, flat)  # noqa: E731

    def sampled():
        each = lambda x: jnp.repeat(x[slots], K, axis=0)  # noqa: E731
        counts = row_counts(state["counts"][slots], tokens).reshape(B * K, V)
        names = "temperature top_k top_p min_p presence frequency repetition".split()
        values = [each(state[name]) for name in names]
        at = (position[:, None] + jnp.arange(K)).reshape(-1)
        choose = lambda seed, at, greedy, *rest: draw(process(*rest), seed, at, greedy)  # noqa: E731
        return by_row_group(
            choose,
            row_group,
            count,
            each(state["seed"]),
            at,
            values[0] == 0,
            flat,
            counts,
            each(state["seen"]),
            each(state["bias"]),
            *values,
        )

    return jax.lax.cond(state["plain"][slots].all(), greedy, sampled).reshape(B, K)


def log_probabilities(
    logits: Float[Array, "R V"], tokens: Int[Array, " R"], n_top: int
) -> tuple[Float[Array, " R"], Float[Array, "R n"], Int[Array, "R n"]]:
    """Log-probabilities under softmax(logits), the raw distribution.

    Returns: those of `tokens`; those of the `n_top` likeliest, lowest id first among equals; the ids of these.
    """
    shifted = logits - logits.max(-1, keepdims=True)
    normalised = shifted - jnp.log(jnp.exp(shifted).sum(-1, keepdims=True))
    values, ids = jax.lax.top_k(normalised, n_top)
    return jnp.take_along_axis(normalised, tokens[:, None], axis=-1)[:, 0], values, ids
