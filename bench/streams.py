"""Tokens a second at 1, 2, 4 … 32 streams, with and without speculation, by the engine in this process.

    python bench/streams.py                                     # tiny-agent
    python bench/streams.py shape:qwen3.5-27b --weights int4    # on an H200: 15 GB of random weights, made on the device

Random weights accept no drafts, so acceptance is imposed, on every model alike: each rung's answers are known from plain
decoding, and draft i is right with probability `--acceptance` i, given that those before it were (drawn independently for every
stream and position). The MTP head drafts all the same, so that a round takes as long as with drafts of its own. What the
streams emit is compared with what plain decoding did, token by token.

The streams of a rung begin together, with prompts of their own and without the prefix cache. There are two rates: `whole`, from
the first request to the last token, prompts included, and `steady`, while all streams are decoding.

Every number of rows and of streams is an executable of its own: 12 dispatches by default, 6 more for each further number of
drafts, 12 for "auto" beside 3. All are compiled before anything is timed. An H200's machine of 16 cores takes 5 to 8 s to trace
one of the 27B, one after another, and some 20 s to compile it, several at once.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import pathlib
import statistics
import sys
import time
from typing import Any

import jax
import numpy as np

import atlas_jax
from atlas_jax.decode.drafters import NoDrafter, ScriptedDrafter
from atlas_jax.decode.warm_up import compile_all, dispatches
from atlas_jax.engine.api import EngineConfig
from atlas_jax.engine.engine import Engine
from atlas_jax.metrics import Acceptance

Answers = dict[int, list[int]]  # by stream
COLUMNS = (
    "drafts",
    "streams",
    "TTFT ms",
    "TPOT ms",
    "tokens/round",
    "ms/round",
    "whole tok/s",
    "steady tok/s",
    "vs plain",
)


@dataclasses.dataclass
class Stream:
    """One answer: when its pieces came (`time.perf_counter`), and what they held."""

    pieces: list[tuple[float, int]]
    token_ids: list[int]
    acceptance: Acceptance

    @property
    def tpot_ms(self) -> float:
        (first, n), (last, _) = self.pieces[0], self.pieces[-1]
        return 1e3 * (last - first) / max(len(self.token_ids) - n, 1)


@dataclasses.dataclass
class Rung:
    """Figures of one number of streams, over all repetitions."""

    arm: str
    streams: int
    ttft_ms: float
    tpot_ms: float
    tokens_per_round: float
    whole: float  # tokens a second
    steady: float  # 0: the streams never all decoded at once
    differ: int  # streams whose tokens are not those of plain decoding


def steady(streams: list[Stream]) -> tuple[int, float]:
    """Tokens that came while all streams were decoding, and the seconds of that."""
    begin, end = max(s.pieces[0][0] for s in streams), min(s.pieces[-1][0] for s in streams)
    tokens = sum(n for s in streams for at, n in s.pieces if begin < at <= end)
    return (tokens, end - begin) if tokens and end > begin else (0, 0.0)


class Ladder:
    def __init__(self, engine: Engine, args: argparse.Namespace) -> None:
        self.engine, self.args = engine, args
        vocabulary = engine.runtime.config.vocab_size
        draw = np.random.default_rng(0)
        self.prompts = draw.integers(0, vocabulary, (max(args.streams), args.prompt)).tolist()
        self.answers: Answers = {}
        self.synthetic = ScriptedDrafter(args.acceptance, mtp=engine.runtime.config.has_mtp)

    def options(self, arm: str, stream: int) -> dict[str, Any]:
        if arm == "0":
            return dict(drafter="none")
        drafts = "auto" if arm == "auto" else int(arm)
        return dict(drafter=self.synthetic, drafts=drafts, script=self.answers[stream], seed=stream)

    async def stream(self, arm: str, index: int, tokens: int) -> Stream:
        request = self.engine.request(
            self.prompts[index], max_tokens=tokens, ignore_eos=True, **self.options(arm, index)
        )
        pieces, ids, acceptance = list[tuple[float, int]](), list[int](), Acceptance.zero()
        async for delta in self.engine.submit(request):
            if delta.token_ids:
                pieces.append((time.perf_counter(), len(delta.token_ids)))
                ids += delta.token_ids
            if delta.completion:
                acceptance = delta.completion.acceptance
        return Stream(pieces, ids, acceptance)

    async def together(self, arm: str, streams: int, tokens: int) -> tuple[float, list[Stream]]:
        began = time.perf_counter()
        return began, [*await asyncio.gather(*(self.stream(arm, i, tokens) for i in range(streams)))]

    def rung(self, arm: str, streams: int) -> Rung:
        """One short repetition that does not count (it loads the executables), then as many as asked."""
        args, done = self.args, list[tuple[float, list[Stream]]]()
        asyncio.run(self.together(arm, streams, min(args.tokens, 24)))
        for _ in range(args.repeat):
            done.append(asyncio.run(self.together(arm, streams, args.tokens)))
        every = [s for _, streams in done for s in streams]
        for i, s in enumerate(done[0][1]):
            self.answers.setdefault(i, s.token_ids)
        kept = [steady(streams) for _, streams in done]
        seconds, whole = sum(s for _, s in kept), sum(max(s.pieces[-1][0] for s in group) - at for at, group in done)
        return Rung(
            arm=arm,
            streams=streams,
            ttft_ms=1e3 * statistics.median(s.pieces[0][0] - at for at, group in done for s in group),
            tpot_ms=statistics.median(s.tpot_ms for s in every),
            tokens_per_round=Acceptance.merge(s.acceptance for s in every).tokens_per_step,
            whole=sum(len(s.token_ids) for s in every) / whole,
            steady=sum(n for n, _ in kept) / seconds if seconds else 0.0,
            differ=sum(s.token_ids != self.answers[i] for _, group in done for i, s in enumerate(group)),
        )


def row(rung: Rung, plain: dict[int, Rung]) -> str:
    gain = f"{rung.steady / base.steady:.2f}" if (base := plain.get(rung.streams)) and base.steady else "-"
    a_round = f"{rung.tokens_per_round:.2f}", f"{rung.tpot_ms * rung.tokens_per_round:.2f}"
    cells = [rung.arm, rung.streams, f"{rung.ttft_ms:.0f}", f"{rung.tpot_ms:.2f}", *a_round]
    cells += [f"{rung.whole:.1f}", f"{rung.steady:.1f}" if rung.steady else "-", gain]
    return "".join(f"{cell!s:>{len(name) + 2}}" for cell, name in zip(cells, COLUMNS, strict=True))


def report(rungs: list[Rung]) -> bool:
    """Bars: no rung slower than the one before, and nothing but plain decoding's tokens."""
    met = True
    for arm, group in itertools.groupby(rungs, lambda r: r.arm):
        lines = [*group]
        for name in ("whole", "steady"):
            speeds = [getattr(r, name) for r in lines if getattr(r, name)]
            good = speeds == sorted(speeds)
            met &= good
            print(f"{'met:    ' if good else 'MISSED: '}{arm} drafts: no rung is slower than the one before ({name})")
        if differ := sum(r.differ for r in lines):
            met = False
            print(f"MISSED: {arm} drafts: {differ} streams did not emit what plain decoding did")
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="tiny-agent")
    parser.add_argument("--weights", help="form of random weights: int4, nvfp4, …")
    parser.add_argument("--streams", default="1,2,4,8,16,32", help="rungs")
    parser.add_argument(
        "--arms", default="0,3", help="numbers of drafts, or auto; 0 is plain decoding, which all others need"
    )
    parser.add_argument("--acceptance", default="0.8,0.8,0.8", help="of each draft where those before it were right")
    parser.add_argument("--prompt", type=int, default=257, help="tokens: one chunk, and the first round's")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--repeat", type=int, default=2, help="repetitions that count, after a short one that does not")
    parser.add_argument("--dispatch-ms", type=float, default=25.0, help="about how long a dispatch may take")
    parser.add_argument("--row-group", type=int, help="see RunConfig; by default 1 on a CPU, 16 on a GPU")
    parser.add_argument("--json", metavar="FILE", help="where to keep the figures")
    args = parser.parse_args()
    args.streams = sorted({int(n) for n in args.streams.split(",")})
    args.acceptance = tuple(float(p) for p in args.acceptance.split(","))
    arms = ["0", *(arm for arm in args.arms.split(",") if arm != "0")]
    most = max(int(arm) for arm in arms if arm != "auto")

    began = time.perf_counter()
    told = lambda text: print(f"[{time.perf_counter() - began:6.1f} s] {text}", flush=True)  # noqa: E731
    told(f"{args.model} on {jax.devices()[0].device_kind}; draft i right, given those before: {args.acceptance}, "
         f"cumulative {np.cumprod(args.acceptance).round(3).tolist()}")  # fmt: skip
    runtime = atlas_jax.load(
        args.model,
        weights=args.weights,
        slots=max(args.streams),
        max_length=args.prompt + args.tokens,
        max_drafts=most or 3,
        prefix_cache=False,
        row_group=args.row_group,
    )
    jax.block_until_ready(runtime.params)
    told("loaded")
    buckets = tuple(args.streams)
    config = EngineConfig(drafter="none", buckets=buckets, dispatch_ms=args.dispatch_ms)
    engine = Engine(runtime, config)
    ladder = Ladder(engine, args)
    wanted = dispatches(runtime.loop, NoDrafter(), 0, None, buckets)
    for arm in arms[1:]:
        wanted += dispatches(runtime.loop, ladder.synthetic, "auto" if arm == "auto" else int(arm), None, buckets)
    jobs = [*wanted, *runtime.loop.preparations()]
    compile_all(jobs, lambda text: told(text) if text.endswith("ready") else None)
    told(f"compiled: {len(runtime.loop.executables)} executables")
    print("".join(f"{name:>{len(name) + 2}}" for name in COLUMNS), flush=True)
    rungs, plain = list[Rung](), dict[int, Rung]()
    with engine:
        for arm in arms:
            # the widest rung first: it decodes what all others are compared with
            for streams in (args.streams[-1:] + args.streams[:-1]) if arm == "0" else args.streams:
                rung = ladder.rung(arm, streams)
                rungs.append(rung)
                if arm == "0":
                    plain[streams] = rung
                print(row(rung, plain), flush=True)
    order = {arm: i for i, arm in enumerate(arms)}
    rungs.sort(key=lambda r: (order[r.arm], r.streams))
    met = report(rungs)
    told("done")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps([dataclasses.asdict(r) for r in rungs], indent=1) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
