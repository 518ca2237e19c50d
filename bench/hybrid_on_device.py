"""Tokens a second of the hybrid and of MTP alone for a shape with random weights, under the acceptance that a replay recorded.

    atlas-jax replay FILE.jsonl --tokenizer qwen3.6 --mtp 0.753,0.72,0.7 --drafts 7 --write-trace trace.jsonl
    python bench/hybrid_on_device.py [--shape qwen3.5-27b] [--trace trace.jsonl] [--context N] [--tokens N]

Random weights accept no drafts, so acceptance is imposed: the answer is decoded plainly first, and of each round's drafts then as
many are right as the trace says, with everything that costs time still done (the head's feed and chain, the lookup, the verify).
Outputs of all arms must be equal. The bar: hybrid at least 1.2 times the tokens a second of MTP alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import atlas_jax
from atlas_jax.config import ModelConfig, RunConfig
from atlas_jax.decode.lookup import continuation, find
from atlas_jax.decode.mtp import MtpChain
from atlas_jax.decode.protocol import DraftContext, Proposal
from atlas_jax.metrics import Source
from atlas_jax.state import TargetState

TRACE = pathlib.Path(__file__).parent / "data" / "hybrid_trace.jsonl"
SOURCES = {"plain": Source.PLAIN, "lookup": Source.LOOKUP, "mtp": Source.MTP}


@dataclasses.dataclass(frozen=True)
class Imposed:
    """Drafts as the trace says: its state holds the answer and, for each position, who drafts there, how many, how many right.

    `chain` is the MTP head's longest chain; `looks` is whether the arm looks up at all.
    """

    chain: int
    looks: bool
    name: ClassVar[str] = "imposed"
    by_hidden: ClassVar[bool] = False

    def init(self, config: ModelConfig, run: RunConfig) -> Any:
        return jnp.zeros((run.slots + 1, 4, run.max_length + 1), jnp.int32)

    def teach(self, state: Any, slot: int, known: np.ndarray) -> Any:
        return state.at[slot, 0, : known.shape[0]].set(known)

    def plan(self, context: DraftContext, state: Any, drafts: int) -> tuple[Any, Any]:
        rows = jnp.take_along_axis(state[context.slots], context.length[:, None, None], axis=2)[..., 0]
        place = find(context.tokens, context.length).place if self.looks else context.length
        return rows[:, 1] == Source.MTP, (rows, place)

    def propose(self, context: DraftContext, target: TargetState, state: Any, drafts: int) -> Proposal:
        rows, place = context.plan
        at = jnp.minimum(context.length[:, None] + 1 + jnp.arange(drafts), state.shape[2] - 1)
        right = jnp.take_along_axis(state[context.slots, 0], at, axis=1)
        chain = min(self.chain, drafts)

        def chained(target: TargetState) -> tuple[Any, TargetState]:
            proposal = MtpChain().propose(context, target, (), chain)
            return jnp.pad(proposal.tokens, ((0, 0), (0, drafts - chain))), proposal.target

        none = lambda target: (jnp.zeros_like(right), target)  # noqa: E731
        if self.looks:
            tokens, target = jax.lax.cond((rows[:, 1] == Source.MTP).any(), chained, none, target)
            copied = continuation(context.tokens, context.length, place, drafts)
            tokens = jnp.where((rows[:, 1] == Source.MTP)[:, None], tokens, copied)
        else:
            tokens, target = chained(target)
        # what was really drafted stands where a wrong draft is asked for, unless it would be right by chance
        wrong = jnp.where(tokens == right, (right + 1) % context.vocab_size, tokens)
        tokens = jnp.where(jnp.arange(drafts) < rows[:, 3][:, None], right, wrong)
        return Proposal(tokens, jnp.minimum(rows[:, 2], drafts), target, state)


def rounds_of(path: pathlib.Path, policy: str, tokens: int) -> list[list[Any]]:
    """Rounds of a policy, answer after answer, until there are `tokens` of them; again from the first if the trace ends."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    rounds = [step for line in lines if line["policy"] == policy for step in line["rounds"]]
    if not rounds:
        known = sorted({line["policy"] for line in lines})
        raise SystemExit(f"{path} has no rounds of {policy!r}; there are {', '.join(known)}")
    out: list[list[Any]] = []
    total = 0
    while total < tokens:
        out.append(rounds[len(out) % len(rounds)])
        total += out[-1][3]
    return out


def imposed(
    runtime: Any, prompt: list[int], answer: list[int], rounds: list[list[Any]], arm: Imposed, drafts: int
) -> Any:
    """Decodes the answer with the trace's rounds. Returns the completion."""
    schedule = np.zeros((3, runtime.run.max_length + 1), np.int32)
    at = len(prompt) - 1  # committed tokens at the first round
    for source, drafted, accepted, emitted in rounds:
        if at >= schedule.shape[1]:
            break
        schedule[:, at] = SOURCES[source], drafted, accepted
        at += emitted if emitted > accepted else emitted + 1  # an answer's end within its drafts: this text goes on

    @dataclasses.dataclass(frozen=True)
    class Scheduled(Imposed):
        def teach(self, state: Any, slot: int, known: np.ndarray) -> Any:
            return super().teach(state, slot, known).at[slot, 1:].set(schedule)

    drafter = Scheduled(arm.chain, arm.looks)
    options: dict[str, Any] = dict(drafter=drafter, drafts=drafts, script=answer, ignore_eos=True)
    runtime.generate(prompt, max_tokens=8, **options)  # compiles
    return runtime.generate(prompt, max_tokens=len(answer), **options)


def main() -> None:
    parser = argparse.ArgumentParser(description="Hybrid against MTP alone under a recorded trace.")
    parser.add_argument("--shape", default="shape:qwen3.5-27b", help="shape:NAME, or tiny-agent")
    parser.add_argument("--trace", type=pathlib.Path, default=TRACE)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--mtp-drafts", type=int, default=3)
    parser.add_argument("--drafts", type=int, default=7)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--policy", default="hybrid, extended")
    args = parser.parse_args()
    name = args.shape if args.shape.startswith("shape:") or args.shape == "tiny-agent" else f"shape:{args.shape}"
    runtime = atlas_jax.load(
        name, dtype=args.dtype, max_length=args.context + args.tokens + 32, max_drafts=max(args.drafts, args.mtp_drafts)
    )
    print(f"{name} {runtime.run.dtype} on {jax.devices()[0].device_kind}, {args.context} tokens of context", flush=True)
    prompt = np.random.default_rng(0).integers(0, runtime.config.vocab_size, args.context).tolist()
    plain = runtime.generate(prompt, drafter="none", max_tokens=args.tokens, ignore_eos=True)
    print(f"plain: {1e3 / plain.timings.tpot_ms:.1f} tokens/s, {plain.timings.tpot_ms:.2f} ms a token", flush=True)
    speeds = {}
    for label, policy, drafts, looks in (
        ("mtp", "mtp", args.mtp_drafts, False),
        ("hybrid", args.policy, args.drafts, True),
    ):
        arm, rounds = Imposed(args.mtp_drafts, looks), rounds_of(args.trace, policy, args.tokens)
        got = imposed(runtime, prompt, plain.token_ids, rounds, arm, drafts)
        if got.token_ids != plain.token_ids:
            raise SystemExit(f"{label}: the output differs from plain decoding's")
        speeds[label] = 1e3 / got.timings.tpot_ms
        a_round = got.acceptance.tokens_per_step
        print(
            f"{label}: {speeds[label]:.1f} tokens/s, {a_round:.2f} tokens a round, {got.timings.tpot_ms * a_round:.2f} ms a round"
        )
    print(f"hybrid: {speeds['hybrid'] / speeds['mtp']:.2f} times the tokens a second of MTP alone (bar: 1.2)")


if __name__ == "__main__":
    main()
