"""`TargetState`: every array that decoding carries, its creation, its guards and its commit."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax.config import ModelConfig, RunConfig
from atlas_jax.errors import StateError
from atlas_jax.shapes import Array, Bool, Float, Int
from atlas_jax.state.record import Field, Record, record
from pallas_kernels.gated_delta import Recurrent
from pallas_kernels.paged_attention import Pages, page_shapes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TargetState:
    """State of S slots (slot 0 and page 0 are sentinels: padding may write them, nobody reads them).

    A slot's committed tokens are `base + pending`. Verify leaves its rows in the journal and in KV rows past the committed
    length; until `commit` says how many of them count, they do not exist.

    The journal and the convolution's inputs are rings: what belongs to position p lies at p mod N. They hold two verifies'
    rows (and what the convolution reaches back to), so that new rows never meet the committed ones that are still to be read:
    a kernel may read the old while other programs of it write the new.
    """

    pages: Pages  # KV of the full-attention layers; the drafter's layer is the last
    h: Float[Array, "Lg S Hv Dv Dk"]  # float32 recurrent state at `base`
    conv: Float[Array, "Lg S inputs C"]  # raw convolution inputs
    journal_k: Float[Array, "Lg S N Hk Dk"]  # the last verify's rows: S <- decay S + k u^T
    journal_u: Float[Array, "Lg S N Hv Dv"]
    journal_decay: Float[Array, "Lg S N Hv"]
    hidden: Float[Array, "S D"]  # the target's hidden at the last committed position, as the drafter reads it
    slots: Record  # the properties below

    @property
    def page_table(self) -> Int[Array, "S pages"]:
        return self.slots["page_table"]

    @property
    def rows(self) -> Int[Array, " S"]:
        """Rows that the last verify left in the journal."""
        return self.slots["rows"]

    @property
    def base(self) -> Int[Array, " S"]:
        return self.slots["base"]

    @property
    def pending(self) -> Int[Array, " S"]:
        return self.slots["pending"]

    @property
    def drafter_start(self) -> Int[Array, " S"]:
        """The first position whose row the drafter attends to; it has none at 0."""
        return self.slots["drafter_start"]

    @property
    def ok(self) -> Bool[Array, " S"]:
        """False once a slot's numbers cannot be trusted; its request ends with an error."""
        return self.slots["ok"]

    def put(self, slots: Int[Array, "*B"], **values: Any) -> TargetState:
        """Sets properties of some slots, or of one (see `Record.put`)."""
        return dataclasses.replace(self, slots=self.slots.put(slots, **values))

    @property
    def recurrent(self) -> Recurrent:
        """What the linear-attention layers carry."""
        return Recurrent(self.h, self.conv, self.journal_k, self.journal_u, self.journal_decay)

    @property
    def length(self) -> Int[Array, " S"]:
        """Committed tokens a slot."""
        return self.base + self.pending

    @property
    def max_rows(self) -> int:
        """Rows of the widest verify."""
        return self.journal_u.shape[2] // 2

    @property
    def capacity(self) -> int:
        """Tokens that a slot's pages can hold."""
        return self.page_table.shape[1] * self.pages.page_size


def leaves(recurrent: Recurrent) -> dict[str, Array]:
    """`TargetState.recurrent` as the state's leaves."""
    names = ("h", "conv", "journal_k", "journal_u", "journal_decay")
    return dict(zip(names, recurrent, strict=True))


def init(config: ModelConfig, run: RunConfig, spare_pages: int = 0) -> TargetState:
    """An empty state of `run.slots` slots and the sentinel, and a pool of pages: as many as the slots can fill, and `spare_pages`.

    The page table gives each slot pages of its own, if there are so many. Whoever shares pages between slots, or keeps them over
    sequences, writes the slot's row of the table (`map_pages`) before each sequence.
    """
    S, ring = run.slots + 1, 2 * run.max_rows
    Lg, dtype = config.num_linear_layers, jnp.dtype(run.dtype)
    Hk, Dk = config.linear_num_key_heads, config.linear_key_head_dim
    Hv, Dv = config.linear_num_value_heads, config.linear_value_head_dim
    per_slot = run.pages_per_slot
    table = np.zeros((S, per_slot), np.int32)
    if run.live_pages == run.slots * per_slot:
        table[1:] = 1 + np.arange(run.slots * per_slot, dtype=np.int32).reshape(run.slots, per_slot)
    layers = config.num_full_layers + config.mtp_num_hidden_layers
    pages = (layers, 1 + run.live_pages + spare_pages, config.num_key_value_heads)
    fields = (*map(Field, ("rows", "base", "pending", "drafter_start")), Field("ok", (), "bool"))
    fields = (*fields, Field("page_table", (per_slot,)))
    zeros = jnp.zeros
    return TargetState(
        pages=Pages(
            *(zeros(x, run.page_dtype) for x in page_shapes(pages, run.page_size, config.head_dim, run.page_dtype))
        ),
        h=zeros((Lg, S, Hv, Dv, Dk), jnp.float32),
        conv=zeros((Lg, S, ring + config.linear_conv_kernel_dim - 1, config.conv_channels), dtype),
        journal_k=zeros((Lg, S, ring, Hk, Dk), jnp.float32),
        journal_u=zeros((Lg, S, ring, Hv, Dv), jnp.float32),
        journal_decay=zeros((Lg, S, ring, Hv), jnp.float32),
        hidden=zeros((S, config.hidden_size), dtype),
        slots=record(S, fields, page_table=table, drafter_start=1, ok=True),
    )


def free(state: TargetState, slot: Int[Array, ""]) -> TargetState:
    """Empties a slot for a new sequence. Old KV rows, journal rows and convolution inputs stay where they are: nothing before
    position 0 or past the length is ever read."""
    empty = dataclasses.replace(state, h=state.h.at[:, slot].set(0.0), hidden=state.hidden.at[slot].set(0))
    return empty.put(slot, rows=0, base=0, pending=0, drafter_start=1, ok=True)


def map_pages(state: TargetState, slot: Int[Array, ""], pages: Int[Array, " pages"]) -> TargetState:
    """Gives a slot its row of the page table: the pages of its positions in order, 0 (the sentinel) where it needs none."""
    return state.put(slot, page_table=pages)


def commit(
    state: TargetState, slots: Int[Array, " B"], n: Int[Array, " B"], hidden: Float[Array, "B K D"]
) -> TargetState:
    """Accepts the first `n` rows of the last verify, 0 <= n <= rows; 0 is a full rollback. Moves integers only.

    Once a verify: a second commit would not bring back the hidden that the first replaced. `hidden`
    are that verify's hiddens. An `n` out of range commits nothing and clears the slot's `ok`.
    """
    valid = (n >= 0) & (n <= state.rows[slots])
    n = jnp.where(valid, n, 0)
    last = jnp.take_along_axis(hidden, jnp.maximum(n - 1, 0)[:, None, None], axis=1)[:, 0]
    hidden = state.hidden.at[slots].set(jnp.where((n > 0)[:, None], last, state.hidden[slots]))
    state = dataclasses.replace(state, hidden=hidden)
    return state.put(slots, pending=n, ok=state.ok[slots] & valid)


def check_slots(slots: np.ndarray, total: int) -> None:
    """Raises StateError unless `slots` are distinct live slots 1 … total-1."""
    if slots.ndim != 1 or slots.size == 0:
        raise StateError(f"slots must be a non-empty vector, got shape {slots.shape}")
    if slots.min() < 1 or slots.max() >= total:
        raise StateError(f"slots must lie in 1 … {total - 1} (0 is the sentinel), got {slots.tolist()}")
    if len(set(slots.tolist())) != slots.size:
        raise StateError(f"a slot may appear once a call, got {slots.tolist()}")


def verify_guard(state: TargetState, slots, tokens, n_rows, vocab_size: int) -> None:
    """Checks a verify's arguments on the host, before anything is launched.

    Raises:
        StateError: naming the number that is out of bounds.
    """
    slots, tokens, n_rows = np.asarray(slots), np.asarray(tokens), np.asarray(n_rows)
    check_slots(slots, state.slots.words.shape[0])
    widest = state.max_rows
    if tokens.ndim != 2 or tokens.shape[:1] != slots.shape or n_rows.shape != slots.shape:
        raise StateError(f"{slots.size} slots, but tokens {tokens.shape} and row counts {n_rows.shape}")
    if tokens.shape[1] > widest:
        raise StateError(
            f"a verify of {tokens.shape[1]} rows; this state was made for at most {widest} (max_drafts {widest - 1})"
        )
    if (n_rows < 0).any() or (n_rows > tokens.shape[1]).any():
        raise StateError(f"row counts must lie in 0 … {tokens.shape[1]}, got {n_rows.tolist()}")
    if tokens.size and (tokens.min() < 0 or tokens.max() >= vocab_size):
        raise StateError(f"token ids must lie in 0 … {vocab_size - 1}, got {tokens.min()} … {tokens.max()}")
    length = np.asarray(state.length)[slots]
    if (length + n_rows > state.capacity).any():
        raise StateError(
            f"a slot holds at most {state.capacity} tokens; {length.tolist()} are there and {n_rows.tolist()} more were asked for"
        )


def commit_guard(state: TargetState, slots, n) -> None:
    """Checks a commit's accept counts on the host.

    Raises:
        StateError: naming the number that is out of bounds.
    """
    slots, n = np.asarray(slots), np.asarray(n)
    check_slots(slots, state.slots.words.shape[0])
    if n.shape != slots.shape:
        raise StateError(f"{slots.size} slots, but {n.shape} accept counts")
    rows = np.asarray(state.rows)[slots]
    if (n < 0).any() or (n > rows).any():
        raise StateError(f"accept counts must lie in 0 … rows of the last verify {rows.tolist()}, got {n.tolist()}")
