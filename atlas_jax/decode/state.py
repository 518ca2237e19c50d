"""`DecodeState`: the target's state plus what a round needs of each request, all on the device."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax.config import ModelConfig, RunConfig
from atlas_jax.decode.counters import Counters, counters_shape
from atlas_jax.decode.probes import ProbeState, init_probes
from atlas_jax.decode.request import MAX_STOPS, SamplingParams
from atlas_jax.decode.sampling import NEUTRAL, sampler_fields, slot_values
from atlas_jax.shapes import Array, Float, Int
from atlas_jax.state import TargetState, free, init, map_pages
from atlas_jax.state.record import Field, Record, record

RUNNING, STOP, LENGTH, ERROR = range(4)
FINISH_REASONS = {STOP: "stop", LENGTH: "length", ERROR: "error"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """State of S slots between rounds.

    A running slot with c committed tokens has emitted one more, tokens[c], which the target has not read yet.
    The MTP head has not yet read the last `feed_count` tokens, of which the last is that one; feed_hidden are the target's
    hiddens of the positions before them. Decoding without the head keeps those of the last round alone.
    """

    target: TargetState
    requests: Record  # the properties below, and `sampling.sampler_fields`
    feed_hidden: Float[Array, "S waiting D"]
    drafter: Any  # the drafter's own explicit state
    probe: ProbeState | None  # None in production

    @property
    def tokens(self) -> Int[Array, "S columns"]:
        """Prompt and answer; the last column is a sentinel."""
        return self.requests["tokens"]

    @property
    def feed_count(self) -> Int[Array, " S"]:
        return self.requests["feed_count"]

    @property
    def remaining(self) -> Int[Array, " S"]:
        """Tokens that may still be emitted."""
        return self.requests["remaining"]

    @property
    def most_rows(self) -> Int[Array, " S"]:
        """Rows of a verify at most, whatever the dispatch has."""
        return self.requests["most_rows"]

    @property
    def finish(self) -> Int[Array, " S"]:
        """RUNNING … ERROR."""
        return self.requests["finish"]

    @property
    def stop_ids(self) -> Int[Array, "S stops"]:
        """Padded with -1."""
        return self.requests["stop_ids"]

    @property
    def counters(self) -> Counters:
        """Of each slot's request so far."""
        return self.requests["counters"]

    def put(self, slots: Int[Array, "*B"], **values: Any) -> DecodeState:
        """Sets properties of some slots, or of one (see `Record.put`)."""
        return dataclasses.replace(self, requests=self.requests.put(slots, **values))


def init_decode(config: ModelConfig, run: RunConfig, spare_pages: int = 0) -> DecodeState:
    """All slots empty and finished, without a drafter's state."""
    S, M = run.slots + 1, run.max_rows
    # A round writes the first four together.
    fields = (Field("feed_count"), Field("remaining"), Field("finish"), Field("counters", counters_shape(M)))
    fields = (*fields, Field("most_rows"), Field("stop_ids", (MAX_STOPS * 2,)), Field("tokens", (run.max_length + 1,)))
    fields = (*sampler_fields(config.vocab_size), *fields)
    target = init(config, run, spare_pages)
    return DecodeState(
        target=target,
        requests=record(S, fields, finish=STOP, stop_ids=-1, **NEUTRAL),
        feed_hidden=jnp.zeros((S, run.feed_rows, config.hidden_size), jnp.dtype(run.dtype)),
        drafter=(),
        probe=init_probes(config, run, target),
    )


def open_slot(state: DecodeState, slot: Int[Array, ""], values: dict[str, Any]) -> DecodeState:
    """Gives an empty slot to a request; `values` are `request_values`'. The prompt's prefill comes next, then `start_slot`."""
    probe = state.probe and dataclasses.replace(state.probe, counts=state.probe.counts.at[slot].set(0))
    target = map_pages(free(state.target, slot), slot, values["pages"])
    target = target.put(slot, drafter_start=values["drafter_start"])
    given = {name: values[name] for name in ("tokens", "remaining", "most_rows", "stop_ids")}
    state = state.put(slot, finish=STOP, counters=0, **given, **values["sampler"])
    return dataclasses.replace(state, target=target, probe=probe)


def start_slot(state: DecodeState, slot: Int[Array, ""]) -> DecodeState:
    """Sets a slot running once all but the last token of its prompt are committed: the first round reads that token."""
    feed_hidden = state.feed_hidden.at[slot, 0].set(state.target.hidden[slot])
    return dataclasses.replace(state, feed_hidden=feed_hidden).put(slot, feed_count=1, finish=RUNNING)


def cut_slot(state: DecodeState, slot: Int[Array, ""], n: Int[Array, ""]) -> DecodeState:
    """Ends a slot after the first `n` >= 1 tokens of the last round, as if the round had stopped there: commit moves back."""
    target = state.target
    waiting = state.feed_count[slot] - target.pending[slot] + n  # the round's rows are the newest of those that wait
    hidden = target.hidden.at[slot].set(state.feed_hidden[slot, waiting - 1])
    target = dataclasses.replace(target, hidden=hidden).put(slot, pending=n)
    return dataclasses.replace(state, target=target).put(slot, feed_count=waiting, finish=STOP)


def request_values(
    config: ModelConfig,
    run: RunConfig,
    prompt: np.ndarray,
    params: SamplingParams,
    pages: list[int],
    restored: int = 0,
    drafts: int | None = None,
) -> dict[str, Any]:
    """What `open_slot` needs of a validated request and the pages it was given, as arrays of fixed shapes. `restored` of the
    prompt's tokens are not computed; `drafts` are the most of a round (None: as many as there are rows for)."""
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
        most_rows=np.int32(run.max_rows if drafts is None else drafts + 1),
        stop_ids=stops,
        pages=row,
        drafter_start=np.int32(start),
    )
