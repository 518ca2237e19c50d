"""Lookup where the context repeats, MTP elsewhere: chosen for each sequence and round on the device (see `arbitration`)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from atlas_jax.config import ModelConfig, RunConfig
from atlas_jax.decode import arbitration as arb
from atlas_jax.decode.lookup import check_min_match, continuation, find
from atlas_jax.decode.protocol import DraftContext, Proposal
from atlas_jax.errors import RequestError
from atlas_jax.metrics import Source
from atlas_jax.shapes import Array, Bool, Float, Int
from atlas_jax.state import TargetState
from atlas_jax.state.record import Field, Record, record

# The drafter's state: what each slot's last round drafted, to be judged by the next one, and how the kinds of drafts have done.
FIELDS = (
    Field("counts", (arb.KINDS, 4), "float32"),  # see `arbitration.outcome`
    Field("at"),  # committed tokens when it drafted
    Field("place"),  # where lookup's match ended
    Field("kind"),  # of that match, -1 without one
    Field("chained"),  # drafts of MTP, 0 where lookup was used
    Field("drafts"),  # in all
)


class Plan(NamedTuple):
    """What `plan` found and `propose` goes by."""

    counts: Float[Array, "B kinds 4"]
    lookup: Bool[Array, " B"]  # lookup drafts, not MTP
    place: Int[Array, " B"]
    kind: Int[Array, " B"]
    looked: Int[Array, " B"]  # drafts, if lookup drafts
    promised: Float[Array, " B"]  # tokens expected of these; 0 without a match


@dataclasses.dataclass(frozen=True)
class HybridDrafter:
    """Lookup and MTP in one executable. Where all sequences of a batch look up, the MTP head does not run.

    Attributes:
        min_match: lookup needs a match of this length at least.
        chain: the longest draft of MTP; lookup drafts as many as the round has rows for.
        sure: a chain of MTP ends before the draft at which the head's own probability of all its drafts falls below this. None: by
            platform (`arbitration.SURE`); 0: chains are always as long as they may be.
        extend: lets lookup go on where a chain of MTP ends, if the tail with its drafts has occurred before.
        least: drafts less likely than this to be reached and right are left out; None: by platform (`arbitration.LEAST`).

    Raises:
        RequestError: a value out of range.
    """

    min_match: int = arb.MIN_MATCH
    chain: int = arb.LONGEST_CHAIN
    sure: float | None = None
    extend: bool = True
    least: float | None = None
    name: ClassVar[str] = "hybrid"

    def __post_init__(self) -> None:
        check_min_match(self.min_match)
        if isinstance(self.chain, bool) or not isinstance(self.chain, int) or self.chain < 1:
            raise RequestError(f"chain must be an integer of 1 or more, got {self.chain!r}")
        if not isinstance(self.extend, bool):
            raise RequestError(f"extend must be True or False, got {self.extend!r}")
        for name in ("least", "sure"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, (int, float)) or not 0 <= value <= 1):
                raise RequestError(f"{name} must lie in 0 … 1, got {value!r}")

    def init(self, config: ModelConfig, run: RunConfig) -> Any:
        if not config.has_mtp:
            raise RequestError("drafter 'hybrid' needs a checkpoint with mtp.* tensors; use drafter 'lookup'")
        return record(run.slots + 1, FIELDS, kind=-1)

    def plan(self, context: DraftContext, state: Record, drafts: int) -> tuple[Bool[Array, " B"], Plan]:
        counts = judged(context, state, drafts)
        match, place = find(context.tokens, context.length)
        kind = arb.kind(match)
        looked, promised = self._promise(counts, kind, drafts)
        chain = min(self.chain, drafts)
        first, later = _rates(counts, arb.kind_of_mtp(kind))
        # Of a chain, as far as is known before it runs.
        length = jnp.maximum(arb.worth(first, later, chain, self._sure), 1)
        matches = match >= self.min_match
        lookup = matches & arb.prefer_lookup(promised, arb.tokens(first, later, length), length)
        return ~lookup, Plan(counts, lookup, place, kind, jnp.maximum(looked, 1), jnp.where(matches, promised, 0.0))

    def propose(self, context: DraftContext, target: TargetState, state: Record, drafts: int) -> Proposal:
        plan: Plan = context.plan
        slots, B = context.slots, context.slots.shape[0]
        chain = min(self.chain, drafts)

        def chained(target: TargetState) -> tuple[Array, Array, Array, Array, TargetState]:
            tokens, length, sure, expected, target = sure_chain(context, target, ~plan.lookup, chain, self._sure)
            tokens, count = jnp.pad(tokens, ((0, 0), (0, drafts - chain))), length
            if self.extend:
                more, further = self._extended(context, plan, tokens, length, sure)
                tokens, count = jnp.where(jnp.arange(drafts) < length[:, None], tokens, more), length + further
            return tokens, count, length, expected, target

        def skipped(target: TargetState) -> tuple[Array, Array, Array, Array, TargetState]:
            none = jnp.zeros(B, jnp.int32)
            return jnp.zeros((B, drafts), jnp.int32), none, none, jnp.zeros(B), target

        wanted = (~plan.lookup & context.running).any()
        tokens, count, length, expected, target = jax.lax.cond(wanted, chained, skipped, target)
        copied = continuation(context.tokens, context.length, plan.place, drafts)
        lookup = plan.lookup | (plan.promised > expected)  # what the head turned out to be unsure of
        tokens = jnp.where(lookup[:, None], copied, tokens)
        count = jnp.minimum(jnp.where(lookup, plan.looked, count), context.most)
        by_lookup = lookup[:, None] | (jnp.arange(drafts) >= length[:, None])
        state = state.put(
            slots,
            counts=plan.counts,
            at=context.length,
            place=plan.place,
            kind=plan.kind,
            chained=jnp.where(lookup, 0, jnp.minimum(length, context.most)),  # what is not verified is not judged
            drafts=count,
        )
        return Proposal(tokens, count, target, state, jnp.where(by_lookup, Source.LOOKUP, Source.MTP))

    def _promise(
        self, counts: Array, kind: Array, drafts: int, before: Array | float = 1.0
    ) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
        """How many drafts a lookup of this kind is good for, and how many tokens a round of them is expected to emit."""
        first, later = _rates(counts, jnp.maximum(kind, 0))
        least = arb.LEAST.get(jax.default_backend(), arb.LEAST["gpu"]) if self.least is None else self.least
        worth = arb.worth(first, later, drafts, least, before)
        return worth, arb.tokens(first, later, jnp.maximum(worth, 1))

    @property
    def _sure(self) -> float:
        return arb.SURE.get(jax.default_backend(), arb.SURE["gpu"]) if self.sure is None else self.sure

    def _extended(
        self,
        context: DraftContext,
        plan: Plan,
        chain: Int[Array, "B drafts"],
        length: Int[Array, " B"],
        sure: Float[Array, " B"],
    ) -> tuple[Int[Array, "B drafts"], Int[Array, " B"]]:
        """Drafts after the first `length` of the head, which are right with probability `sure`: what followed the longest match of
        the tail that these are the end of. Returns them where they belong, from place `length` on, and how many there are."""
        B, drafts = chain.shape
        sentinel = context.tokens.shape[1] - 1
        at = jnp.minimum(context.length[:, None] + 1 + jnp.arange(drafts), sentinel)
        tokens = context.tokens.at[jnp.arange(B)[:, None], at].set(chain)
        end = jnp.minimum(context.length + length, sentinel - 1)
        match, place = find(tokens, end)
        worth, _ = self._promise(plan.counts, arb.kind(match), drafts, sure)
        fits = (match >= self.min_match) & (length > 0) & (context.length + length == end)
        after = jnp.maximum(jnp.arange(drafts) - length[:, None], 0)
        more = jnp.take_along_axis(continuation(tokens, end, place, drafts), after, axis=1)
        return more, jnp.where(fits, jnp.minimum(worth, drafts - length), 0)


def sure_chain(
    context: DraftContext, target: TargetState, wanted: Bool[Array, " B"], chain: int, least: float
) -> tuple[Int[Array, "B chain"], Int[Array, " B"], Float[Array, " B"], Float[Array, " B"], TargetState]:
    """Drafts of the MTP head, until its own probability of all of them falls below `least` in every wanted sequence.

    Returns: the drafts; how many of each sequence's come before that; the probability that these are all right; the tokens that a
    round of them is expected to emit; the state.
    """

    def best(hidden: Array) -> tuple[Array, Array]:
        logits = context.logits(hidden)
        highest = jnp.max(logits, axis=-1)
        share = 1.0 / jnp.sum(jnp.exp(logits - highest[:, None]), axis=-1)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), share

    def taken(i: Array | int, share: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        length, sure, expected = carry
        on = (length == i) & (sure * share >= least)
        sure = jnp.where(on, sure * share, sure)
        return length + on, sure, expected + jnp.where(on, sure, 0.0)

    B = context.slots.shape[0]
    token, share = best(context.hidden)
    tokens = jnp.zeros((B, chain), jnp.int32).at[:, 0].set(token)
    counted = taken(0, share, (jnp.zeros(B, jnp.int32), jnp.ones(B), jnp.ones(B)))

    def go_on(carry: Any) -> Array:
        i, _, (length, _, _), _, _ = carry
        return (i < chain) & ((length == i) & wanted & context.running).any()

    def extend(carry: Any) -> Any:
        i, tokens, counted, hidden, target = carry
        hidden, target = context.step(target, tokens[:, i - 1], hidden, context.length + i)
        token, share = best(hidden)
        return i + 1, tokens.at[:, i].set(token), taken(i, share, counted), hidden, target

    carry = (jnp.int32(1), tokens, counted, context.hidden, target)
    _, tokens, (length, sure, expected), _, target = jax.lax.while_loop(go_on, extend, carry)
    return tokens, length, sure, expected, target


def judged(context: DraftContext, state: Record, drafts: int) -> Float[Array, "B kinds 4"]:
    """The counts of B sequences after what their last drafts came to.

    Lookup's drafts are compared with the tokens that followed, however these came about; the head's are known by how many
    tokens its round emitted. (If rounds without drafts came between, that may be taken for more: at most once a change of K.)
    """
    last = {field.name: state[field.name][context.slots] for field in FIELDS}
    emitted = context.length - last["at"]
    copied = continuation(context.tokens, last["at"], last["place"], drafts)
    at = jnp.minimum(last["at"][:, None] + 1 + jnp.arange(drafts), context.tokens.shape[1] - 1)
    told = jnp.minimum(emitted, drafts)
    same = (copied == jnp.take_along_axis(context.tokens, at, axis=1)) & (jnp.arange(drafts) < told[:, None])
    agreed = jnp.cumprod(same, axis=1).sum(1)
    counts = _learn(last["counts"], last["kind"], (last["kind"] >= 0) & (told > 0), agreed, agreed < told)
    right = jnp.minimum(emitted - 1, last["chained"])
    known = (last["chained"] > 0) & (emitted > 0) & (emitted <= last["drafts"] + 1)
    return _learn(counts, arb.kind_of_mtp(last["kind"]), known, right, right < last["chained"])


def _learn(counts: Array, kind: Array, known: Array, agreed: Array, failed: Array) -> Array:
    new = jnp.stack(arb.outcome(agreed, failed), axis=-1).astype(counts.dtype)[:, None]
    here = (jnp.arange(arb.KINDS) == kind[:, None]) & known[:, None]
    return jnp.where(here[..., None], arb.learn(counts, new), counts)


def _rates(counts: Array, kind: Array) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    of_kind = jnp.take_along_axis(counts, kind[:, None, None], axis=1)[:, 0]
    first, later = (jnp.asarray(x, jnp.float32)[kind] for x in (arb.FIRST, arb.LATER))
    return arb.rates((of_kind[:, 0], of_kind[:, 1], of_kind[:, 2], of_kind[:, 3]), first, later)
