"""Flax modules of the target and its drafter, and the blocks they are built of."""

from atlas_jax.models.hybrid import HybridModel, call

__all__ = ["HybridModel", "call"]
