"""Parameters of a qwen3_5-text model in and out of Hugging Face layout, and their initial values."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.flax import load_file, save_file

FLOAT32 = ("A_log", "dt_bias")  # kept in float32 while training


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the checkpoint, the MTP head included."""
    D, I = config["hidden_size"], config["intermediate_size"]
    q, kv, hd = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    hv, dv = config["linear_num_value_heads"], config["linear_value_head_dim"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    full = {"q_proj": (2 * q * hd, D), "k_proj": (kv * hd, D), "v_proj": (kv * hd, D), "o_proj": (D, q * hd)}
    full = {f"self_attn.{n}.weight": s for n, s in full.items()}
    full |= {"self_attn.q_norm.weight": (hd,), "self_attn.k_norm.weight": (hd,)}
    linear = {"in_proj_qkv": (2 * keys + hv * dv, D), "in_proj_z": (hv * dv, D), "in_proj_b": (hv, D)}
    linear |= {"in_proj_a": (hv, D), "out_proj": (D, hv * dv), "norm": (dv,)}
    linear |= {"conv1d": (2 * keys + hv * dv, 1, config["linear_conv_kernel_dim"])}
    linear = {f"linear_attn.{n}.weight": s for n, s in linear.items()}
    linear |= {"linear_attn.A_log": (hv,), "linear_attn.dt_bias": (hv,)}
    rest = {"gate_proj": (I, D), "up_proj": (I, D), "down_proj": (D, I)}
    rest = {f"mlp.{n}.weight": s for n, s in rest.items()}
    rest |= {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,)}
    out = {"model.embed_tokens.weight": (config["vocab_size"], D), "model.norm.weight": (D,)}
    for i, kind in enumerate(config["layer_types"]):
        mixer = full if kind == "full_attention" else linear
        out |= {f"model.layers.{i}.{n}": s for n, s in (mixer | rest).items()}
    out |= {f"mtp.layers.0.{n}": s for n, s in (full | rest).items()}
    out |= {f"mtp.{n}.weight": (D,) for n in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    return out | {"mtp.fc.weight": (D, 2 * D)}


def initial(config: dict, seed: int = 0) -> dict[str, jax.Array]:
    """Random float32 parameters: unit-scale projections, small residual writers, slow decays."""
    rng, out = np.random.default_rng(seed), {}
    depth = (2 * len(config["layer_types"])) ** -0.5
    for name, shape in shapes(config).items():
        if name.endswith("A_log"):
            x = np.log(rng.uniform(0.5, 8, shape))
        elif name.endswith("dt_bias"):
            x = np.log(np.expm1(np.exp(rng.uniform(np.log(1e-3), np.log(0.1), shape))))
        elif name.endswith("linear_attn.norm.weight"):
            x = np.ones(shape)
        elif len(shape) == 1:
            x = np.zeros(shape)
        elif name.endswith("conv1d.weight"):
            x = rng.uniform(-0.5, 0.5, shape)
        elif name.endswith("embed_tokens.weight"):
            x = 0.02 * rng.normal(size=shape)
        else:
            writes = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
            x = rng.normal(size=shape) * shape[1] ** -0.5 * (depth if writes else 1)
        out[name] = jnp.asarray(x, jnp.float32)
    return out


def cast(params: dict, dtype) -> dict:
    """Parameters in the compute dtype; decays stay float32."""
    return {k: v if k.endswith(FLOAT32) else v.astype(dtype) for k, v in params.items()}


def save(folder: pathlib.Path, params: dict, shards: int = 1) -> None:
    """bfloat16 safetensors, split by size over `shards` files (with an index where there are several)."""
    folder.mkdir(parents=True, exist_ok=True)
    params = {k: jnp.asarray(v, jnp.bfloat16) for k, v in sorted(params.items())}
    if shards == 1:
        return save_file(params, folder / "model.safetensors", metadata={"format": "pt"})
    total, done, files = sum(v.nbytes for v in params.values()), 0, {}
    for name, value in params.items():
        files[name] = f"model-{done * shards // total + 1:05d}-of-{shards:05d}.safetensors"
        done += value.nbytes
    for file in sorted(set(files.values())):
        save_file({k: v for k, v in params.items() if files[k] == file}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def load(folder: pathlib.Path, dtype=jnp.float32) -> dict[str, jax.Array]:
    """Every tensor of the folder's safetensors files, cast to `dtype`."""
    out = {}
    for file in sorted(folder.glob("*.safetensors")):
        out |= {k: v.astype(dtype) for k, v in load_file(file).items()}
    return out
