"""What a client may send to do harm: the server refuses it, and nobody else notices."""

import json
import logging
import socket
import threading
import time

import grpc
import pytest
from fake_engine import FakeEngine
from serving import MODEL, running, web_of

from atlas_jax.serve.faults import sendable
from atlas_jax.serve.v1 import atlas_pb2 as pb
from atlas_jax.serve.v1.atlas_pb2_grpc import AtlasStub

USER = dict(role="user", content="Hello")


@pytest.fixture(scope="module")
def engine():
    return FakeEngine()


@pytest.fixture(scope="module")
def server(engine):
    with running(engine) as servers:
        yield servers


@pytest.fixture(scope="module")
def web(server):
    with web_of(server) as web:
        yield web


@pytest.fixture(scope="module")
def stub(server):
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        yield AtlasStub(channel)


def post(web, path="/v1/completions", **body):
    """Sends what JSON can say, halves of surrogate pairs too."""
    given = {"model": MODEL} | body
    return web.post(path, content=json.dumps(given), headers={"content-type": "application/json"})


# ---- sizes -----------------------------------------------------------------------------------------------------------


def test_too_long_a_text_is_refused_unread(web, stub, engine, monkeypatch):
    tokens, longest = engine.runtime.run.max_length, engine.tokenizer.max_token_bytes
    text = "é" * (tokens * longest * 3 // 2 + 1)
    encoded = []
    monkeypatch.setattr(engine.tokenizer, "encode", lambda text: encoded.append(text) or [1])
    for path, body in (("/v1/completions", dict(prompt=text)), ("/v1/completions", dict(prompt=["a", text])),
                       ("/v1/chat/completions", dict(messages=[USER | dict(content=text)])),
                       ("/v1/completions", dict(prompt=[1] * (tokens + 1)))):  # fmt: skip
        error = post(web, path, **body).json()["error"]
        assert error["code"] == "context_length_exceeded" and f"{tokens - 1} tokens" in error["message"]
    prompts = [pb.Prompt(text=text), pb.Prompt(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=text)]))]
    for prompt in prompts:
        one = pb.GenerateRequest(prompt=prompt)
        calls = [(stub.Generate, one), (stub.GenerateBatch, pb.GenerateBatchRequest(requests=[one])),
                 (stub.Tokenize, pb.TokenizeRequest(prompt=prompt)), (stub.Score, pb.ScoreRequest(prompt=prompt))]  # fmt: skip
        for call, message in calls:
            with pytest.raises(grpc.RpcError) as found:
                got = call(message)
                list(got)
            assert found.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "bytes, more than the" in (found.value.details() or "")
    with pytest.raises(grpc.RpcError) as found:
        stub.Detokenize(pb.DetokenizeRequest(token_ids=[1] * (tokens + 1)))
    assert f"at most {tokens}" in (found.value.details() or "")
    assert encoded in ([], ["a"]), "what is refused was encoded first"


def test_the_bound_leaves_room_for_the_longest_tokens(server, engine):
    tokenizer, longest = engine.tokenizer, engine.tokenizer.max_token_bytes
    sizes = [len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)]
    assert longest == max(sizes)
    text = tokenizer.decode([sizes.index(longest)])
    assert len(server.backend.encode_text(text * 400).ids) <= engine.runtime.run.max_length  # it can be asked for
    assert server.backend.max_text >= longest * engine.runtime.run.max_length


def test_others_run_while_a_long_text_is_encoded(engine):
    text = "Hello there wörld " * 30_000
    work = threading.Thread(target=engine.tokenizer.encode, args=(text,))
    ticks = 0
    work.start()
    while work.is_alive():
        time.sleep(0.001)
        ticks += 1
    assert ticks > 5, "the encoding thread kept the interpreter to itself"


def test_too_long_a_head_is_refused(server):
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=30) as link:
        sent = 0
        try:
            link.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ")
            while sent < 16 << 20:
                sent += link.send(b"a" * 65536)
        except OSError:
            pass
        try:
            answer = link.recv(1000)
        except OSError:
            answer = b""
    assert sent < 16 << 20 or answer.startswith(b"HTTP/1.1 4"), "a long header was taken"
    assert not answer.startswith(b"HTTP/1.1 200")


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_every_error_can_be_sent(web):
    half = "\ud800"
    for path, body, status in (
        ("/v1/completions", dict(model=half, prompt="a"), 404),
        ("/v1/completions", dict(prompt=half), 400),
        ("/v1/completions", dict(prompt="a", **{half: 1}), 400),
        ("/v1/completions", dict(prompt="a", drafter=half), 400),
        ("/v1/chat/completions", dict(messages=[dict(role=half, content="")]), 400),
    ):
        response = post(web, path, **body)
        assert response.status_code == status, response.text
        assert response.json()["error"]["message"]


def test_errors_quote_little(web):
    much = "x" * 100_000
    for path, body in (("/v1/completions", dict(prompt="a", drafter=much)), ("/v1/completions", dict(prompt="a", model=much)),
                       ("/v1/completions", dict(prompt="a", **{much: 1})),
                       ("/v1/chat/completions", dict(messages=[dict(role=much, content="")]))):  # fmt: skip
        response = post(web, path, **body)
        assert response.status_code in (400, 404) and len(response.text) < 2500
    assert sendable("a\ud800b") == "a\\ud800b" and len(sendable(much)) < 1100


def test_drafters_for_measurements_are_not_offered(web):
    error = post(web, prompt="a", drafter="best").json()["error"]
    assert "none, mtp, lookup, hybrid" in error["message"] and "forced" not in error["message"]


def test_who_leaves_within_the_body_is_no_error(server, caplog):
    def left() -> float:
        return server.backend.metrics.text().decode().count('status="499"')

    with caplog.at_level(logging.INFO):
        with socket.create_connection(("127.0.0.1", server.http_port), timeout=30) as link:
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 999"
            link.sendall(head.encode() + b"\r\n\r\n{")
            time.sleep(0.2)
        end = time.monotonic() + 10
        while not left() and time.monotonic() < end:
            time.sleep(0.02)
    assert left() and not caplog.records


def test_grammars_and_tools_name_the_parameter(web):
    chat = dict(messages=[USER])
    error = post(web, "/v1/chat/completions", **chat, response_format=dict(type="regex", regex="(")).json()["error"]
    assert error["param"] == "response_format"
    tool = dict(type="function", function=dict(name="f", strict=True, parameters=dict(type="object", required=None)))
    error = post(web, "/v1/chat/completions", **chat, tools=[tool], tool_choice="required").json()["error"]
    assert error["param"] == "tools" and "required must be a list" in error["message"]
    error = post(web, "/v1/chat/completions", **chat, tools=[tool, tool]).json()["error"]
    assert error["param"] == "tools" and "two tools" in error["message"]


def test_deadlines_in_another_century(stub, engine):
    got = list(stub.Generate(pb.GenerateRequest(prompt=pb.Prompt(text="a")), timeout=1e8))
    assert got[-1].completion.completion_tokens and engine.requests[-1].deadline_s == 1e6
    assert stub.Score(pb.ScoreRequest(prompt=pb.Prompt(text="a b c")), timeout=1e8).logprobs
