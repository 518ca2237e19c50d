"""`DecodeState`: the target's state plus what a round needs of each request, all on the device."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax.config import ModelConfig, RunConfig
from atlas_jax.decode.counters import Counters, init_counters
from atlas_jax.decode.probes import ProbeState, init_probes
from atlas_jax.decode.request import MAX_STOPS, SamplingParams
from atlas_jax.decode.sampling import SamplerState, init_sampler, set_slot, slot_values
from atlas_jax.shapes import Array, Float, Int
from atlas_jax.state import TargetState, free, init, map_pages

RUNNING, STOP, LENGTH, ERROR = range(4)
FINISH_REASONS = {STOP: "stop", LENGTH: "length", ERROR: "error"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """State of S slots between rounds.

    A running slot with c committed tokens has emitted one more, tokens[c], which the target has not read yet.
    The MTP head has not yet read the last `feed_count` tokens, feed_tokens, of which the last is that one; feed_hidden are the
    target's hiddens of the positions before them. Decoding without the head keeps those of the last round alone.
    """

    target: TargetState
    sampler: SamplerState
    tokens: Int[Array, "S columns"]  # prompt and answer; the last column is a sentinel
    feed_tokens: Int[Array, "S waiting"]
    feed_hidden: Float[Array, "S waiting D"]
    feed_count: Int[Array, " S"]
    remaining: Int[Array, " S"]  # tokens that may still be emitted
    finish: Int[Array, " S"]  # RUNNING … ERROR
    stop_ids: Int[Array, "S stops"]  # padded with -1
    counters: Counters  # of each slot's request so far
    drafter: Any  # the drafter's own explicit state
    probe: ProbeState | None  # None in production


def init_decode(config: ModelConfig, run: RunConfig, spare_pages: int = 0) -> DecodeState:
    """All slots empty and finished, without a drafter's state."""
    S, M = run.slots + 1, run.max_rows
    zeros = lambda *shape: jnp.zeros(shape, jnp.int32)  # noqa: E731
    target = init(config, run, spare_pages)
    return DecodeState(
        target=target,
        sampler=init_sampler(S, config.vocab_size),
        tokens=zeros(S, run.max_length + 1),
        feed_tokens=zeros(S, run.feed_rows),
        feed_hidden=jnp.zeros((S, run.feed_rows, config.hidden_size), jnp.dtype(run.dtype)),
        feed_count=zeros(S),
        remaining=zeros(S),
        finish=jnp.full(S, STOP, jnp.int32),
        stop_ids=jnp.full((S, MAX_STOPS * 2), -1, jnp.int32),
        counters=init_counters(S, M),
        drafter=(),
        probe=init_probes(config, run, target),
    )


def open_slot(state: DecodeState, slot: Int[Array, ""], values: dict[str, Any]) -> DecodeState:
    """Gives an empty slot to a request; `values` are `request_values`'. The prompt's prefill comes next, then `start_slot`."""
    at = lambda x, y: x.at[slot].set(y)  # noqa: E731
    probe = state.probe and dataclasses.replace(state.probe, counts=at(state.probe.counts, 0))
    target = map_pages(free(state.target, slot), slot, values["pages"])
    return dataclasses.replace(
        state,
        target=dataclasses.replace(target, drafter_start=at(target.drafter_start, values["drafter_start"])),
        sampler=set_slot(state.sampler, slot, **values["sampler"]),
        tokens=at(state.tokens, values["tokens"]),
        remaining=at(state.remaining, values["remaining"]),
        finish=at(state.finish, STOP),
        stop_ids=at(state.stop_ids, values["stop_ids"]),
        counters=at(state.counters, 0),
        probe=probe,
    )


def start_slot(state: DecodeState, slot: Int[Array, ""]) -> DecodeState:
    """Sets a slot running once all but the last token of its prompt are committed: the first round reads that token."""
    last = state.tokens[slot, state.target.base[slot]]
    return dataclasses.replace(
        state,
        feed_tokens=state.feed_tokens.at[slot, 0].set(last),
        feed_hidden=state.feed_hidden.at[slot, 0].set(state.target.hidden[slot]),
        feed_count=state.feed_count.at[slot].set(1),
        finish=state.finish.at[slot].set(RUNNING),
    )


def cut_slot(state: DecodeState, slot: Int[Array, ""], n: Int[Array, ""]) -> DecodeState:
    """Ends a slot after the first `n` >= 1 tokens of the last round, as if the round had stopped there: commit moves back."""
    target = state.target
    waiting = state.feed_count[slot] - target.pending[slot] + n  # the round's rows are the newest of those that wait
    target = dataclasses.replace(
        target,
        pending=target.pending.at[slot].set(n),
        hidden=target.hidden.at[slot].set(state.feed_hidden[slot, waiting - 1]),
    )
    return dataclasses.replace(
        state, target=target, feed_count=state.feed_count.at[slot].set(waiting), finish=state.finish.at[slot].set(STOP)
    )


def request_values(
    config: ModelConfig, run: RunConfig, prompt: np.ndarray, params: SamplingParams, pages: list[int], restored: int = 0
) -> dict[str, Any]:
    """What `open_slot` needs of a validated request and the pages it was given, as arrays of fixed shapes. `restored` of the
    prompt's tokens are not computed."""
    tokens = np.zeros(run.max_length + 1, np.int32)
    tokens[: prompt.size] = prompt
    stops = np.full(MAX_STOPS * 2, -1, np.int32)
    ids = [*dict.fromkeys([*params.stop_token_ids, *(() if params.ignore_eos else config.eos_token_ids)])]
    stops[: len(ids)] = ids
    sampler = slot_values(params, prompt, config.vocab_size)
    row = np.zeros(run.pages_per_slot, np.int32)
    row[: len(pages)] = pages
    # The drafter has no row at position 0. The prompt's last token is not prefilled: its row is the first draft's own.
    start = max(1, dict(full=1, prefill_only=restored, blind=prompt.size - 1)[run.drafter_context])
    return dict(
        sampler=sampler,
        tokens=tokens,
        remaining=np.int32(params.max_tokens),
        stop_ids=stops,
        pages=row,
        drafter_start=np.int32(start),
    )
