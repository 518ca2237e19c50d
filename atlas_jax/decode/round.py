"""One round of speculative decoding, draft -> verify -> accept -> commit, and the loop of rounds that one dispatch runs."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from atlas_jax.decode import probes, sampling
from atlas_jax.decode.counters import count
from atlas_jax.decode.mtp import rows_left
from atlas_jax.decode.protocol import DraftContext, Drafter, Planner, Proposal
from atlas_jax.decode.state import ERROR, LENGTH, RUNNING, STOP, DecodeState
from atlas_jax.errors import RequestError
from atlas_jax.metrics import Source
from atlas_jax.models import HybridModel, call
from atlas_jax.shapes import Array, Bool, Float, Int
from atlas_jax.state import TargetState, commit
from pallas_kernels.rows import by_row_group, live_rows


class Emitted(NamedTuple):
    """What a dispatch emitted, round by round; the first counts[r, b] tokens of a row count."""

    tokens: Int[Array, "rounds B K"]
    counts: Int[Array, "rounds B"]
    n_rows: Int[Array, "rounds B"]  # verified; 0 where a sequence did not run
    source: Int[Array, "rounds B"]  # of the first draft, a member of `Source`
    logprobs: Float[Array, "rounds B K"]  # zero-width where none were asked for
    top_logprobs: Float[Array, "rounds B K n"]
    top_ids: Int[Array, "rounds B K n"]


class Rows(NamedTuple):
    """What a verify of B sequences reads."""

    tokens: Int[Array, "B K"]  # the last emitted token and drafts
    n_rows: Int[Array, " B"]
    source: Int[Array, "B drafts"]  # of the drafts, members of `Source`


class Accepted(NamedTuple):
    """The accept rule's verdict on B sequences."""

    emitted: Int[Array, " B"]  # picks that become output, which is also how many rows are committed
    accepted: Int[Array, " B"]  # of those, how many were drafts
    matches: Bool[Array, "B drafts"]  # draft i equals the pick of the row before it, whatever came earlier
    finish: Int[Array, " B"]


def accept(
    tokens: Int[Array, "B K"],
    picks: Int[Array, "B K"],
    finite: Bool[Array, "B K"],
    n_rows: Int[Array, " B"],
    remaining: Int[Array, " B"],
    stop_ids: Int[Array, "B stops"],
    finish: Int[Array, " B"],
) -> Accepted:
    """Longest prefix of drafts that equal the target's picks, plus the pick after it; cut at the first stop id, at `remaining`,
    and before the first row whose logits are not finite, which ends the request with an error."""
    K = tokens.shape[1]
    row = jnp.arange(K)
    live = n_rows > 0
    matches = (tokens[:, 1:] == picks[:, :-1]) & (row[1:] < n_rows[:, None])
    agreed = jnp.cumprod(matches, axis=1).sum(1)
    emitted = jnp.minimum(agreed + 1, remaining)
    first = lambda found: jnp.min(jnp.where(found, row, K), axis=1)  # noqa: E731
    stop = first((picks[:, :, None] == stop_ids[:, None, :]).any(-1))
    bad = first(~finite)
    emitted = jnp.minimum(emitted, stop + 1)
    failed = live & (bad < emitted)
    emitted = jnp.where(live, jnp.minimum(emitted, bad), 0)
    reason = jnp.where(emitted == remaining, LENGTH, RUNNING)
    reason = jnp.where(stop < emitted, STOP, reason)
    reason = jnp.where(failed, ERROR, reason)
    return Accepted(emitted, jnp.minimum(agreed, emitted), matches, jnp.where(live, reason, finish))


def feed(
    model: HybridModel, params: Any, state: DecodeState, slots: Array, running: Array, due: Array | bool, left: int
) -> tuple[Array, DecodeState]:
    """Feeds the MTP head's layer the rows that were committed since it was last fed, with the target's hiddens, over what
    speculation wrote (but for the first `left` of them, if so many were accepted drafts); or nothing, where it is not `due`.

    Returns: the head's normed hidden of each sequence's newest token [B, D], and the state.
    """

    def fed(target: TargetState, probe: Any) -> tuple[Array, TargetState, Any]:
        n, hidden = state.feed_count[slots], state.feed_hidden[slots]
        row = jnp.arange(hidden.shape[1])
        if left:
            skip = jnp.clip(n - 1, 0, left)
            n = n - skip
            at = jnp.minimum(skip[:, None] + row, hidden.shape[1] - 1)
            hidden = jnp.take_along_axis(hidden, at[:, :, None], axis=1)
        start = target.length[slots] - n + 1
        columns = jnp.minimum(start[:, None] + row, state.tokens.shape[1] - 1)
        tokens = jnp.take_along_axis(state.tokens[slots], columns, axis=1)
        args = (slots, tokens, hidden, start, jnp.where(running, n, 0))
        return probes.feed(model, params, probe, target, *args)

    def put_off(target: TargetState, probe: Any) -> tuple[Array, TargetState, Any]:
        return jnp.zeros((slots.shape[0], state.feed_hidden.shape[2]), state.feed_hidden.dtype), target, probe

    if due is True:
        hidden, target, probe = fed(state.target, state.probe)
    else:
        hidden, target, probe = jax.lax.cond(due, fed, put_off, state.target, state.probe)
    state = state.put(slots, feed_count=jnp.where(due & running, 0, state.feed_count[slots]))
    return hidden, dataclasses.replace(state, target=target, probe=probe)


def room(state: DecodeState, slots: Int[Array, " B"]) -> Int[Array, " B"]:
    """Rows that a verify of each sequence may have, whatever the dispatch has."""
    left = state.target.capacity - state.target.length[slots]
    return jnp.minimum(jnp.minimum(state.remaining[slots], state.most_rows[slots]), left)


def draft_context(model: HybridModel, params: Any, state: DecodeState, slots: Array, running: Array) -> DraftContext:
    """What a drafter may look at before the MTP head is fed."""

    def step(target, tokens, hidden, position):
        fits = ((position < target.capacity) & running).astype(jnp.int32)
        return call(model, params, target, slots, tokens, hidden, jnp.where(fits, position, 0), fits, method="draft")

    return DraftContext(
        slots=slots,
        tokens=state.tokens[slots],
        length=state.target.length[slots],
        most=jnp.maximum(room(state, slots) - 1, 0),
        running=running,
        hidden=jnp.zeros((slots.shape[0], model.config.hidden_size), state.feed_hidden.dtype),
        seed=state.requests["seed"][slots],
        vocab_size=model.config.vocab_size,
        logits=lambda hidden: call(model, params, hidden, method="draft_logits"),
        step=step,
    )


def propose(
    model: HybridModel, params: Any, drafter: Drafter, drafts: int, state: DecodeState, slots: Array, running: Array
) -> tuple[Proposal | None, DecodeState]:
    """Asks the drafter for up to `drafts` tokens, none where that is 0. The MTP head is fed before, if the drafter reads it now
    or the rows that wait for it leave no room for another round's."""
    context = draft_context(model, params, state, slots, running)
    if model.config.has_mtp and getattr(drafter, "feeds", True):
        free = state.feed_hidden.shape[1] - state.feed_count[slots]
        full = (running & (free < drafts + 1)).any()
        left = rows_left(drafter, drafts)
        # Without refeed, which rows stay as they are depends on the round that wrote them: none may wait.
        due: Array | bool = True if drafts > 0 or not getattr(drafter, "refeed", True) else full
        if drafts > 0 and isinstance(drafter, Planner):
            wanted, plan = drafter.plan(context, state.drafter, drafts)
            due, context = (wanted & running).any() | full, context._replace(plan=plan)
        hidden, state = feed(model, params, state, slots, running, due, left)
        context = context._replace(hidden=hidden)
    if not drafts:
        return None, state
    proposal = drafter.propose(context, state.target, state.drafter, drafts)
    return checked(proposal, drafter, state, slots, drafts), state


def checked(proposal: Any, drafter: Drafter, state: DecodeState, slots: Array, drafts: int) -> Proposal:
    """What a round may use of a proposal: ids and counts in bounds, and of the target's state nothing but its pages.

    Raises:
        RequestError: the proposal is of another form than `Proposal` says.
    """
    forms = lambda tree: [f"{jnp.result_type(x)}{jnp.shape(x)}" for x in jax.tree.leaves(tree)]  # noqa: E731
    alike = lambda x, y: jax.tree.structure(x) == jax.tree.structure(y) and forms(x) == forms(y)  # noqa: E731
    integers = lambda x, shape: jnp.shape(x) == shape and jnp.issubdtype(jnp.result_type(x), jnp.integer)  # noqa: E731
    refuse = lambda what: RequestError(f"drafter {drafter.name!r}: propose must return {what}")  # noqa: E731
    B = slots.shape[0]
    if not isinstance(proposal, Proposal):
        raise refuse(f"a Proposal, got {type(proposal).__name__}")
    if not integers(proposal.tokens, (B, drafts)) or not integers(proposal.count, (B,)):
        raise refuse(f"integers: tokens {(B, drafts)} and count {(B,)}, got {forms((proposal.tokens, proposal.count))}")
    source = jnp.full((B, drafts), Source.of(drafter.name)) if proposal.source is None else proposal.source
    if not integers(source, (B, drafts)):
        raise refuse(f"sources as integers {(B, drafts)}, members of Source, or None; got {forms(source)}")
    if not alike(proposal.state, state.drafter):
        raise refuse(f"a state like that of init, {forms(state.drafter)}, got {forms(proposal.state)}")
    if not isinstance(proposal.target, TargetState) or not alike(proposal.target.pages, state.target.pages):
        raise refuse("the target state that it was given, or what `step` made of it")
    return Proposal(
        tokens=jnp.clip(proposal.tokens, 0, state.requests.shape("bias")[0] - 1).astype(jnp.int32),
        count=jnp.clip(proposal.count, 0, drafts).astype(jnp.int32),
        target=dataclasses.replace(state.target, pages=proposal.target.pages),
        state=jax.tree.map(jnp.asarray, proposal.state),
        source=jnp.clip(source, 1, len(Source) - 1).astype(jnp.int32),
    )


def run_round(
    model: HybridModel,
    params: Any,
    drafter: Drafter,
    K: int,
    n_top: int | None,
    state: DecodeState,
    slots: Int[Array, " B"],
) -> tuple[DecodeState, Any]:
    """One round of B sequences with verifies of up to K rows. Returns the state and one round of `Emitted`."""
    state, rows = draft_rows(model, params, drafter, K, state, slots)
    return verify_rows(model, params, drafter, n_top, state, slots, rows)


def draft_rows(
    model: HybridModel, params: Any, drafter: Drafter, K: int, state: DecodeState, slots: Int[Array, " B"]
) -> tuple[DecodeState, Rows]:
    """The first half of a round: what the verify is to read."""
    B = slots.shape[0]
    length = state.target.length[slots]
    last = jnp.take_along_axis(state.tokens[slots], length[:, None], axis=1)
    running = state.finish[slots] == RUNNING
    proposal, state = propose(model, params, drafter, K - 1, state, slots, running)
    tokens, n_rows, source = last, jnp.ones(B, jnp.int32), jnp.zeros((B, 0), jnp.int32)
    target, drafter_state = state.target, state.drafter
    if proposal is not None:
        target, drafter_state = proposal.target, proposal.state
        tokens = jnp.concatenate([last, proposal.tokens], axis=1)
        n_rows, source = 1 + proposal.count, jnp.asarray(proposal.source)
    n_rows = jnp.where(running, jnp.minimum(n_rows, room(state, slots)), 0)
    return dataclasses.replace(state, target=target, drafter=drafter_state), Rows(tokens, n_rows, source)


def verify_rows(
    model: HybridModel,
    params: Any,
    drafter: Drafter,
    n_top: int | None,
    state: DecodeState,
    slots: Int[Array, " B"],
    rows: Rows,
    masks: Int[Array, "B K words"] | None = None,
) -> tuple[DecodeState, Any]:
    """The second half: verify, accept, commit. Bit v % 32 of word v // 32 of a row's mask says whether token v may be picked."""
    tokens, n_rows, source = rows
    K = tokens.shape[1]
    target = state.target
    length = target.length[slots]
    running = state.finish[slots] == RUNNING
    logits, hidden, target = call(model, params, target, slots, tokens, n_rows, method="verify")
    finite = jnp.isfinite(logits).all(-1) | (jnp.arange(K) >= n_rows[:, None])
    chosen_from = logits if masks is None else jnp.where(_bits(masks, logits.shape[-1]), logits, -jnp.inf)
    picks = sampling.pick(state.requests, slots, chosen_from, tokens, length + 1, n_rows, model.row_group)
    verdict = accept(tokens, picks, finite, n_rows, state.remaining[slots], state.stop_ids[slots], state.finish[slots])
    n = verdict.emitted
    scored = (verdict.matches, verdict.accepted, n)
    counters = count(state.counters[slots], length, n_rows, source, *scored)
    target = commit(target, slots, n, hidden)
    target = target.put(slots, ok=target.ok[slots] & (verdict.finish != ERROR))
    finish = jnp.where(target.ok[slots], verdict.finish, ERROR)
    probe = state.probe and probes.produced(state.probe, target, slots, length, hidden, n)

    # Rows past the emitted ones land in the sentinel column.
    emitted = jnp.arange(K) < n[:, None]
    column = jnp.where(emitted, length[:, None] + 1 + jnp.arange(K), state.tokens.shape[1] - 1)
    waiting = state.feed_count[slots] if model.config.has_mtp and getattr(drafter, "feeds", True) else jnp.zeros_like(n)
    at = jnp.where(running, waiting, 0)[:, None] + jnp.arange(K)  # `propose` has made room

    before = state.feed_hidden[slots[:, None], at]
    feed_hidden = state.feed_hidden.at[slots[:, None], at].set(jnp.where((n == 0)[:, None, None], before, hidden))
    requests = state.requests.put(
        slots,
        feed_count=jnp.where(n > 0, waiting + n, state.feed_count[slots]),
        remaining=state.remaining[slots] - n,
        finish=finish,
        counters=counters,
    )
    state = dataclasses.replace(
        state,
        target=target,
        requests=sampling.count_tokens(requests.put_at("tokens", slots, column, picks), slots, picks, n),
        feed_hidden=feed_hidden,
        probe=probe,
    )
    first = jnp.where(n_rows > 1, source[:, 0], Source.PLAIN) if K > 1 else jnp.zeros_like(n_rows)
    return state, (picks, n, n_rows, first, *_log_probabilities(logits, picks, n_rows, n_top, model.row_group))


def _bits(masks: Int[Array, "B K words"], V: int) -> Bool[Array, "B K V"]:
    bits = (masks[..., None] >> jnp.arange(32)) & 1
    return bits.reshape(*masks.shape[:2], -1)[..., :V] != 0


def guided_rows(
    model: HybridModel, drafter: Drafter, K: int, params: Any, state: DecodeState, slots: Int[Array, " B"]
) -> tuple[DecodeState, Rows]:
    """`draft_rows` as a dispatch of its own, for sequences whose picks the host restricts: it makes the masks of `guided_round`."""
    return draft_rows(model, params, drafter, K, state, slots)


def guided_round(
    model: HybridModel,
    drafter: Drafter,
    n_top: int | None,
    params: Any,
    state: DecodeState,
    slots: Int[Array, " B"],
    rows: Rows,
    masks: Int[Array, "B K words"],
) -> tuple[DecodeState, Emitted, Int[Array, " B"]]:
    """`verify_rows` as a dispatch of its own; returns what `dispatch` returns, of one round."""
    state, out = verify_rows(model, params, drafter, n_top, state, slots, rows, masks)
    return state, Emitted(*(x[None] for x in out)), state.finish[slots]


def _log_probabilities(
    logits: Array, picks: Array, n_rows: Array, n_top: int | None, row_group: int
) -> tuple[Array, Array, Array]:
    B, K, V = logits.shape
    if n_top is None:
        return jnp.zeros((B, 0)), jnp.zeros((B, K, 0)), jnp.zeros((B, K, 0), jnp.int32)
    f = lambda x, t: sampling.log_probabilities(x, t, n_top)  # noqa: E731
    out = by_row_group(f, row_group, live_rows(n_rows, K), logits.reshape(B * K, V), picks.reshape(-1))
    return tuple(x.reshape(B, K, *x.shape[1:]) for x in out)  # pyright: ignore[reportReturnType]


def dispatch(
    model: HybridModel,
    drafter: Drafter,
    K: int,
    n_top: int | None,
    max_rounds: int,
    params: Any,
    state: DecodeState,
    slots: Array,
    rounds: Array,
) -> tuple[DecodeState, Emitted, Int[Array, " B"]]:
    """Runs up to `rounds` <= max_rounds rounds, fewer once every sequence is finished.

    Returns: the state, what was emitted (rounds that did not run count zero), and why each sequence finished.
    """
    step = lambda state: run_round(model, params, drafter, K, n_top, state, slots)  # noqa: E731
    shapes = jax.eval_shape(step, state)[1]
    out = tuple(jnp.zeros((max_rounds, *x.shape), x.dtype) for x in shapes)

    def body(carry):
        i, state, out = carry
        state, new = step(state)
        return i + 1, state, tuple(x.at[i].set(y) for x, y in zip(out, new, strict=True))

    def go_on(carry):
        i, state, _ = carry
        return (i < rounds) & (state.finish[slots] == RUNNING).any()

    _, state, out = jax.lax.while_loop(go_on, body, (jnp.int32(0), state, out))
    return state, Emitted(*out), state.finish[slots]
