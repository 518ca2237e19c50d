"""The servers in front of the real engine: whoever else is served, every stream is that of its solo run."""

from __future__ import annotations

import asyncio
import collections
import functools
import gc
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from fake_engine import FakeEngine
from models import params_of
from serving import MODEL, running
from test_engine import CONFIG, SMALL, Letters

from atlas_jax.engine.api import EngineConfig
from atlas_jax.engine.engine import Engine
from atlas_jax.runtime import Runtime
from atlas_jax.serve.client import AtlasClient

ROOT = pathlib.Path(__file__).resolve().parent.parent
SAMPLED: dict[str, Any] = dict(temperature=0.9, top_k=40, seed=11)


class Served(Letters):
    """What the servers ask for besides."""

    directory = pathlib.Path("nowhere")
    templates: dict[str, str] = {}  # noqa: RUF012
    max_token_bytes = 1  # pyright: ignore[reportAssignmentType]

    def token_bytes(self, token_id: int) -> bytes:
        return chr(32 + token_id).encode()


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    runtime = Runtime(CONFIG, SMALL, params_of(CONFIG, SMALL), Served())
    with running(Engine(runtime, EngineConfig(buckets=(4,), max_waiting=256)), max_batch=64) as servers:
        yield servers


def load(count: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Requests of mixed lengths and kinds; some share a prefix, some are alike."""
    draw = np.random.default_rng(count)
    shared = draw.integers(0, 96, 40).tolist()
    requests = []
    for i in range(count):
        prompt = draw.integers(0, 96, int(draw.integers(1, 60))).tolist()
        options: dict[str, Any] = dict(max_tokens=int(draw.integers(1, 40)), ignore_eos=True)
        options |= SAMPLED | dict(seed=i % 5) if i % 3 == 0 else dict(temperature=0.0)
        requests.append((shared + prompt[:20] if i % 4 == 1 else prompt, options))
    return requests


async def by_grpc(client: AtlasClient, prompt: list[int], options: dict[str, Any]) -> tuple[list[int], str]:
    answer = await client.complete(prompt, **options)
    assert answer.completion.completion_tokens == len(answer.token_ids)
    return answer.token_ids, answer.text


async def by_http(client: Any, prompt: list[int], options: dict[str, Any]) -> str:
    beyond = {name: value for name, value in options.items() if name in ("ignore_eos", "top_k")}
    known = {name: value for name, value in options.items() if name not in beyond}
    pieces = await client.completions.create(model=MODEL, prompt=prompt, stream=True, extra_body=beyond, **known)
    return "".join([chunk.choices[0].text async for chunk in pieces])


async def compare(server: Any, count: int) -> None:
    """Everyone alone, then all at once by both servers."""
    address = f"http://127.0.0.1:{server.http_port}/v1"
    grpc_address = f"127.0.0.1:{server.grpc_port}"
    http_options: dict[str, Any] = dict(base_url=address, api_key="x", max_retries=0, timeout=300)
    async with AtlasClient(grpc_address) as grpc_client, openai.AsyncOpenAI(**http_options) as http_client:
        requests = load(count)
        alone = [await by_grpc(grpc_client, *request) for request in requests]
        together = [asyncio.ensure_future(by_grpc(grpc_client, *request)) for request in requests[::2]]
        texts = [asyncio.ensure_future(by_http(http_client, *request)) for request in requests[1::2]]
        assert await asyncio.gather(*together) == alone[::2]
        assert await asyncio.gather(*texts) == [text for _, text in alone[1::2]]
    assert all(len(ids) == options["max_tokens"] for (ids, _), (_, options) in zip(alone, requests, strict=True))


def test_every_stream_is_that_of_its_solo_run(server):
    asyncio.run(compare(server, 12))


@pytest.mark.long
def test_64_clients_get_what_each_would_get_alone(server):
    asyncio.run(compare(server, 64))
    stats = server.backend.engine.stats()
    assert stats.running == stats.waiting == 0


def test_leaving_clients_give_their_slots_back(server):
    async def main() -> None:
        async with AtlasClient(f"127.0.0.1:{server.grpc_port}") as client:
            for _ in range(3 * SMALL.slots):
                async for _piece in client.generate([1, 2, 3], max_tokens=150, ignore_eos=True):
                    break  # leaves
            answers = [r async for r in client.batch([[i + 1, 2, 3] for i in range(8)], max_tokens=10, ignore_eos=True)]
            assert sorted(r.index for r in answers) == list(range(8)) and all(len(r.token_ids) == 10 for r in answers)

    asyncio.run(main())
    end = time.monotonic() + 30
    while server.backend.engine.stats().running:
        assert time.monotonic() < end, "a slot did not come back"
        time.sleep(0.02)
    assert server.backend.engine.stats().finished["cancelled"] >= 3 * SMALL.slots


def test_usage_tells_of_cache_and_drafts(server):
    prompt = np.random.default_rng(3).integers(0, 96, 100).tolist()
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.http_port}/v1", api_key="x") as client:
        for warm in (False, True):
            got = client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=20, temperature=0, extra_body={"ignore_eos": True}
            )
            assert got.usage and got.usage.prompt_tokens == 100 and got.usage.completion_tokens == 20
            details, cached = got.usage.completion_tokens_details, got.usage.prompt_tokens_details
            assert (
                details and cached and (cached.cached_tokens or 0) > 0 if warm else cached and cached.cached_tokens == 0
            )
            assert details and details.accepted_prediction_tokens is not None


@pytest.mark.long  # compiles what log-probabilities need
def test_scores_and_echoes_agree(server):
    prompt = [5, 6, 7, 8, 9]

    async def main() -> Any:
        async with AtlasClient(f"127.0.0.1:{server.grpc_port}") as client:
            return await client.score(prompt)

    score = asyncio.run(main())
    body = dict(model=MODEL, prompt=prompt, echo=True, logprobs=0, max_tokens=1)
    got = httpx.post(f"http://127.0.0.1:{server.http_port}/v1/completions", json=body, timeout=60).json()
    logged = got["choices"][0]["logprobs"]["token_logprobs"]
    assert logged[0] is None and logged[1:5] == pytest.approx([entry.logprob for entry in score.logprobs], rel=1e-6)


# ---- processes -------------------------------------------------------------------------------------------------------


class Process:
    """`atlas-jax serve tiny-agent` on free ports."""

    def __init__(self, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        command = [sys.executable, "-m", "atlas_jax.cli", "serve", "tiny-agent", "--http", self.address, "--slots", "2"]
        self.process = subprocess.Popen([*command, *options], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
        self.began = time.monotonic()

    def wait_ready(self, seconds: float = 500) -> float:
        while time.monotonic() - self.began < seconds:
            assert self.process.poll() is None, "the server ended"
            try:
                urllib.request.urlopen(f"http://{self.address}/ready")
                return time.monotonic() - self.began
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.05)
        raise AssertionError("the server was not ready in time")

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://{self.address}/v1", api_key="x", max_retries=0)


@pytest.mark.long
def test_a_killed_server_ends_streams_and_starts_warm_again():
    options = ("--max-length", "512", "--drafter", "none")
    ask = functools.partial(dict, model=MODEL, messages=[{"role": "user", "content": "Hello"}], temperature=0)
    first = Process(*options)
    try:
        first.wait_ready()
        with first.client() as client:
            whole = client.chat.completions.create(**ask(max_tokens=60)).choices[0].message.content
            stream = client.chat.completions.create(**ask(max_tokens=400, stream=True, extra_body={"ignore_eos": True}))
            next(stream)
            next(stream)
            first.process.kill()
            with pytest.raises((openai.APIError, httpx.HTTPError)):
                list(stream)
    finally:
        first.process.kill()
        first.process.wait()
    second = Process(*options)
    try:
        print(f"ready with a warm cache after {second.wait_ready():.1f} s")
        with second.client() as client:
            assert client.chat.completions.create(**ask(max_tokens=60)).choices[0].message.content == whole
            stream = client.chat.completions.create(**ask(max_tokens=60, stream=True))
            pieces = [next(stream)]
            second.process.send_signal(signal.SIGTERM)
            pieces += list(stream)  # a server that is told to end lets answers end first
            assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == whole
        assert second.process.wait(30) == 0
    finally:
        second.process.kill()
        second.process.wait()


@pytest.mark.long
def test_ten_thousand_requests_leave_nothing_behind():
    """Of the servers; the engine's own test is in test_engine."""
    engine = FakeEngine("Hello there")
    engine.requests = collections.deque(maxlen=10)  # pyright: ignore[reportAttributeAccessIssue]

    async def batch(server: Any, count: int) -> None:
        async with AtlasClient(f"127.0.0.1:{server.grpc_port}") as grpc_client, httpx.AsyncClient() as web:
            url = f"http://127.0.0.1:{server.http_port}/v1/completions"
            for i in range(count):
                if i % 5 == 0:
                    await grpc_client.complete("a", max_tokens=2)
                elif i % 5 == 1:
                    async with web.stream("POST", url, json=dict(model=MODEL, prompt="a", stream=True)) as response:
                        await anext(response.aiter_lines())  # and leaves
                else:
                    body: dict[str, Any] = dict(model=MODEL, prompt="a", max_tokens=2, n=1 + i % 2)
                    assert (await web.post(url, json=body if i % 5 > 2 else {})).status_code == (
                        200 if i % 5 > 2 else 400
                    )

    def left(server: Any) -> tuple[int, int, int]:
        end = time.monotonic() + 20
        while engine.live or len(asyncio.all_tasks(server.loop)) > 20:
            assert time.monotonic() < end, "requests were left"
            time.sleep(0.1)
        gc.collect()
        size = int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return len(asyncio.all_tasks(server.loop)), len(os.listdir("/proc/self/fd")), size

    with running(engine, max_batch=4) as server:
        asyncio.run(batch(server, 1000))
        tasks, files, size = left(server)
        asyncio.run(batch(server, 9000))
        more_tasks, more_files, more_size = left(server)
    assert more_tasks <= tasks + 2 and more_files <= files + 4
    assert more_size - size < 20 << 20, f"{(more_size - size) / 1e6:.1f} MB more after 9,000 requests"
