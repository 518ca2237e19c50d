"""Losses of the target and of its MTP head, and the acceptance of chained drafts along given text.

Letters: B rows, T tokens, R chosen positions a row, D model, V vocabulary, S chained steps, M = positions of all rows.
"""

import functools

import jax
import jax.numpy as jnp

from atlas_jax.train import forward, mtp
from atlas_jax.train.forward import Params, Shape

BLOCK = 8192  # positions whose logits exist at one time


def over_blocks(f, *arrays, block: int = BLOCK):
    """Sum of f over blocks of the leading axis (zero padded), rematerialised in the backward pass."""
    n = arrays[0].shape[0]
    block = min(block, n)
    pad = -n % block
    split = [jnp.pad(a, [(0, pad)] + [(0, 0)] * (a.ndim - 1)).reshape(-1, block, *a.shape[1:]) for a in arrays]

    def add(total, xs):
        return jax.tree.map(jnp.add, total, f(*xs)), None

    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(f, *(s[0] for s in split)))
    return jax.lax.scan(jax.checkpoint(add), zero, split)[0]


def logits(n, matrix):
    return jnp.matmul(n, matrix.T, preferred_element_type=jnp.float32)


def cross_entropy(n, matrix, labels, weights):
    """Weighted sum of -log p(label): n [M, D], matrix [V, D], labels and weights [M]."""

    def part(n, labels, weights):
        z = logits(n, matrix)
        at = jnp.take_along_axis(z, labels[:, None], 1)[:, 0]
        return jnp.sum(weights * (jax.nn.logsumexp(z, -1) - at))

    return over_blocks(part, n, labels, weights)


def distillation(n, teacher, matrix, weights):
    """Weighted sums of the cross entropy to the teacher's distribution and of argmax agreement: n, teacher [M, D]."""

    def part(n, teacher, weights):
        z, t = logits(n, matrix), logits(teacher, matrix)
        soft = jax.lax.stop_gradient(jax.nn.softmax(t, -1))
        loss = jax.nn.logsumexp(z, -1) - jnp.sum(soft * z, -1)
        same = jnp.argmax(z, -1) == jnp.argmax(t, -1)
        return jnp.sum(weights * loss), jnp.sum(weights * same)

    return over_blocks(part, n, teacher, weights)


take = jax.vmap(lambda x, i: x[i])


def target_loss(p: Params, batch, shape: Shape, key, aux_steps: int = 2, aux: float = 0.3):
    """Next-token loss of the target plus `aux` times the mean loss of its chained drafts.

    batch: ids [B, T], weights [B, T] (of predicting the token at that place), rows [B, R] for the drafts.
    """
    ids, weights, rows = batch
    h = forward.hidden(p, ids, shape, key)
    matrix = forward.head(p, shape)
    flat = functools.partial(jnp.reshape, shape=-1)
    main = cross_entropy(h[:, :-1].reshape(-1, h.shape[-1]), matrix, flat(ids[:, 1:]), flat(weights[:, 1:]))
    main /= weights[:, 1:].sum() + 1e-6
    drafts = []
    for d, n in enumerate(mtp.chain(p, ids, h, rows, shape, aux_steps)):
        w = take(weights, rows + 2 + d)
        loss = cross_entropy(n.reshape(-1, n.shape[-1]), matrix, flat(take(ids, rows + 2 + d)), flat(w))
        drafts.append(loss / (w.sum() + 1e-6))
    drafts = jnp.stack(drafts)
    return main + aux * drafts.mean(), {"loss": main, "drafts": drafts}


def mtp_loss(drafter: Params, target: Params, batch, shape: Shape, steps: int = 4):
    """Mean over chained steps of the drafts' cross entropy to the frozen target's own distribution.

    The target's hiddens are those of inference (no dropout); `drafter` holds the `mtp.*` parameters alone.
    """
    ids, weights, rows = batch
    h = jax.lax.stop_gradient(forward.hidden(target, ids, shape))
    matrix = forward.head(target, shape)
    losses, agree = [], []
    for d, n in enumerate(mtp.chain(target | drafter, ids, h, rows, shape, steps)):
        w = take(weights, rows + 2 + d).reshape(-1)
        teacher = take(h, rows + 1 + d)
        loss, same = distillation(n.reshape(-1, n.shape[-1]), teacher.reshape(-1, n.shape[-1]), matrix, w)
        losses.append(loss / (w.sum() + 1e-6))
        agree.append(same / (w.sum() + 1e-6))
    return jnp.stack(losses).mean(), {"drafts": jnp.stack(losses), "agree": jnp.stack(agree)}


def held_out(p: Params, ids, reply, rows, shape: Shape, steps: int = 4):
    """Counts on held-out text: ids, reply [B, T] (1 where the token belongs to a reply), rows [B, R].

    Returns sums: reply tokens, their loss, how many are the target's argmax; and for each draft d how many rows still
    lie in a reply, and in how many of them drafts 0 … d all equal the target's argmax (chained as inference does).
    """
    h = forward.hidden(p, ids, shape)
    matrix = forward.head(p, shape)
    D = h.shape[-1]

    def part(h, labels, w):
        z = logits(h, matrix)
        at = jnp.take_along_axis(z, labels[:, None], 1)[:, 0]
        return jnp.sum(w), jnp.sum(w * (jax.nn.logsumexp(z, -1) - at)), jnp.sum(w * (z.argmax(-1) == labels))

    count, loss, right = over_blocks(part, h[:, :-1].reshape(-1, D), ids[:, 1:].reshape(-1), reply[:, 1:].reshape(-1))

    def best(n):  # [B, R, D] -> [B, R]
        flat = n.reshape(-1, D)
        blocks = jnp.pad(flat, [(0, -len(flat) % BLOCK), (0, 0)]).reshape(-1, BLOCK, D)
        return jax.lax.map(lambda x: logits(x, matrix).argmax(-1), blocks).reshape(-1)[: len(flat)].reshape(n.shape[:2])

    drafts = mtp.chain(p, ids, h, rows, shape, steps, tokens=best)
    inside, good = jnp.ones(rows.shape), jnp.ones(rows.shape)
    rowcount, accepted = [], []
    for d, n in enumerate(drafts):
        inside = inside * take(reply, rows + 2 + d)
        good = good * (best(n) == best(take(h, rows + 1 + d)))
        rowcount.append(inside.sum())
        accepted.append((inside * good).sum())
    return {"count": count, "loss": loss, "right": right, "rows": jnp.stack(rowcount), "accepted": jnp.stack(accepted)}
