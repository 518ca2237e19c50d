"""Model shapes by name, random weights for them, and what a name or a path on the command line means."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import tomllib
from typing import Any

import jax
import jax.numpy as jnp

from atlas_jax.config import ModelConfig
from atlas_jax.errors import CheckpointError, ConfigError
from atlas_jax.models import HybridModel
from atlas_jax.settings import weights_folder
from atlas_jax.tensor_parallel import ONE_DEVICE, OneDevice
from atlas_jax.weights.checkpoint import has_weights
from atlas_jax.weights.hf_config import model_config, recipe_in
from atlas_jax.weights.load import Progress, load_params
from atlas_jax.weights.quantised.random import random_quantised
from atlas_jax.weights.quantised.scheme import scheme_named

PACKAGE = pathlib.Path(__file__).resolve().parent.parent
PACKAGED = {"tiny-agent": PACKAGE / "data" / "tiny_agent"}
SHAPE = "shape:"


def preset_names() -> list[str]:
    """Names of the model shapes in `configs/`."""
    return sorted(path.stem for path in _configs().glob("*.toml"))


def preset_config(name: str) -> ModelConfig:
    """The model shape `name`.

    Raises:
        ConfigError: there is none of that name, or its file is wrong.
    """
    if name not in preset_names():
        raise ConfigError(f"no model shape is called {name!r}; there are: {', '.join(preset_names())}")
    path = _configs() / f"{name}.toml"
    try:
        fields: dict[str, Any] = tomllib.loads(path.read_text())
        fields = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
        return ModelConfig(**fields)
    except (tomllib.TOMLDecodeError, TypeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def parameter_shapes(config: ModelConfig, *, dtype: str, layout: str) -> dict[str, Any]:
    """Shape and dtype of every parameter, in the tree of `HybridModel.init`; computes nothing."""
    return jax.eval_shape(functools.partial(_init, config, dtype, layout), jax.random.key(0))


def random_params(
    config: ModelConfig, *, dtype: str, layout: str, seed: int = 0, weights: str | None = None
) -> dict[str, Any]:
    """Random parameters of scaled normal weights, made on the device; quantised as `weights` says (`scheme_named`).

    Raises:
        ConfigError: no scheme has that name, or it does not suit the head.
    """
    # The hardware's generator: its program stays small however many weights there are.
    key, init = jax.random.key(seed, impl="rbg"), functools.partial(_init, config, dtype, layout)
    if weights is None:
        return jax.jit(init)(key)
    scheme, head = scheme_named(weights)
    if head and config.tie_word_embeddings:
        raise ConfigError(
            f"weights {weights!r}: this shape's head is its embedding, which is not quantised; leave out +head"
        )
    shapes = parameter_shapes(config, dtype=dtype, layout=layout)
    return random_quantised(config, scheme, head, shapes, init, key)


def _init(config: ModelConfig, dtype: str, layout: str, key: jax.Array) -> dict[str, Any]:
    def declare(model: HybridModel) -> list[Any]:
        """Touches every block: it declares its weights when one of them is asked for."""
        drafter = [model.mtp.attention.in_proj, model.mtp.feed_forward.down] if config.has_mtp else []
        return [model.linear_attention.in_proj, model.attention.in_proj, model.feed_forward.down, *drafter]

    return dict(HybridModel(config, jnp.dtype(dtype), layout).init(key, method=declare))


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a model comes from: a `directory` of Hugging Face files, or the shape `preset` with random weights."""

    name: str
    config: ModelConfig
    directory: pathlib.Path | None = None
    preset: str | None = None

    def load(
        self,
        *,
        dtype: str,
        layout: str,
        seed: int = 0,
        weights: str | None = None,
        placed: OneDevice = ONE_DEVICE,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """The parameters, where `placed` has them; `seed` and `weights` are about random weights.

        Raises:
            CheckpointError: the weights are missing, damaged or not those of `config`.
            ConfigError: `weights` are not known, or given for a directory.
        """
        if self.directory is None:
            return placed.params(random_params(self.config, dtype=dtype, layout=layout, seed=seed, weights=weights))
        if weights is not None:
            raise ConfigError(
                f"weights {weights!r} is for random weights (shape:NAME); a directory's are of the form that they are stored in"
            )
        recipe = recipe_in(self.directory)
        return load_params(
            self.directory,
            self.config,
            dtype=dtype,
            layout=layout,
            recipe=recipe,
            cache_folder=weights_folder(),
            placed=placed,
            progress=progress,
        )


def resolve(name_or_path: str | pathlib.Path) -> Source:
    """What a model's name means: a directory, a packaged model, or `shape:NAME` for random weights of a preset.

    Raises:
        CheckpointError: nothing of that name is there; it says what was tried.
        ConfigError: a directory or preset whose configuration does not work.
    """
    name = str(name_or_path)
    if name.startswith(SHAPE):
        preset = name.removeprefix(SHAPE)
        return Source(name, preset_config(preset), preset=preset)
    path = pathlib.Path(name).expanduser()
    packaged = PACKAGED.get(name)
    if path.is_dir():
        return Source(name, model_config(path), directory=path)
    if packaged is not None and has_weights(packaged):
        return Source(name, model_config(packaged), directory=packaged)
    shapes = ", ".join(SHAPE + preset for preset in preset_names())
    tried = [f"a directory {path} (not there)" if not path.exists() else f"a directory {path} (it is a file)"]
    tried.append(f"a packaged model ({', '.join(PACKAGED)})" + (f": {packaged} has no weights" if packaged else ""))
    raise CheckpointError(f"no model {name!r}. Tried {'; '.join(tried)}. For random weights of a known shape: {shapes}")


def _configs() -> pathlib.Path:
    """`configs/` of the checkout, or what the wheel made of it."""
    installed = PACKAGE / "configs"
    folder = installed if installed.is_dir() else PACKAGE.parent / "configs"
    if not folder.is_dir():
        raise ConfigError(f"the folder of model shapes is missing ({installed}, {folder}); install atlas-jax again")
    return folder
