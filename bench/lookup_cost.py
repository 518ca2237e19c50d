"""What one prompt lookup takes on this machine's device, by the columns that a sequence has and by the batch.

    python bench/lookup_cost.py [--columns N …] [--batch B …] [--drafts D]

The bar is 2 % of a 27B step, about 0.26 ms on an H200. Lookups are run one after another inside one compiled call, each
depending on the one before, so that no launch from Python is in the figure.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax.decode.lookup import continuation, find

REPEATS = 64


@functools.partial(jax.jit, static_argnames="drafts")
def lookups(tokens: jax.Array, length: jax.Array, count: jax.Array, drafts: int) -> jax.Array:
    """`count` lookups; each one's draft changes the newest token that the next one looks for."""

    def body(_: jax.Array, tokens: jax.Array) -> jax.Array:
        draft = continuation(tokens, length, find(tokens, length).place, drafts)
        return tokens.at[jnp.arange(tokens.shape[0]), length].set(draft[:, -1])

    return jax.lax.fori_loop(0, count, body, tokens)


def lookup_ms(columns: int, batch: int, drafts: int) -> float:
    rng = np.random.default_rng(0)
    text = np.tile(rng.integers(0, 5000, (batch, 997)), (1, -(-columns // 997)))[:, :columns]
    tokens, length = jnp.asarray(text, jnp.int32), jnp.full(batch, columns - 2, jnp.int32)
    lookups(tokens, length, jnp.int32(1), drafts).block_until_ready()
    times = []
    for _ in range(9):
        spent = []
        for count in (0, REPEATS):  # the call itself, and the call with lookups in it
            began = time.perf_counter()
            lookups(tokens, length, jnp.int32(count), drafts).block_until_ready()
            spent.append(time.perf_counter() - began)
        times.append((spent[1] - spent[0]) / REPEATS)
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of a prompt lookup on this machine's device.")
    parser.add_argument("--columns", type=int, nargs="*", default=[4096, 32768, 131072])
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--drafts", type=int, default=16)
    args = parser.parse_args()
    print(f"{jax.devices()[0].device_kind} ({jax.default_backend()}), jax {jax.__version__}, drafts of {args.drafts}")
    print("columns  sequences  ms a lookup")
    for batch in args.batch:
        for columns in args.columns:
            print(f"{columns:7d}  {batch:9d}  {lookup_ms(columns, batch, args.drafts):11.4f}", flush=True)


if __name__ == "__main__":
    main()
