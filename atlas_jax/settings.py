"""The one module that reads environment variables and sets JAX's global options."""

from __future__ import annotations

import os
from pathlib import Path

import jax

from pallas_kernels.registry import GPU_OPTIONS


def enable_compilation_cache() -> None:
    """Keeps compiled executables on disk, unless the user has chosen a place (or none) by JAX's own settings already."""
    folder = _folder("xla")
    if folder and jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def cost_folder() -> Path | None:
    """Where measured costs are kept; None if nothing is."""
    return _folder("costs")


def weights_folder() -> Path | None:
    """Where packed weights are kept; None if nothing is."""
    return _folder("weights")


def executables_folder() -> Path | None:
    """Where executables are kept that need no tracing; None if nothing is."""
    return _folder("executables")


def _folder(name: str) -> Path | None:
    """A part of what is kept between processes: in `ATLAS_JAX_CACHE` (empty keeps nothing), or else in the user's cache."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kept = os.environ.get("ATLAS_JAX_CACHE", str(home / "atlas_jax"))
    return Path(kept) / name if kept else None


def xla_flags() -> str:
    """Options that XLA itself reads."""
    return os.environ.get("XLA_FLAGS", "")


def compiler_options(row_group: int) -> dict[str, str | int | bool]:
    """XLA options of every executable of ours.

    On a CPU, XLA hands products to YNNPACK, whose rows come out alike wherever they stand in a group, or to Eigen, whose rows do
    not. Where rows come one by one that does not matter, and Eigen, which packs less, is twice as fast (bench/NOTES.md).

    Those for a GPU stand in `pallas_kernels.registry`.
    """
    if jax.default_backend() == "gpu":
        return dict(GPU_OPTIONS)
    alone = row_group == 1 and jax.default_backend() == "cpu"
    return {"xla_cpu_experimental_ynn_fusion_type": ""} if alone else {}


def row_group_on_gpu(rows: int) -> int:
    """The row group (`RunConfig.row_group`) for dispatches of up to `rows` rows. A group reads every weight, so one for all is
    best, as long as the tensor cores are done with it in the time that reading takes; single streams, whose few rows pad it,
    have a small one."""
    return min(max(1 << (rows - 1).bit_length(), 16), 64)
