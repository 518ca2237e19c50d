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
from atlas_jax.models import linear_layers
from atlas_jax.models.attention import Attention, causal_attention
from atlas_jax.models.draft_head import draft_logits
from atlas_jax.models.drafter import DrafterNorms, MtpDrafter
from atlas_jax.models.feed_forward import feed_forward
from atlas_jax.models.layers import parameter, rms_norm, scaled_normal
from atlas_jax.shapes import Array, Float, Int
from atlas_jax.state.target import TargetState
from atlas_jax.tensor_parallel.shares import gathered, local_config, looked_up
from pallas_kernels import gated_delta, paged_attention
from pallas_kernels.linear import linear
from pallas_kernels.ragged import BLOCK, rows_of
from pallas_kernels.rows import at_most, bucket, by_row_group, live_rows, pad_rows

Rows = Callable[..., Any]
FED = "fed"  # the collection in which `prefill` and `feed` leave the hiddens that the drafter's layer reads, where it is mutable


class Hidden(NamedTuple):
    """The last layer's output before and after the final norm."""

    pre_norm: Float[Array, "*rows D"]
    post_norm: Float[Array, "*rows D"]


class HybridModel(nn.Module):
    """A Gated DeltaNet + attention decoder with its multi-token-prediction drafter (`mtp`, where the config has one).

    All methods are pure; `apply(params, …, method=…)` is what gets jitted. `row_group` and `layout` are those of `RunConfig`. Where
    `devices` share the model, methods run on each of them with its share of parameters and state (`tensor_parallel`).
    """

    config: ModelConfig
    dtype: jnp.dtype = jnp.dtype("float32")
    layout: str = "layers"
    row_group: int = 8
    devices: int = 1

    def setup(self) -> None:
        c, tokens = self.config, self.config.vocab_size // self.devices
        shared: dict[str, Any] = dict(
            config=local_config(c, self.devices), dtype=self.dtype, layout=self.layout, devices=self.devices
        )
        self.embedding = self.param("embedding", scaled_normal(c.hidden_size), (tokens, c.hidden_size), self.dtype)
        if not c.tie_word_embeddings:
            size = c.hidden_size, tokens
            self.head = parameter(self, "head", lambda key: scaled_normal(c.hidden_size)(key, size, self.dtype))
        # Of each layer before its mixer and before its feed-forward block, and of the last layer's output; then the drafter's.
        norms = 2 * c.num_layers + 1 + (len(DrafterNorms._fields) if c.has_mtp else 0)
        self.norms = self.param("norms", nn.initializers.zeros, (norms, c.hidden_size), jnp.float32)
        self.linear_attention = gdn.GatedDeltaNet(layers=c.num_linear_layers, **shared)
        self.attention = Attention(layers=c.num_full_layers, **shared)
        self.feed_forward = feed_forward(c)(layers=c.num_layers, **shared)
        if c.has_mtp:
            self.mtp = MtpDrafter(**shared)

    # ---- pieces ----------------------------------------------------------------------------------------------------

    def embed(self, tokens: Int[Array, "*rows"]) -> Float[Array, "*rows D"]:
        return looked_up(self.embedding, tokens, self.devices)

    def logits(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Float32 logits of post-norm hiddens."""
        weight = self.embedding if self.config.tie_word_embeddings else self.head
        return gathered(linear(hidden, weight, transposed=self.config.tie_word_embeddings), self.devices)

    def draft_logits(self, hidden: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """`logits` of few rows that need not be exact: of the draft head, where there is one."""
        rows = pad_rows(hidden, bucket(hidden.shape[0], self.row_group))
        head = self.get_variable("params", "draft_head")
        with at_most(hidden.shape[0]):
            logits = (
                self.logits(rows) if head is None else draft_logits(head, rows, self.config.vocab_size, self.devices)
            )
        return logits[: hidden.shape[0]]

    def drafter_hidden(self, hidden: Hidden) -> Float[Array, "*rows D"]:
        """The hidden that the drafter reads (`config.mtp_hidden`)."""
        return hidden.post_norm if self.config.mtp_hidden == "post_norm" else hidden.pre_norm

    def final(self, x: Float[Array, "*rows D"]) -> Hidden:
        return Hidden(x, rms_norm(x, self.norms[2 * self.config.num_layers], self.config.rms_norm_eps))

    @property
    def drafter_norms(self) -> DrafterNorms:
        first = 2 * self.config.num_layers + 1
        return DrafterNorms(*(self.norms[first + i] for i in range(len(DrafterNorms._fields))))

    @property
    def _prefill_with(self) -> str | None:
        """The kernel takes bfloat16 keys; a float32 model, which is there for comparison, keeps the plain form."""
        return None if self.dtype == jnp.bfloat16 else "reference"

    def _rows(self, count: Array, live: int, f: Callable[..., Any], *xs: Array) -> Any:
        return by_row_group(f, self.row_group, count, *xs, live=live)

    def _after_mixer(self, x: Array, mixed: Array, layer: int, few_rows: bool) -> Array:
        x = x + mixed
        return x + self.feed_forward(
            rms_norm(x, self.norms[2 * layer + 1], self.config.rms_norm_eps), layer, few_rows=few_rows
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
        as_rows: bool = False,
    ):
        """Runs all layers over rows; the mixers get a layer's projections, in parts or `as_rows`, and return (mixed, carry)."""
        eps = self.config.rms_norm_eps
        seen: dict[str, int] = {LINEAR: 0, FULL: 0}
        for layer, kind in enumerate(self.config.layer_types):
            i = seen[kind]
            block: Any = self.linear_attention if kind == LINEAR else self.attention
            args, mixer = ((x,), linear_mixer) if kind == LINEAR else ((x, positions), full_mixer)

            project = block.project_rows if kind == LINEAR and as_rows else block.project

            def enter(x: Array, *rest: Array, project: Any = project, i: int = i, layer: int = layer) -> Any:
                return project(rms_norm(x, self.norms[2 * layer], eps), *rest, i)

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
            q, k, v = self.linear_attention.convolve(gated_delta.sliding(padded, T, width), i)
            return flat(gated_delta.whole(q, k, v, split(p.log_decay), split(p.beta))), carry

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
        rows that the last commit accepted are folded into `h`, which then stands at the committed length.

        A row count below 0, above K or beyond the slot's capacity runs no row and clears the slot's `ok`.

        Returns: float32 logits, the hiddens that the drafter reads, and the state with the new rows in its journal.
        """
        B, K = tokens.shape
        start = state.length[slots]
        valid = (n_rows >= 0) & (n_rows <= K) & (start + n_rows <= state.capacity)
        n_rows = jnp.where(valid, n_rows, 0)
        position = jnp.where(jnp.arange(K) < n_rows[:, None], start[:, None] + jnp.arange(K), 0)
        rows = functools.partial(self._rows, live_rows(n_rows, K), B * K)
        table = state.page_table[slots]
        flat = lambda x: pad_rows(x.reshape(B * K), bucket(B * K, self.row_group))  # noqa: E731

        fused = jax.default_backend() == "gpu"
        mixing = (linear_layers.fused if fused else linear_layers.in_parts)(
            self.linear_attention, state, slots, start, n_rows, K, rows
        )

        def full_mixer(p, carry: tuple[paged_attention.Pages, Any], i: int):
            pages, recurrent = carry
            pages = paged_attention.write(pages, i, p.k, p.v, table, start, n_rows, K)
            # Row by row on a CPU: a sequence rarely has as many rows as a group, and the others would be computed for nothing.
            out = paged_attention.attend(p.q, pages, i, table, start, n_rows, K, row_group=1)
            return out, (pages, recurrent)

        def linear_mixer(p, carry: tuple[paged_attention.Pages, Any], i: int):
            out, recurrent = mixing.layer(p, carry[1], i)
            return out, (carry[0], recurrent)

        carry = state.pages, mixing.begin
        x, (pages, recurrent) = self._layers(
            self.embed(flat(tokens)), flat(position), carry, linear_mixer, full_mixer, rows, True, fused
        )

        def finish(x: Array):
            hidden = self.final(x)
            return self.logits(hidden.post_norm), self.drafter_hidden(hidden)

        logits, hidden = (y[: B * K].reshape(B, K, -1) for y in rows(finish, x))
        state = dataclasses.replace(
            state,
            pages=pages,
            slots=state.slots.put(slots, base=start, pending=0, rows=n_rows, ok=state.ok[slots] & valid),
            **mixing.end(recurrent),
        )
        return logits, hidden, state

    def prefill(
        self,
        state: TargetState,
        slots: Int[Array, " S"],
        tokens: Int[Array, " T"],
        begin: Int[Array, " S"],
        n: Int[Array, " S"],
        earlier: Float[Array, "S shift D"] | None = None,
        *,
        feed_drafter: bool = True,
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"], TargetState]:
        """Commits chunks of S settled sequences, in matrix form: `tokens` is a ragged batch (`pallas_kernels.ragged`), in which the
        next n[s] tokens of slot slots[s] lie from row 64 begin[s] on; the rest is padding. Bits of a sequence depend on its own
        tokens and on T, neither on its neighbours nor on its place. Sequences without tokens change nothing; they may share
        the sentinel slot.

        The drafter's layer gets the keys and values of the same rows: row p is (token p, hidden p - 1), the first of them
        from the boundary hidden. With `earlier`, hiddens from before the boundary, row p gets hidden p - 1 - shift instead. Without
        `feed_drafter` it gets none of them.

        A slot that is not settled, or rows that are not in the batch or beyond the slot's capacity, commit nothing and clear the
        slot's `ok`.

        Returns: post-norm hiddens, the hiddens that the drafter reads, the state.
        """
        c = self.config
        T = tokens.shape[0]
        start = state.base[slots]
        inside = (begin >= 0) & (begin <= T // BLOCK) & (n >= 0) & (n <= T) & (begin * BLOCK + n <= T)
        valid = inside & (start + n <= state.capacity) & (state.pending[slots] == 0)
        n = jnp.where(valid, n, 0)
        state = state.put(slots, ok=state.ok[slots] & valid)
        rows = rows_of(begin, n, T)
        positions = jnp.where(rows.live, start[rows.owner] + rows.number, 0)
        table = state.page_table[slots]
        width = c.linear_conv_kernel_dim

        def linear_mixer(p: gdn.Projected, s: TargetState, i: int):
            past = gated_delta.window(s.conv[i : i + 1], slots, start, width - 1)[0]
            q, k, v = self.linear_attention.convolve(gated_delta.windows(p.mixed, past, rows, begin), i)
            args = (q, k, v, p.log_decay, p.beta, begin, n)
            out, h = gated_delta.prefill(s.h, i, slots, *args, implementation=self._prefill_with)
            at = (start + n)[:, None] + jnp.arange(1 - width, 0)
            conv = s.conv.at[i, slots[:, None], at % s.conv.shape[2]].set(gated_delta.last(p.mixed, past, begin, n))
            return out, dataclasses.replace(s, h=h, conv=conv)

        def full_mixer(p, s: TargetState, i: int):
            pages = paged_attention.write_ragged(s.pages, i, p.k, p.v, table, start, begin, n)
            out = paged_attention.attend_ragged(p.q, pages, i, table, start, begin, n)
            return out, dataclasses.replace(s, pages=pages)

        x, state = self._layers(self.embed(tokens), positions, state, linear_mixer, full_mixer, at_once, False)
        hidden = self.final(x)
        fed = self.drafter_hidden(hidden)
        if c.has_mtp and feed_drafter:
            before = state.hidden[slots][:, None]
            before = before if earlier is None else jnp.concatenate([earlier, before], axis=1)
            reach = before.shape[1]
            old = before[rows.owner, jnp.clip(rows.number, 0, reach - 1)]
            previous = jnp.where((rows.number < reach)[:, None], old, jnp.roll(fed, reach, axis=0))
            self.sow(FED, "hidden", previous)
            k, v = self.mtp.keys_values(self.drafter_norms, self.embed(tokens), previous, positions)
            pages = paged_attention.write_ragged(state.pages, c.num_full_layers, k, v, table, start, begin, n)
            state = dataclasses.replace(state, pages=pages)
        boundary = fed[jnp.clip(begin * BLOCK + n - 1, 0, T - 1)]
        boundary = jnp.where((n > 0)[:, None], boundary, state.hidden[slots])
        state = dataclasses.replace(state, hidden=state.hidden.at[slots].set(boundary)).put(slots, base=start + n)
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
        rows = functools.partial(self._rows, live_rows(n_rows, K), B * K)
        R = bucket(B * K, self.row_group)
        flat = lambda x: pad_rows(x.reshape(B * K, *x.shape[2:]), R)  # noqa: E731
        positions = jnp.where(jnp.arange(K) < n_rows[:, None], start[:, None] + jnp.arange(K), 0)
        enter = lambda t, h, at: self.mtp.enter(self.drafter_norms, self.embed(t), h, at)  # noqa: E731
        entered = rows(enter, flat(tokens), flat(hidden), flat(positions))
        table, layer = state.page_table[slots], self.config.num_full_layers
        pages = paged_attention.write(state.pages, layer, entered[1].k, entered[1].v, table, start, n_rows, K)
        state = dataclasses.replace(state, pages=pages)
        last = jnp.maximum(n_rows - 1, 0)
        x, p = jax.tree.map(lambda y: y[jnp.arange(B) * K + last], entered)
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
        padded = (pad_rows(x, bucket(x.shape[0], self.row_group)) for x in (tokens, hidden, position))
        tokens, hidden, at = padded
        with at_most(position.shape[0]):
            x, p = self.mtp.enter(self.drafter_norms, self.embed(tokens), hidden, at)
        pages = paged_attention.write(state.pages, layer, p.k, p.v, table, position, n_rows, 1)
        hidden = self._mtp_rows(x, p, pages, table, position, n_rows, state.drafter_start[slots])
        return hidden, dataclasses.replace(state, pages=pages)

    def _mtp_rows(
        self, x: Array, p: Any, pages: paged_attention.Pages, table: Array, position: Array, n_rows: Array, first: Array
    ) -> Float[Array, "B D"]:
        """The drafter's normed hiddens of one entered row a sequence, whose keys and values are written."""
        B, layer = position.shape[0], self.config.num_full_layers
        x, p = jax.tree.map(lambda y: pad_rows(y, bucket(B, self.row_group)), (x, p))
        out = paged_attention.attend(p.q, pages, layer, table, position, n_rows, 1, first=first, row_group=1)
        with at_most(B):
            return self.mtp.leave(self.drafter_norms, x, out, p.gate, few_rows=True)[:B]


def call(model: HybridModel, params: Any, *args: Any, method: str, **options: Any) -> Any:
    """`model.method(*args)` with `params`: a pure function, whatever stands around it."""
    return model.apply(params, *args, method=method, **options)


def at_once(f: Callable[..., Any], *xs: Array) -> Any:
    """Rows in one product, however many: prefill and training."""
    return f(*xs)
