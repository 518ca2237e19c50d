"""A compiled inference runtime in JAX for hybrid (Gated DeltaNet + attention) language models, with speculative decoding whose
output is exactly that of plain decoding.

    runtime = atlas_jax.load("tiny-agent")
    print(runtime.generate("Hello", max_tokens=32).text)

Importing this module does not import JAX; using any of its names does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atlas_jax.cache.stats import CacheStats, Reuse
    from atlas_jax.completion import Completion, Delta, Timings
    from atlas_jax.config import ModelConfig, Probes, RunConfig
    from atlas_jax.decode.drafters import DraftContext, Drafter, Proposal
    from atlas_jax.decode.request import SamplingParams
    from atlas_jax.metrics import Acceptance
    from atlas_jax.runtime import Runtime, load
    from atlas_jax.session import Session

_HOMES = {
    "Acceptance": "metrics",
    "CacheStats": "cache.stats",
    "Completion": "completion",
    "Delta": "completion",
    "DraftContext": "decode.drafters",
    "Drafter": "decode.drafters",
    "ModelConfig": "config",
    "Probes": "config",
    "Proposal": "decode.drafters",
    "Reuse": "cache.stats",
    "RunConfig": "config",
    "Runtime": "runtime",
    "SamplingParams": "decode.request",
    "Session": "session",
    "Timings": "completion",
    "load": "runtime",
}

__all__ = [
    "Acceptance",
    "CacheStats",
    "Completion",
    "Delta",
    "DraftContext",
    "Drafter",
    "ModelConfig",
    "Probes",
    "Proposal",
    "Reuse",
    "RunConfig",
    "Runtime",
    "SamplingParams",
    "Session",
    "Timings",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'atlas_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"atlas_jax.{_HOMES[name]}"), name)
