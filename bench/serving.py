"""What serving costs: the same load given to the engine directly, to the gRPC server and to the HTTP server.

    python bench/serving.py tiny-agent                          # 1, 2, 4 … 32 streams of 128 tokens after prompts of 64
    python bench/serving.py MODEL --streams 1,16 --tokens 256 --serve "--drafter mtp --drafts 3 --max-length 8192"

Every measurement has a process of its own, so that clients and server share no interpreter; `--serve` is given to both the direct
engine and the servers. All streams of a rung begin together, with prompts that share no prefix, and decode exactly the tokens asked
for. TTFT is from sending a request to its first token, TPOT the mean time of a token after the first piece; both are medians over
the streams of all repetitions. Bars: at one stream a server adds at most 5 % to TPOT and 10 ms to TTFT; 16 streams give at least
three times the tokens a second of one; start-up to ready with a warm compilation cache takes less than 20 s.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
NAME = "bench"
TPOT_BAR, TTFT_BAR_MS, SCALING_BAR, READY_BAR_S = 0.05, 10.0, 3.0, 20.0


@dataclasses.dataclass
class Stream:
    """One answer, in seconds from the beginning of its rung."""

    sent: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    first_tokens: int = 0

    def took(self, tokens: int, now: float) -> None:
        if tokens:
            if not self.tokens:
                self.first, self.first_tokens = now, tokens
            self.tokens, self.last = self.tokens + tokens, now

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.first - self.sent)

    @property
    def tpot_ms(self) -> float:
        rest = self.tokens - self.first_tokens
        return 1e3 * (self.last - self.first) / rest if rest else 0.0


Send = Callable[[list[int], int, Stream], Awaitable[None]]


async def rung(streams: int, args: argparse.Namespace, send: Send) -> dict[str, float]:
    """All streams at once, as often as asked; the first time does not count."""
    done, seconds = list[Stream](), 0.0
    draw = random.Random(streams)
    for repetition in range(args.repeat + 1):
        prompts = [[draw.randrange(1000) for _ in range(args.prompt)] for _ in range(streams)]
        began = time.perf_counter()
        running = [Stream(began) for _ in prompts]
        await asyncio.gather(*(send(p, args.tokens, s) for p, s in zip(prompts, running, strict=True)))
        if repetition:
            seconds += max(s.last for s in running) - began
            done += running
    assert all(s.tokens == args.tokens for s in done), f"lost tokens: {sorted({s.tokens for s in done})}"
    return dict(
        streams=streams,
        ttft_ms=statistics.median(s.ttft_ms for s in done),
        tpot_ms=statistics.median(s.tpot_ms for s in done),
        tokens_per_s=sum(s.tokens for s in done) / seconds,
    )


async def rungs(args: argparse.Namespace, send: Send) -> list[dict[str, float]]:
    return [await rung(streams, args, send) for streams in args.streams]


# ---- the three ways --------------------------------------------------------------------------------------------------


def direct(args: argparse.Namespace) -> list[dict[str, float]]:
    """The engine in this process."""
    from atlas_jax import cli
    from atlas_jax.serve import command

    engine = command.make_engine(cli.parser().parse_args(["serve", args.model, *shlex.split(args.serve)]))
    engine.start()

    async def send(prompt: list[int], tokens: int, stream: Stream) -> None:
        request = engine.request(prompt, max_tokens=tokens, ignore_eos=True)
        async for delta in engine.submit(request):
            stream.took(len(delta.token_ids), time.perf_counter())

    try:
        return asyncio.run(rungs(args, send))
    finally:
        engine.close()


async def by_grpc(args: argparse.Namespace, address: str) -> list[dict[str, float]]:
    from atlas_jax.serve.client import AtlasClient

    async with AtlasClient(address) as client:

        async def send(prompt: list[int], tokens: int, stream: Stream) -> None:
            async for piece in client.generate(prompt, max_tokens=tokens, ignore_eos=True):
                stream.took(len(piece.token_ids), time.perf_counter())

        return await rungs(args, send)


async def by_http(args: argparse.Namespace, address: str) -> list[dict[str, float]]:
    """Pieces come as text: the number of tokens stands in the last chunk, the usage."""
    import httpx

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=None, limits=limits) as client:

        async def send(prompt: list[int], tokens: int, stream: Stream) -> None:
            body: dict[str, Any] = dict(
                model=NAME, prompt=prompt, max_tokens=tokens, ignore_eos=True, temperature=0, stream=True
            )
            body["stream_options"] = dict(include_usage=True)
            times = list[float]()
            async with client.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200, await response.aread()
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    chunk = json.loads(line[6:])
                    if chunk.get("choices") and chunk["choices"][0]["text"]:
                        times.append(time.perf_counter())
                    elif chunk.get("usage"):
                        stream.tokens = chunk["usage"]["completion_tokens"]
            # One piece is one dispatch: the first has as many tokens as the others in the mean.
            stream.first, stream.last = times[0], times[-1]
            stream.first_tokens = round(stream.tokens / len(times))

        return await rungs(args, send)


@contextlib.contextmanager
def serving(args: argparse.Namespace) -> Iterator[tuple[str, str, float]]:
    """A server of its own: its addresses, and the seconds from its start until it was ready."""
    import urllib.error
    import urllib.request

    http, grpc = f"127.0.0.1:{_free_port()}", f"127.0.0.1:{_free_port()}"
    command = [
        sys.executable,
        "-m",
        "atlas_jax.cli",
        "serve",
        args.model,
        "--name",
        NAME,
        "--http",
        http,
        "--grpc",
        grpc,
    ]
    began = time.perf_counter()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [*command, *shlex.split(args.serve)], env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            while True:
                with contextlib.suppress(urllib.error.URLError, ConnectionError):
                    urllib.request.urlopen(f"http://{http}/ready")
                    break
                assert process.poll() is None, process.stderr and process.stderr.read()
                time.sleep(0.05)
            yield http, grpc, time.perf_counter() - began
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ---- the report ------------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, Any]:
    here = [sys.executable, __file__, args.model, "--direct", "--streams", ",".join(map(str, args.streams))]
    here += [
        "--tokens",
        str(args.tokens),
        "--prompt",
        str(args.prompt),
        "--repeat",
        str(args.repeat),
        "--serve",
        args.serve,
    ]
    out = subprocess.run(here, stdout=subprocess.PIPE, check=True, text=True).stdout
    found: dict[str, Any] = dict(direct=json.loads(out.splitlines()[-1]))
    with serving(args) as (http, grpc, ready_s):
        found["ready_s"] = ready_s
        found["grpc"] = asyncio.run(by_grpc(args, grpc))
        if args.http:
            found["http"] = asyncio.run(by_http(args, http))
    return found


def report(found: dict[str, Any]) -> bool:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(title="TTFT ms, TPOT ms and tokens/s", box=None, pad_edge=False)
    ways = [way for way in ("direct", "grpc", "http") if way in found]
    for name in ("streams", *(f"{way} {figure}" for way in ways for figure in ("TTFT", "TPOT", "tok/s"))):
        table.add_column(name, justify="right")
    for i, line in enumerate(found["direct"]):
        cells = [str(line["streams"])]
        for way in ways:
            got = found[way][i]
            cells += [f"{got['ttft_ms']:.1f}", f"{got['tpot_ms']:.2f}", f"{got['tokens_per_s']:.1f}"]
        table.add_row(*cells)
    console.print(table)
    bars = [(f"ready in {found['ready_s']:.1f} s", found["ready_s"] < READY_BAR_S)]
    one = {way: next((line for line in found[way] if line["streams"] == 1), None) for way in ways}
    for way in ways[1:]:
        if (base := one["direct"]) and (got := one[way]):
            slower = got["tpot_ms"] / base["tpot_ms"] - 1
            bars.append((f"{way} adds {100 * slower:.1f} % to TPOT at one stream", slower <= TPOT_BAR))
            later = got["ttft_ms"] - base["ttft_ms"]
            bars.append((f"{way} adds {later:.1f} ms to TTFT at one stream", later <= TTFT_BAR_MS))
    for way in ways:
        many = next((line for line in found[way] if line["streams"] == 16), None)
        if (base := one[way]) and many:
            gain = many["tokens_per_s"] / base["tokens_per_s"]
            bars.append((f"{way}: 16 streams give {gain:.2f} times the tokens/s of one", gain >= SCALING_BAR))
        speeds = [line["tokens_per_s"] for line in found[way]]
        bars.append((f"{way}: no rung is slower than the one before", speeds == sorted(speeds)))
    for text, met in bars:
        console.print(("met:    " if met else "MISSED: ") + text)
    return all(met for _, met in bars)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="tiny-agent")
    parser.add_argument("--streams", default="1,2,4,8,16,32", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions, after one that does not count")
    parser.add_argument("--serve", default="", help="further options of atlas-jax serve")
    parser.add_argument(
        "--no-http", dest="http", action="store_false", help="for models without a tokenizer, which give no text"
    )
    parser.add_argument("--json", metavar="FILE", help="where to keep the figures")
    parser.add_argument("--direct", action="store_true", help="only the engine, as one line of JSON")
    args = parser.parse_args()
    if args.direct:
        print(json.dumps(direct(args)))
        return 0
    found = measure(args)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
    return 0 if report(found) else 1


if __name__ == "__main__":
    sys.exit(main())
