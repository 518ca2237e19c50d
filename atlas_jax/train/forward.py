"""A differentiable full-sequence forward of a qwen3_5-text model.

Parameters are one flat dict under the checkpoint's own names (`model.layers.0.mlp.up_proj.weight`, `mtp.fc.weight`, …),
matrices as stored: [out, in]. Everything computes in `params`' dtype; norms, decays and states in float32.

Letters: B rows, T tokens, D model, H heads, N chunks, C tokens a chunk, V vocabulary.
"""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp

Params = dict[str, jax.Array]
CHUNK = 64


@dataclasses.dataclass(frozen=True)
class Shape:
    """What the forward needs of a checkpoint's config.json."""

    layer_types: tuple[str, ...]
    heads: int
    kv_heads: int
    head_dim: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    eps: float
    theta: float
    rotary: int  # channels of a head that rotate
    tied: bool

    @classmethod
    def read(cls, config: pathlib.Path | dict) -> "Shape":
        c = config if isinstance(config, dict) else json.loads(config.read_text())
        rope = c["rope_parameters"]
        return cls(
            layer_types=tuple(c["layer_types"]),
            heads=c["num_attention_heads"],
            kv_heads=c["num_key_value_heads"],
            head_dim=c["head_dim"],
            key_heads=c["linear_num_key_heads"],
            value_heads=c["linear_num_value_heads"],
            key_dim=c["linear_key_head_dim"],
            value_dim=c["linear_value_head_dim"],
            eps=c["rms_norm_eps"],
            theta=rope["rope_theta"],
            rotary=int(c["head_dim"] * rope["partial_rotary_factor"]),
            tied=c["tie_word_embeddings"],
        )


def rms_norm(x, weight, eps):
    """Zero-centred RMS norm over the last axis."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    return (y * (1 + weight.astype(jnp.float32))).astype(x.dtype)


def linear(x, weight):
    return x @ weight.T


def rotate(x, positions, shape: Shape):
    """Partial rotary embedding: x [B, T, H, head_dim], positions [T] or [B, T] -> the same shape as x."""
    half = shape.rotary // 2
    freq = shape.theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None, None].astype(jnp.float32) * freq
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b, rest = x[..., :half], x[..., half : shape.rotary], x[..., shape.rotary :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def unit_lower_inverse(a):
    """(I + a)⁻¹ of strictly lower triangular a [..., C, C], C a power of two: products, then doubling."""
    size = min(16, a.shape[-1])
    mm = functools.partial(jnp.matmul, precision="highest")

    def blocks(row, col):
        starts = range(0, a.shape[-1], size * (1 + row))
        return jnp.stack([a[..., s + row * size :, s + col * size :][..., :size, :size] for s in starts], -3)

    x, eye, power = blocks(0, 0), jnp.eye(size, dtype=a.dtype), 1
    inv = eye - x
    while 2 * power < size:  # (I + x)⁻¹ = (I - x)(I + x²)(I + x⁴)…
        x, power = mm(x, x), 2 * power
        inv = mm(inv, eye + x)
    while size < a.shape[-1]:
        top, bottom = inv[..., 0::2, :, :], inv[..., 1::2, :, :]
        corner = -mm(mm(bottom, blocks(1, 0)), top)
        top = jnp.concatenate([top, jnp.zeros_like(top)], -1)
        inv = jnp.concatenate([top, jnp.concatenate([corner, bottom], -1)], -2)
        size *= 2
    return inv[..., 0, :, :]


def _inverse_fwd(a):
    inv = unit_lower_inverse(a)
    return inv, inv


def _inverse_bwd(inv, grad):
    t = jnp.swapaxes(inv, -1, -2)
    return (jnp.tril(-t @ grad @ t, -1),)


inverse = jax.custom_vjp(unit_lower_inverse)
inverse.defvjp(_inverse_fwd, _inverse_bwd)


def gated_delta(q, k, v, beta, g, chunk: int = CHUNK):
    """Gated delta rule over whole rows from a zero state, in chunks (WY form).

    q, k [B, T, H, Dk] (k of unit length, q scaled), v [B, T, H, Dv], beta and g [B, T, H] float32 -> [B, T, H, Dv].
    Matrix products take operands in q's dtype and accumulate in float32.
    """
    B, T, H, _ = q.shape
    dtype = q.dtype
    pad = -T % chunk

    def chunks(x):
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(B, -1, chunk, *x.shape[2:]), (1, 3), (0, 2))  # [N, B, H, C, …]

    def mm(spec, *xs):
        return jnp.einsum(spec, *(x.astype(dtype) for x in xs), preferred_element_type=jnp.float32)

    q, k, v, beta, g = map(chunks, (q, k, v, beta, g))
    total = jnp.cumsum(g, -1)
    gap = total[..., :, None] - total[..., None, :]
    lower = jnp.tril(jnp.ones((chunk, chunk), bool))
    decay = jnp.exp(jnp.where(lower, gap, -jnp.inf))
    solve = inverse(jnp.tril(beta[..., None] * mm("...cd,...ed->...ce", k, k) * decay, -1))
    seen = jnp.exp(total)[..., None]
    u = mm("...ce,...ed->...cd", solve, beta[..., None] * v)
    w = mm("...ce,...ed->...cd", solve, beta[..., None] * seen * k)
    inside = mm("...cd,...ed->...ce", q, k) * decay
    reads = jnp.concatenate([w, seen * q], -2).astype(dtype)
    keys = (jnp.exp(total[..., -1:] - total)[..., None] * k).astype(dtype)
    last = jnp.exp(total[..., -1])[..., None, None]

    def step(S, x):
        reads, keys, u, last = x
        read = mm("bhcd,bhdv->bhcv", reads, S)
        new = (u - read[..., :chunk, :]).astype(dtype)
        return S * last + mm("bhcd,bhcv->bhdv", keys, new), (read[..., chunk:, :].astype(dtype), new)

    S = jnp.zeros((B, H, k.shape[-1], v.shape[-1]), jnp.float32)
    _, (outer, new) = jax.lax.scan(step, S, (reads, keys, u, last))
    out = outer + mm("...ce,...ed->...cd", inside, new)
    return jnp.moveaxis(out, (0, 2), (1, 3)).reshape(B, T + pad, H, -1)[:, :T]


def gdn(p: Params, at: str, x, shape: Shape):
    """Gated DeltaNet mixer: x [B, T, D] -> [B, T, D]."""
    B, T, _ = x.shape
    weight = p[at + "conv1d.weight"][:, 0]
    taps = weight.shape[1]
    raw = jnp.pad(linear(x, p[at + "in_proj_qkv.weight"]), ((0, 0), (taps - 1, 0), (0, 0)))
    mixed = jax.nn.silu(sum(raw[:, j : j + T] * weight[:, j] for j in range(taps)))
    size = shape.key_heads * shape.key_dim
    q, k, v = jnp.split(mixed, [size, 2 * size], -1)

    def unit(y):
        y = y.reshape(B, T, shape.key_heads, shape.key_dim).astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.sum(y * y, -1, keepdims=True) + 1e-6)
        return jnp.repeat(y, shape.value_heads // shape.key_heads, 2)

    q, k = unit(q) * shape.key_dim**-0.5, unit(k)
    v = v.reshape(B, T, shape.value_heads, shape.value_dim)
    beta = jax.nn.sigmoid(linear(x, p[at + "in_proj_b.weight"])).astype(jnp.float32)
    a = linear(x, p[at + "in_proj_a.weight"]).astype(jnp.float32) + p[at + "dt_bias"].astype(jnp.float32)
    g = -jnp.exp(p[at + "A_log"].astype(jnp.float32)) * jax.nn.softplus(a)
    o = gated_delta(q.astype(x.dtype), k.astype(x.dtype), v, beta, g)
    o = o * jax.lax.rsqrt(jnp.mean(o * o, -1, keepdims=True) + shape.eps)
    z = linear(x, p[at + "in_proj_z.weight"]).reshape(o.shape).astype(jnp.float32)
    o = (o.astype(x.dtype) * p[at + "norm.weight"]) * jax.nn.silu(z)
    return linear(o.astype(x.dtype).reshape(B, T, -1), p[at + "out_proj.weight"])


def attention_inputs(p: Params, at: str, x, positions, shape: Shape):
    """x [B, T, D] -> q [B, T, Hq, d], k and v [B, T, Hkv, d], gate [B, T, Hq·d]; q and k normed and rotated."""
    B, T, _ = x.shape
    qg = linear(x, p[at + "q_proj.weight"]).reshape(B, T, shape.heads, 2 * shape.head_dim)
    q, gate = jnp.split(qg, 2, -1)
    k, v = (linear(x, p[at + n]).reshape(B, T, shape.kv_heads, -1) for n in ("k_proj.weight", "v_proj.weight"))
    q = rotate(rms_norm(q, p[at + "q_norm.weight"], shape.eps), positions, shape)
    k = rotate(rms_norm(k, p[at + "k_norm.weight"], shape.eps), positions, shape)
    return q, k, v, gate.reshape(B, T, -1)


def attention_output(p: Params, at: str, o, gate):
    return linear(o.reshape(gate.shape) * jax.nn.sigmoid(gate), p[at + "o_proj.weight"])


def draft_attention(q, rows, shared, own, block: int = 512):
    """Attention of drafts: each chosen row sees the shared keys up to its own position and its own chain's keys.

    q [B, R, Hq, d], rows [B, R] positions, shared (k, v) [B, T, Hkv, d], own: a list of (k, v) [B, R, Hkv, d], one a
    step of the chain -> [B, R, Hq, d].
    """
    B, R, Hq, d = q.shape
    keys, values = shared
    Hkv = keys.shape[2]
    block = min(block, R)
    pad = -R % block

    def split(x):  # [B, R, …] -> [R / block, B, block, …]
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(B, -1, block, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def attend(x):
        q, rows, own = x
        q = q.reshape(B, block, Hkv, Hq // Hkv, d)
        s = jnp.einsum("brhgd,bthd->bhgrt", q, keys, preferred_element_type=jnp.float32)
        seen = jnp.arange(keys.shape[1]) <= rows[..., None]
        s = jnp.where(seen[:, None, None], s, -jnp.inf)
        more = [jnp.einsum("brhgd,brhd->bhgr", q, k, preferred_element_type=jnp.float32)[..., None] for k, _ in own]
        p = jax.nn.softmax(jnp.concatenate([s, *more], -1) * d**-0.5, -1).astype(q.dtype)
        o = jnp.einsum("bhgrt,bthd->brhgd", p[..., : keys.shape[1]], values)
        for i, (_, v) in enumerate(own):
            o += jnp.einsum("bhgr,brhd->brhgd", p[..., keys.shape[1] + i], v)
        return o.reshape(B, block, Hq, d)

    o = jax.lax.map(attend, (split(q), split(rows), [(split(k), split(v)) for k, v in own]))
    return jnp.moveaxis(o, 0, 1).reshape(B, R + pad, Hq, d)[:, :R]


@functools.cache
def fused_attention(Hq: int, Hkv: int, d: int) -> bool:
    """Whether this device compiles the fused attention kernel, its gradient included, for such heads."""
    if jax.default_backend() != "gpu":
        return False
    q, k = (jax.ShapeDtypeStruct((1, 128, h, d), jnp.bfloat16) for h in (Hq, Hkv))
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    try:
        jax.jit(jax.grad(lambda *x: attend(*x).astype(jnp.float32).sum(), (0, 1, 2))).lower(q, k, k).compile()
    except Exception as error:  # any refusal means the plain form is used, and says so
        print("no fused attention:", str(error)[:300], flush=True)
        return False
    return True


def flash(q, k, v):
    """Causal attention of q [B, T, Hq, d] to k and v [B, T, Hkv, d] -> [B, T, Hq, d]; fused where possible."""
    B, T, Hq, d = q.shape
    if q.dtype == jnp.bfloat16 and fused_attention(Hq, k.shape[2], d):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    return draft_attention(q, jnp.broadcast_to(jnp.arange(T), (B, T)), (k, v), [])


def mlp(p: Params, at: str, x, drop=None):
    """SwiGLU; `drop` [B, 1, I] scales hidden channels (dropout shared by all tokens of a row)."""
    y = jax.nn.silu(linear(x, p[at + "gate_proj.weight"])) * linear(x, p[at + "up_proj.weight"])
    return linear(y if drop is None else y * drop, p[at + "down_proj.weight"])


def hidden(p: Params, ids, shape: Shape, drop_key=None, drop_rate: float = 0.1):
    """ids [B, T] -> the target's hidden after the final norm, [B, T, D]."""
    x = p["model.embed_tokens.weight"][ids]
    positions = jnp.arange(ids.shape[1])
    for i, kind in enumerate(shape.layer_types):
        at = f"model.layers.{i}."
        n = rms_norm(x, p[at + "input_layernorm.weight"], shape.eps)
        if kind == "full_attention":
            q, k, v, gate = attention_inputs(p, at + "self_attn.", n, positions, shape)
            x = x + attention_output(p, at + "self_attn.", flash(q, k, v), gate)
        else:
            x = x + gdn(p, at + "linear_attn.", n, shape)
        drop = None
        if drop_key is not None:
            width = p[at + "mlp.up_proj.weight"].shape[0]
            keep = jax.random.bernoulli(jax.random.fold_in(drop_key, i), 1 - drop_rate, (ids.shape[0], 1, width))
            drop = keep.astype(x.dtype) / (1 - drop_rate)
        x = x + mlp(p, at + "mlp.", rms_norm(x, p[at + "post_attention_layernorm.weight"], shape.eps), drop)
    return rms_norm(x, p["model.norm.weight"], shape.eps)


def head(p: Params, shape: Shape):
    """The output matrix [V, D]."""
    return p["model.embed_tokens.weight" if shape.tied else "lm_head.weight"]
