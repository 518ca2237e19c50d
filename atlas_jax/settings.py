"""The one module that reads environment variables and sets JAX's global options."""

from __future__ import annotations

import os
from pathlib import Path

import jax


def enable_compilation_cache() -> None:
    """Keeps compiled executables on disk, unless the user has chosen a place (or none) already.

    `ATLAS_JAX_CACHE` names the folder; empty switches the cache off.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = os.environ.get("ATLAS_JAX_CACHE", str(home / "atlas_jax" / "xla"))
    if folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def compiler_options() -> dict[str, str]:
    """XLA options of every executable of ours.

    On a CPU, XLA hands products to YNNPACK, which packs the whole weight at every call: for the few rows of a decoding step
    that takes twice the time of Eigen's product (bench/NOTES.md).
    """
    return {"xla_cpu_experimental_ynn_fusion_type": ""} if jax.default_backend() == "cpu" else {}
