"""The target: embedding, hybrid layers, head; and the steps that decoding takes through it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from atlas_jax.config import FULL, LINEAR, ModelConfig
from atlas_jax.models import gated_delta_net as gdn
from atlas_jax.models.attention import Attention, causal_attention
from atlas_jax.models.drafter import MtpDrafter
from atlas_jax.models.feed_forward import feed_forward
from atlas_jax.models.layers import rms_norm, scaled_normal
from atlas_jax.shapes import Array, Float, Int
from atlas_jax.state.slots import put
from atlas_jax.state.snapshots import folded, settle_with, shift_window
from atlas_jax.state.target import TargetState
from pallas_kernels import gated_delta, paged_attention
from pallas_kernels.linear import linear
from pallas_kernels.rows import by_row_group, live_rows

Rows = Callable[..., Any]
FED = "fed"  # the collection in which `prefill` and `feed` leave the hiddens that the drafter's layer reads, where it is mutable


class Hidden(NamedTuple):
    """The last layer's output before and after the final norm."""

    pre_norm: Float[Array, "*rows D"]
    post_norm: Float[Array, "*rows D"]


class HybridModel(nn.Module):
    """A Gated DeltaNet + attention decoder with its multi-token-prediction drafter (`mtp`, where the config has one).

    All methods are pure; `apply(params, …, method=…)` is what gets jitted. `row_group` and `layout` are those of `RunConfig`.
    """

    config: ModelConfig
    dtype: jnp.dtype = jnp.dtype("float32")
    layout: str = "layers"
    row_group: int = 8

    def setup(self) -> None:
        c = self.config
        shared: dict[str, Any] = dict(config=c, dtype=self.dtype, layout=self.layout)
        self.embedding = self.param(
            "embedding", scaled_normal(c.hidden_size), (c.vocab_size, c.hidden_size), self.dtype
        )
        if not c.tie_word_embeddings:
            self.head = self.param("head", scaled_normal(c.hidden_size), (c.hidden_size, c.vocab_size), self.dtype)
        zeros = nn.initializers.zeros
        self.input_norm = self.param("input_norm", zeros, (c.num_layers, c.hidden_size), jnp.float32)
        self.post_norm = self.param("post_norm", zeros, (c.num_layers, c.hidden_size), jnp.float32)
        self.final_norm = self.param("final_norm", zeros, (c.hidden_size,), jnp.float32)
        self.linear_attention = gdn.GatedDeltaNet(layers=c.num_linear_layers, **shared)
        self.attention = Attention(layers=c.num_full_layers, **shared)
        self.feed_forward = feed_forward(c)(layers=c.num_layers, **shared)
        if c.has_mtp:
            self.mtp = MtpDrafter(**shared)

    # ---- pieces ----------------------------------------------------------------------------------------------------

    def embed(self, tokens: Int[Array, "*rows"]) -> Float[Array, "*rows D"]:
        return self.embedding.at[tokens].get(mode="promise_in_bounds")

    def logits(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Float32 logits of post-norm hiddens."""
        weight = self.embedding if self.config.tie_word_embeddings else self.head
        return linear(hidden, weight, transposed=self.config.tie_word_embeddings)

    def drafter_hidden(self, hidden: Hidden) -> Float[Array, "*rows D"]:
        """The hidden that the drafter reads (`config.mtp_hidden`)."""
        return hidden.post_norm if self.config.mtp_hidden == "post_norm" else hidden.pre_norm

    def final(self, x: Float[Array, "*rows D"]) -> Hidden:
        return Hidden(x, rms_norm(x, self.final_norm, self.config.rms_norm_eps))

    def _rows(self, count: Array, f: Callable[..., Any], *xs: Array) -> Any:
        return by_row_group(f, self.row_group, count, *xs)

    def _after_mixer(self, x: Array, mixed: Array, layer: int, few_rows: bool) -> Array:
        x = x + mixed
        return x + self.feed_forward(
            rms_norm(x, self.post_norm[layer], self.config.rms_norm_eps), layer, few_rows=few_rows
        )

    def _layers(
        self,
        x: Float[Array, "R D"],
        positions: Int[Array, " R"],
        carry: Any,
        linear_mixer: Any,
        full_mixer: Any,
        rows: Rows,
        few_rows: bool,
    ):
        """Runs all layers over rows; the mixers get a layer's projections and return (mixed rows, carry)."""
        eps = self.config.rms_norm_eps
        seen: dict[str, int] = {LINEAR: 0, FULL: 0}
        for layer, kind in enumerate(self.config.layer_types):
            i = seen[kind]
            block: Any = self.linear_attention if kind == LINEAR else self.attention
            args, mixer = ((x,), linear_mixer) if kind == LINEAR else ((x, positions), full_mixer)

            def enter(x: Array, *rest: Array, block: Any = block, i: int = i, layer: int = layer) -> Any:
                return block.project(rms_norm(x, self.input_norm[layer], eps), *rest, i)

            def leave(x: Array, out: Array, gate: Array, block: Any = block, i: int = i, layer: int = layer) -> Array:
                return self._after_mixer(x, block.finish(out, gate, i), layer, few_rows)

            projected = rows(enter, *args)
            out, carry = mixer(projected, carry, i)
            x = rows(leave, x, out, projected.gate)
            seen[kind] += 1
        return x, carry

    # ---- whole sequences, for training and comparison --------------------------------------------------------------

    def forward(self, tokens: Int[Array, "B T"]) -> Hidden:
        """All positions of whole sequences, without a cache; differentiable."""
        B, T = tokens.shape
        c = self.config
        split = lambda x: x.reshape(B, T, *x.shape[1:])  # noqa: E731
        flat = lambda x: x.reshape(B * T, *x.shape[2:])  # noqa: E731

        def linear_mixer(p: gdn.Projected, carry: None, i: int):
            width = c.linear_conv_kernel_dim
            padded = jnp.pad(split(p.mixed), ((0, 0), (width - 1, 0), (0, 0)))
            q, k, v = self.linear_attention.convolve(windows(padded, T, width), i)
            state = jnp.zeros(
                (B, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim), jnp.float32
            )
            out, _ = gated_delta.prefill(state, q, k, v, split(p.log_decay), split(p.beta))
            return flat(out), carry

        def full_mixer(p, carry: None, i: int):
            return flat(causal_attention(split(p.q), split(p.k), split(p.v))), carry

        positions = jnp.tile(jnp.arange(T), B)
        x, _ = self._layers(self.embed(tokens.reshape(-1)), positions, None, linear_mixer, full_mixer, at_once, False)
        return Hidden(*(split(y) for y in self.final(x)))

    # ---- decoding --------------------------------------------------------------------------------------------------

    def verify(
        self, state: TargetState, slots: Int[Array, " B"], tokens: Int[Array, "B K"], n_rows: Int[Array, " B"]
    ) -> tuple[Float[Array, "B K V"], Float[Array, "B K D"], TargetState]:
        """Runs up to K rows a sequence past its committed length and commits none of them.

        Row t of sequence b is token [b, t] at position length[b] + t; rows at and past n_rows[b] are padding. First the
        rows that the last commit accepted are folded into `h` and `conv`, which then stand at the committed length.

        A row count below 0, above K or beyond the slot's capacity runs no row and clears the slot's `ok`.

        Returns: float32 logits, the hiddens that the drafter reads, and the state with the new rows in its journal.
        """
        B, K = tokens.shape
        h, conv = folded(state, slots)
        state = settle_with(state, slots, h, conv)
        start = state.base[slots]
        valid = (n_rows >= 0) & (n_rows <= K) & (start + n_rows <= state.capacity)
        n_rows = jnp.where(valid, n_rows, 0)
        position = jnp.where(jnp.arange(K) < n_rows[:, None], start[:, None] + jnp.arange(K), 0)
        rows = functools.partial(self._rows, live_rows(n_rows, K))
        split = lambda x: x.reshape(B, K, *x.shape[1:])  # noqa: E731
        flat = lambda x: x.reshape(B * K, *x.shape[2:])  # noqa: E731
        table = state.page_table[slots]
        width = self.config.linear_conv_kernel_dim
        journal: list[tuple[Array, ...]] = []

        def linear_mixer(p: gdn.Projected, pages: paged_attention.Pages, i: int):
            mixed, decay = split(p.mixed), split(p.decay)
            window = windows(jnp.concatenate([conv[i], mixed], axis=1), K, width)
            q, k, v = (split(x) for x in rows(lambda w: self.linear_attention.convolve(w, i), flat(window)))
            out, u = gated_delta.verify(h[i], q, k, v, decay, split(p.beta), n_rows)
            journal.append((k, u, decay, mixed))
            return flat(out), pages

        def full_mixer(p, pages: paged_attention.Pages, i: int):
            pages = paged_attention.write(pages, i, split(p.k), split(p.v), table, start, n_rows)
            out = paged_attention.attend(split(p.q), pages, i, table, start, n_rows, row_group=self.row_group)
            return flat(out), pages

        x, pages = self._layers(
            self.embed(flat(tokens)), flat(position), state.pages, linear_mixer, full_mixer, rows, True
        )

        def finish(x: Array):
            hidden = self.final(x)
            return self.logits(hidden.post_norm), self.drafter_hidden(hidden)

        logits, hidden = rows(finish, x)
        names = ("journal_k", "journal_u", "journal_decay", "journal_conv")
        written = {
            name: put(getattr(state, name), slots, jnp.stack(x))
            for name, x in zip(names, zip(*journal, strict=True), strict=True)
        }
        ok, rows_left = state.ok.at[slots].set(state.ok[slots] & valid), state.rows.at[slots].set(n_rows)
        state = dataclasses.replace(state, pages=pages, rows=rows_left, ok=ok, **written)
        return split(logits), split(hidden), state

    def prefill(
        self,
        state: TargetState,
        slot: Int[Array, ""],
        tokens: Int[Array, " T"],
        n: Int[Array, ""],
        earlier: Float[Array, "shift D"] | None = None,
        *,
        feed_drafter: bool = True,
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"], TargetState]:
        """Commits the first `n` of a chunk of tokens to a settled slot, in matrix form; the rest of the chunk is padding.

        The drafter's layer gets the keys and values of the same rows: row p is (token p, hidden p - 1), the first of them
        from the boundary hidden. With `earlier`, hiddens from before the boundary, row p gets hidden p - 1 - shift instead. Without
        `feed_drafter` it gets none of them.

        A slot that is not settled, or an `n` below 0, above T or beyond its capacity, commits nothing and clears the slot's `ok`.

        Returns: post-norm hiddens, the hiddens that the drafter reads, the state.
        """
        c = self.config
        T = tokens.shape[0]
        start = state.base[slot]
        valid = (n >= 0) & (n <= T) & (start + n <= state.capacity) & (state.pending[slot] == 0)
        n = jnp.where(valid, n, 0)
        state = dataclasses.replace(state, ok=state.ok.at[slot].set(state.ok[slot] & valid))
        live = jnp.arange(T) < n
        positions = jnp.where(live, start + jnp.arange(T), 0)
        table, count = state.page_table[slot][None], n[None]
        width = c.linear_conv_kernel_dim

        def linear_mixer(p: gdn.Projected, s: TargetState, i: int):
            conv = s.conv[i, slot]
            q, k, v = self.linear_attention.convolve(windows(jnp.concatenate([conv, p.mixed])[None], T, width), i)
            log_decay, beta = (jnp.where(live[:, None], x, 0.0)[None] for x in (p.log_decay, p.beta))
            out, h = gated_delta.prefill(s.h[i, slot][None], q, k, v, log_decay, beta)
            s = dataclasses.replace(
                s, h=s.h.at[i, slot].set(h[0]), conv=s.conv.at[i, slot].set(shift_window(conv, p.mixed, n))
            )
            return out[0], s

        def full_mixer(p, s: TargetState, i: int):
            pages = paged_attention.write(s.pages, i, p.k[None], p.v[None], table, start[None], count)
            out = paged_attention.attend(p.q[None], pages, i, table, start[None], count, row_group=T)
            return out[0], dataclasses.replace(s, pages=pages)

        x, state = self._layers(self.embed(tokens), positions, state, linear_mixer, full_mixer, at_once, False)
        hidden = self.final(x)
        fed = self.drafter_hidden(hidden)
        if c.has_mtp and feed_drafter:
            before = state.hidden[slot][None]
            before = before if earlier is None else jnp.concatenate([earlier, before])
            previous = jnp.concatenate([before, fed])[:T]
            self.sow(FED, "hidden", previous)
            k, v = self.mtp.keys_values(self.embed(tokens), previous, positions)
            pages = paged_attention.write(state.pages, c.num_full_layers, k[None], v[None], table, start[None], count)
            state = dataclasses.replace(state, pages=pages)
        boundary = jnp.where(n > 0, fed[jnp.maximum(n - 1, 0)], state.hidden[slot])
        state = dataclasses.replace(state, base=state.base.at[slot].add(n), hidden=state.hidden.at[slot].set(boundary))
        return hidden.post_norm, fed, state

    def feed(
        self,
        state: TargetState,
        slots: Int[Array, " B"],
        tokens: Int[Array, "B K"],
        hidden: Float[Array, "B K D"],
        start: Int[Array, " B"],
        n_rows: Int[Array, " B"],
    ) -> tuple[Float[Array, "B D"], TargetState]:
        """Gives the drafter's layer the keys and values of committed rows: row t of sequence b is (token [b, t], the target's
        hidden before it) at position start[b] + t. Rows go in row groups: the cache does not depend on how they came.

        Returns: the drafter's normed hidden of each sequence's last row, which `logits` turns into the first draft, and the state.
        """
        B, K = tokens.shape
        self.sow(FED, "hidden", hidden)
        rows = functools.partial(self._rows, live_rows(n_rows, K))
        split = lambda x: x.reshape(B, K, *x.shape[1:])  # noqa: E731
        flat = lambda x: x.reshape(B * K, *x.shape[2:])  # noqa: E731
        positions = jnp.where(jnp.arange(K) < n_rows[:, None], start[:, None] + jnp.arange(K), 0)
        enter = lambda t, h, at: self.mtp.enter(self.embed(t), h, at)  # noqa: E731
        entered = jax.tree.map(split, rows(enter, flat(tokens), flat(hidden), flat(positions)))
        table, layer = state.page_table[slots], self.config.num_full_layers
        pages = paged_attention.write(state.pages, layer, entered[1].k, entered[1].v, table, start, n_rows)
        state = dataclasses.replace(state, pages=pages)
        last = jnp.maximum(n_rows - 1, 0)
        x, p = jax.tree.map(lambda y: y[jnp.arange(B), last], entered)
        first = state.drafter_start[slots]
        return self._mtp_rows(x, p, pages, table, start + last, jnp.minimum(n_rows, 1), first), state

    def draft(
        self,
        state: TargetState,
        slots: Int[Array, " B"],
        tokens: Int[Array, " B"],
        hidden: Float[Array, "B D"],
        position: Int[Array, " B"],
        n_rows: Int[Array, " B"],
    ) -> tuple[Float[Array, "B D"], TargetState]:
        """One speculative drafter row a sequence (none where n_rows is 0): (token, the drafter's hidden before it) at `position`.
        It is rewritten by `feed` before anyone relies on it, so it need not come in row groups.

        Returns: the drafter's normed hiddens, which the next step reads and `logits` turns into drafts, and the state.
        """
        table, layer = state.page_table[slots], self.config.num_full_layers
        x, p = self.mtp.enter(self.embed(tokens), hidden, position)
        pages = paged_attention.write(state.pages, layer, p.k[:, None], p.v[:, None], table, position, n_rows)
        hidden = self._mtp_rows(x, p, pages, table, position, n_rows, state.drafter_start[slots])
        return hidden, dataclasses.replace(state, pages=pages)

    def _mtp_rows(
        self, x: Array, p: Any, pages: paged_attention.Pages, table: Array, position: Array, n_rows: Array, first: Array
    ) -> Float[Array, "B D"]:
        """The drafter's normed hiddens of one entered row a sequence, whose keys and values are written."""
        layer = self.config.num_full_layers
        out = paged_attention.attend(p.q[:, None], pages, layer, table, position, n_rows, first=first, row_group=1)
        return self.mtp.leave(x, out[:, 0], p.gate, few_rows=True)


def call(model: HybridModel, params: Any, *args: Any, method: str, **options: Any) -> Any:
    """`model.method(*args)` with `params`: a pure function, whatever stands around it."""
    return model.apply(params, *args, method=method, **options)


def at_once(f: Callable[..., Any], *xs: Array) -> Any:
    """Rows in one product, however many: prefill and training."""
    return f(*xs)


def windows(x: Float[Array, "B padded C"], count: int, width: int) -> Float[Array, "B T W C"]:
    """Sliding windows of the convolution, oldest input first."""
    return jnp.stack([x[:, w : w + count] for w in range(width)], axis=2)
