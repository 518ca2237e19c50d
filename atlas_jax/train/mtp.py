"""The multi-token prediction head: one attention layer on (next token, hidden), chained for further drafts."""

import jax
import jax.numpy as jnp

from atlas_jax.train.forward import (
    Params,
    Shape,
    attention_inputs,
    attention_output,
    draft_attention,
    linear,
    mlp,
    rms_norm,
)


def joined(p: Params, tokens, h, shape: Shape):
    """tokens [B, T] and the hidden one position earlier [B, T, D] -> the MTP layer's input [B, T, D]."""
    e = rms_norm(p["model.embed_tokens.weight"][tokens], p["mtp.pre_fc_norm_embedding.weight"], shape.eps)
    h = rms_norm(h, p["mtp.pre_fc_norm_hidden.weight"], shape.eps)
    return linear(jnp.concatenate([e, h], -1), p["mtp.fc.weight"])


def finish(p: Params, x, o, gate, shape: Shape):
    """The MTP layer after its attention: residual x, attention output o, gate -> `mtp.norm` output [B, T, D]."""
    at = "mtp.layers.0."
    x = x + attention_output(p, at + "self_attn.", o, gate)
    x = x + mlp(p, at + "mlp.", rms_norm(x, p[at + "post_attention_layernorm.weight"], shape.eps))
    return rms_norm(x, p["mtp.norm.weight"], shape.eps)


def attention_of(p: Params, x, positions, shape: Shape):
    at = "mtp.layers.0."
    n = rms_norm(x, p[at + "input_layernorm.weight"], shape.eps)
    return attention_inputs(p, at + "self_attn.", n, positions, shape)


def chain(p: Params, ids, h, rows, shape: Shape, steps: int, tokens=None):
    """Chained drafts as inference makes them: ids [B, T], hiddens h [B, T, D], rows [B, R] -> n_0 …, [B, R, D] each.

    Draft d of row k reads token t_{k+1+d} and the hidden of draft d-1 (the target's h_k at d = 0), attends to the
    target-fed keys of positions <= k and to its own chain; head·n_d predicts t_{k+2+d}. Tokens come from `ids` (teacher
    forcing) or, if `tokens` is given, from `tokens(n_{d-1})` [B, R]. Rows need k + steps < T.
    """
    take = jax.vmap(lambda x, i: x[i])
    x = joined(p, ids[:, 1:], h[:, :-1], shape)
    _, keys, values, _ = attention_of(p, x, jnp.arange(x.shape[1]), shape)
    x, own, out = take(x, rows), [], []
    for d in range(steps):
        if d:
            t = take(ids, rows + 1 + d) if tokens is None else tokens(out[-1])
            x = joined(p, t, out[-1], shape)
        q, k, v, gate = attention_of(p, x, rows + d, shape)
        own += [(k, v)] if d else []
        out.append(finish(p, x, draft_attention(q, rows, (keys, values), own), gate, shape))
    return out
