"""Chooses among the implementations of one operation: by name, or by the platform that the program is compiled for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

# XLA's options for GPU programs. A round, and the loop of rounds, as one CUDA graph: loops are not captured by default, nor is
# anything short. Products go to cuBLAS, which reads a layer out of a stack in place, where XLA's own would copy it first inside a
# loop. Products of several row groups with one weight stay apart: merged into one of more rows, they would come out otherwise than
# alone. And bfloat16 is rounded where the program says so, whatever is fused.
GPU_OPTIONS: dict[str, str | int | bool] = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE",
    "xla_gpu_graph_min_graph_size": 1,
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_dot_merger_threshold_mb": 0,
    "xla_allow_excess_precision": False,
}


def matrix_precision(x: jax.Array) -> jax.lax.Precision | None:
    """Of products of `x`: float32 is not rounded to TensorFloat-32 on the way."""
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def large_shared_memory() -> bool:
    """Whether a block of the GPU has some 200 KiB of shared memory (data-centre cards), rather than 99 (GB10 and others)."""
    return any(name in jax.devices()[0].device_kind for name in ("H100", "H200", "H20", "GH200", "B200", "B300"))


def multiprocessors() -> int:
    """How many the GPU has. Programs that are compiled without a device ask too; the name of the card is known then."""
    device = jax.devices()[0]
    return getattr(device, "core_count", None) or (48 if "GB10" in device.device_kind else 132)


def choose[F: Callable](
    operation: str, implementations: Mapping[str, F], name: str | None, by_platform: Mapping[str, str]
) -> F:
    """Returns the implementation called `name`, or the platform's own where `name` is None (the reference elsewhere).

    Raises:
        ValueError: no implementation has that name.
    """
    if name is None:
        name = by_platform.get(jax.default_backend(), "reference")
    if name not in implementations:
        raise ValueError(f"{operation} has no implementation {name!r}; it has {', '.join(sorted(implementations))}")
    return implementations[name]
