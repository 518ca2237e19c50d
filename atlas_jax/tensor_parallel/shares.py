"""What a device's share of a model is, and what the devices tell each other."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from atlas_jax.config import ModelConfig
from atlas_jax.errors import ConfigError
from atlas_jax.shapes import Array, Float, Int

AXIS = "tensor"  # of the mesh
SHARED = (
    "num_attention_heads",
    "num_key_value_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


def check(config: ModelConfig, devices: int) -> None:
    """Raises ConfigError unless so many devices can share the model, and says how many can."""
    names = (*SHARED, "vocab_size")
    uneven = [f"{name} {getattr(config, name)}" for name in names if getattr(config, name) % devices]
    if uneven:
        fit = [n for n in range(1, devices) if not any(getattr(config, name) % n for name in names)]
        raise ConfigError(
            f"{devices} devices cannot share {', '.join(uneven)} evenly; tensor_parallel may be {', '.join(map(str, fit))}"
        )


def local_config(config: ModelConfig, devices: int) -> ModelConfig:
    """The shape of one device's share of the layers."""
    return dataclasses.replace(config, **{name: getattr(config, name) // devices for name in SHARED})


def added(x: Float[Array, "*any"], devices: int) -> Float[Array, "*any"]:
    """The sum of all devices' `x`, added in the devices' order."""
    if devices == 1:
        return x
    every = jax.lax.all_gather(x, AXIS)
    return functools.reduce(jnp.add, (every[device] for device in range(devices)))


def gathered(x: Float[Array, "*rows N"], devices: int) -> Float[Array, "*rows all"]:
    """All devices' columns, one device after the other."""
    return x if devices == 1 else jax.lax.all_gather(x, AXIS, axis=x.ndim - 1, tiled=True)


def looked_up(table: Float[Array, "N D"], rows: Int[Array, "*any"], devices: int) -> Float[Array, "*any D"]:
    """Rows of a table that lies on the devices, N rows on each."""
    if devices == 1:
        return table.at[rows].get(mode="promise_in_bounds")
    here = rows - table.shape[0] * jax.lax.axis_index(AXIS)
    mine = (here >= 0) & (here < table.shape[0])
    found = table.at[jnp.where(mine, here, 0)].get(mode="promise_in_bounds")
    return added(jnp.where(mine[..., None], found, 0), devices)  # all but one are zeros
