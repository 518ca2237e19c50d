"""The decoding state of the target and the pure functions on it.

Committed length = base + pending: `h` and `conv` stand at `base`, `pending` rows of the journal are committed but not folded.
"""

from atlas_jax.state.snapshots import Snapshot, fork, restore, settle, snapshot
from atlas_jax.state.target import TargetState, commit, commit_guard, free, init, map_pages, verify_guard

__all__ = [
    "Snapshot",
    "TargetState",
    "commit",
    "commit_guard",
    "fork",
    "free",
    "init",
    "map_pages",
    "restore",
    "settle",
    "snapshot",
    "verify_guard",
]
