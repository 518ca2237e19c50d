"""What the kernels' benchmarks share: compiling as the runtime does, times of captured chains, the copy bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.registry import GPU_OPTIONS

COMPILERS = ThreadPoolExecutor(12)


def require_gpu() -> None:
    """Says so and ends the program with status 1 where there is no GPU."""
    if jax.default_backend() != "gpu":
        raise SystemExit(f"this benchmark needs a GPU; JAX found {jax.devices()[0].device_kind} only")


def compiled(function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> Future[Any]:
    """Starts to compile `function` for the shapes of `args`."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    options = GPU_OPTIONS if jax.default_backend() == "gpu" else None
    make = lambda: jax.jit(function, donate_argnums=donate).lower(*shapes).compile(options)  # noqa: E731
    return COMPILERS.submit(make)


def seconds(run: Callable[..., Any], args: Any, after: Callable[[Any, Any], Any] | None = None, n: int = 20) -> Any:
    """Best of three means of `n` calls, and the last arguments. `after(result, args)` makes the next ones, if any are donated."""

    def go(n: int, args: Any) -> Any:
        out = None
        for _ in range(n):
            out = run(*args)
            args = after(out, args) if after else args
        jax.block_until_ready(out)
        return args

    best, args = float("inf"), go(3, args)
    for _ in range(3):
        began = time.perf_counter()
        args = go(n, args)
        best = min(best, (time.perf_counter() - began) / n)
    return best, args


def normal(seed: int, *shape: int, dtype: Any = jnp.bfloat16, scale: float = 1.0) -> jax.Array:
    """Random values, made on the device."""
    make = lambda key: jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype)  # noqa: E731
    return jax.jit(make)(jax.random.key(seed))


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of an update in place of 2 GiB (128 MiB on a CPU): what floors are stated against."""
    x = jnp.zeros(1 << (29 if jax.default_backend() == "gpu" else 25), jnp.float32)
    best, _ = seconds(compiled(lambda x: x + 1, x, donate=(0,)).result(), (x,), lambda out, _: (out,), n=5)
    return 2 * x.size * 4 / best


def begin(*columns: str) -> float:
    """Says what the table that follows was measured on, and heads it. Returns the copy bandwidth."""
    require_gpu()
    bandwidth = copy_bandwidth()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}; copy {bandwidth / 1e12:.2f} TB/s\n")
    row(*columns)
    row(*["---"] * len(columns))
    return bandwidth


def row(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)
