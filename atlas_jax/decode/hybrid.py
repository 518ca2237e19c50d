"""Lookup where the context repeats, MTP elsewhere: chosen for each sequence and round on the device (see `arbitration`)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from atlas_jax.config import ModelConfig, RunConfig
from atlas_jax.decode import arbitration as arb
from atlas_jax.decode.lookup import check_min_match, continuation, find
from atlas_jax.decode.mtp import MtpChain
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


@dataclasses.dataclass(frozen=True)
class HybridDrafter:
    """Lookup and MTP in one executable. Where all sequences of a batch look up, the MTP head does not run.

    Attributes:
        min_match: lookup needs a match of this length at least.
        chain: the longest draft of MTP; lookup drafts as many as the round has rows for.
        extend: lets lookup go on where a chain of MTP ends, if the tail with its drafts has occurred before.
        least: drafts less likely than this to be reached and right are left out; None: by platform (`arbitration.LEAST`).

    Raises:
        RequestError: a value out of range.
    """

    min_match: int = arb.MIN_MATCH
    chain: int = arb.CHAIN
    extend: bool = True
    least: float | None = None
    name: ClassVar[str] = "hybrid"

    def __post_init__(self) -> None:
        check_min_match(self.min_match)
        if isinstance(self.chain, bool) or not isinstance(self.chain, int) or self.chain < 1:
            raise RequestError(f"chain must be an integer of 1 or more, got {self.chain!r}")
        if not isinstance(self.extend, bool):
            raise RequestError(f"extend must be True or False, got {self.extend!r}")
        if self.least is not None and (not isinstance(self.least, (int, float)) or not 0 <= self.least <= 1):
            raise RequestError(f"least must lie in 0 … 1, got {self.least!r}")

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
        head = arb.tokens(*_rates(counts, arb.kind_of_mtp(kind)), chain)
        lookup = (match >= self.min_match) & arb.prefer_lookup(promised, head, chain)
        return ~lookup, Plan(counts, lookup, place, kind, jnp.maximum(looked, 1))

    def propose(self, context: DraftContext, target: TargetState, state: Record, drafts: int) -> Proposal:
        plan: Plan = context.plan
        slots, B = context.slots, context.slots.shape[0]
        chain = min(self.chain, drafts)

        def chained(target: TargetState) -> tuple[Array, Array, TargetState]:
            proposal = MtpChain().propose(context, target, (), chain)
            tokens, count = jnp.pad(proposal.tokens, ((0, 0), (0, drafts - chain))), proposal.count
            if self.extend and drafts > chain:
                more, further = self._extended(context, plan, proposal.tokens, drafts)
                tokens, count = tokens.at[:, chain:].set(more), count + further
            return tokens, count, proposal.target

        def skipped(target: TargetState) -> tuple[Array, Array, TargetState]:
            return jnp.zeros((B, drafts), jnp.int32), jnp.zeros(B, jnp.int32), target

        wanted = (~plan.lookup & context.running).any()
        tokens, count, target = jax.lax.cond(wanted, chained, skipped, target)
        copied = continuation(context.tokens, context.length, plan.place, drafts)
        tokens = jnp.where(plan.lookup[:, None], copied, tokens)
        count = jnp.where(plan.lookup, plan.looked, count)
        by_lookup = plan.lookup[:, None] | (jnp.arange(drafts) >= chain)
        state = state.put(
            slots,
            counts=plan.counts,
            at=context.length,
            place=plan.place,
            kind=plan.kind,
            chained=jnp.where(plan.lookup, 0, chain),
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

    def _extended(
        self, context: DraftContext, plan: Plan, chain: Int[Array, "B chain"], drafts: int
    ) -> tuple[Int[Array, "B rest"], Int[Array, " B"]]:
        """Drafts after those of the head: what followed the longest match of the tail that these are the end of."""
        m = chain.shape[1]
        sentinel = context.tokens.shape[1] - 1
        at = jnp.minimum(context.length[:, None] + 1 + jnp.arange(m), sentinel)
        tokens = context.tokens.at[jnp.arange(at.shape[0])[:, None], at].set(chain)
        length = jnp.minimum(context.length + m, sentinel - 1)
        match, place = find(tokens, length)
        first, later = _rates(plan.counts, arb.kind_of_mtp(plan.kind))
        worth, _ = self._promise(plan.counts, arb.kind(match), drafts - m, first * later ** (m - 1))
        fits = (match >= self.min_match) & (context.length + m == length)
        return continuation(tokens, length, place, drafts - m), jnp.where(fits, worth, 0)


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
