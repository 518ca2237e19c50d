"""The HTTP server with real clients, in front of made-up answers."""

import contextlib
import json
import logging
import socket
import ssl
import subprocess
import time
from typing import Any

import httpx
import openai
import pytest
from fake_engine import FakeEngine
from serving import KEY, MODEL, certificate, running, web_of

from atlas_jax.engine.api import Grammar


@contextlib.contextmanager
def client_of(server, key="none", scheme="http", **options):
    address = f"{scheme}://localhost:{server.http_port}/v1"
    with openai.OpenAI(base_url=address, api_key=key, max_retries=0, **options) as client:
        yield client


HELLO = [{"role": "user", "content": "Hello"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "count": {"type": "integer"}}},
            "strict": True,
        },
    }
]
CALL = """<tool_call>
<function=find>
<parameter=city>
Ålesund
</parameter>
<parameter=count>
3
</parameter>
</function>
</tool_call>"""


def answer(text: str) -> str:
    """By what the last message asks for."""
    question = text.rpartition("<|im_start|>user\n")[2]
    if "<tool_call>\n" in question:  # forced
        return CALL.removeprefix("<tool_call>\n<function=find>\n") if "<function=find>" in question else CALL[12:]
    if "long" in question:
        return "word " * 300
    if "two calls" in question:
        return f"Both.\n\n{CALL}\n{CALL}"
    if "call" in question:
        return f"One moment.\n\n{CALL}"
    if question.rstrip().endswith("<think>"):
        return "I think so.\n</think>\n\nYes."
    return "Hello there, how can I help you today?"


@pytest.fixture(scope="module")
def engine():
    return FakeEngine(answer)


@pytest.fixture(scope="module")
def server(engine):
    with running(engine, grpc=None) as servers:
        yield servers


@pytest.fixture(scope="module")
def client(server):
    with client_of(server) as client:
        yield client


@pytest.fixture(scope="module")
def web(server):
    with web_of(server) as web:
        yield web


def chat(client: Any, content: Any = "Hello", **options: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": content}], **options)


def refused(web, path="/v1/chat/completions", **body):
    """The error of a request that the server must refuse."""
    body = {"model": MODEL} | ({"messages": HELLO} if "chat" in path else {"prompt": "a"}) | body
    response = web.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    return error


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_a_chat(client):
    got = chat(client, max_tokens=64, temperature=0, seed=1)
    choice = got.choices[0]
    assert choice.message.content == "Hello there, how can I help you today?"
    assert choice.message.role == "assistant" and choice.finish_reason == "stop" and choice.message.tool_calls is None
    usage = got.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens and usage.completion_tokens > 5
    prompt = usage.prompt_tokens_details
    assert prompt.cached_tokens == 2 and prompt.replayed_tokens == usage.prompt_tokens - 2
    assert prompt.matched_tokens >= 2 and 0 <= prompt.granularity_share <= 1
    assert usage.completion_tokens_details.accepted_prediction_tokens == 5
    assert got.id.startswith("chatcmpl-") and got.model == MODEL


def test_a_streamed_chat(client):
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Hello there, how can I help you today?"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens > 5
    assert all(c.usage is None for c in chunks[:-1]) and len({c.id for c in chunks}) == 1
    assert all(c.usage is None for c in chat(client, stream=True))


def test_length_and_stop(client):
    assert chat(client, max_completion_tokens=2).choices[0].finish_reason == "length"
    got = chat(client, stop=["how"]).choices[0]
    assert got.message.content == "Hello there, " and got.finish_reason == "stop"


def test_thinking_is_told_apart(client, engine):
    for options in ({"reasoning_effort": "low"}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}):
        message = chat(client, **options).choices[0].message
        assert message.content == "Yes." and message.reasoning_content == "I think so."
    got = chat(client, reasoning_effort="high")
    assert 0 < got.usage.completion_tokens_details.reasoning_tokens < got.usage.completion_tokens
    chunks = list(chat(client, reasoning_effort="high", stream=True))
    deltas = [c.choices[0].delta for c in chunks]
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "I think so."
    assert "".join(d.content or "" for d in deltas) == "Yes."
    assert chat(client, reasoning_effort="none").choices[0].message.content.startswith("Hello")


def test_tool_calls(client):
    got = chat(client, "call", tools=TOOLS).choices[0]
    assert got.finish_reason == "tool_calls" and got.message.content == "One moment."
    (call,) = got.message.tool_calls
    assert call.function.name == "find" and json.loads(call.function.arguments) == {"city": "Ålesund", "count": 3}
    assert call.id.startswith("call_")
    assert chat(client, "call").choices[0].message.content == f"One moment.\n\n{CALL}"  # none were offered
    assert chat(client, "call", tools=TOOLS, tool_choice="none").choices[0].finish_reason == "stop"


def test_streamed_tool_calls_by_the_clients_own_accumulator(client):
    with client.chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": "two calls"}], tools=TOOLS
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.done" in kinds
    assert [json.loads(c.function.arguments)["count"] for c in final.message.tool_calls] == [3, 3]
    assert final.finish_reason == "tool_calls" and final.message.content == "Both."


def test_one_call_at_a_time(client, engine):
    got = chat(client, "two calls", tools=TOOLS, parallel_tool_calls=False)
    assert len(got.choices[0].message.tool_calls) == 1 and got.choices[0].finish_reason == "tool_calls"
    assert got.usage.completion_tokens > 0
    chunks = list(chat(client, "two calls", tools=TOOLS, parallel_tool_calls=False, stream=True))
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_forced_calls(client, web, engine):
    function = TOOLS[0]["function"]
    loose: Any = [{"type": "function", "function": function | {"strict": False}}]
    parameters = {"type": "object", "properties": {"city": {"type": "string", "pattern": "[A-Z].*"}}}
    patterned = [{"type": "function", "function": function | {"parameters": parameters}}]
    for choice in ("required", {"type": "function", "function": {"name": "find"}}):
        got = chat(client, "Hello", tools=TOOLS, tool_choice=choice).choices[0]
        assert got.message.content is None and got.finish_reason == "tool_calls"
        assert json.loads(got.message.tool_calls[0].function.arguments)["city"] == "Ålesund"
        grammar = engine.requests[-1].grammar
        assert grammar is not None and grammar.kind == "tool_call"  # since it is strict
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=HELLO, tools=TOOLS, tool_choice=choice
        )
        assert "x-atlas-ignored" not in raw.headers
        chat(client, "Hello", tools=loose, tool_choice=choice)
        assert engine.requests[-1].grammar is None
    found = refused(web, tools=patterned, tool_choice="required")
    assert found["param"] == "tools" and "parameter 'city' is written as raw text" in found["message"]
    error = refused(web, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "lose"}})
    assert error["param"] == "tool_choice"
    assert refused(web, tools=TOOLS, tool_choice="required", reasoning_effort="high")["param"] == "reasoning_effort"


def test_a_conversation_with_tools_goes_back_in(client):
    message = chat(client, "call", tools=TOOLS).choices[0].message
    history = [{"role": "user", "content": "call"}, message, {"role": "tool", "tool_call_id": "x", "content": "[]"}]
    got = client.chat.completions.create(model=MODEL, messages=[*history, *HELLO], tools=TOOLS)
    assert got.choices[0].message.content.startswith("Hello")


def test_several_choices(client, engine):
    got = chat(client, n=3, seed=5)
    assert [c.index for c in got.choices] == [0, 1, 2] and len({c.message.content for c in got.choices}) == 1
    assert got.usage.completion_tokens == 3 * chat(client, seed=5).usage.completion_tokens
    assert [r.params.seed for r in engine.requests[-4:-1]] == [5, 6, 7]
    chunks = list(chat(client, n=2, stream=True))
    assert {c.choices[0].index for c in chunks} == {0, 1}


def test_chat_logprobs(client):
    got = chat(client, logprobs=True, top_logprobs=2).choices[0]
    entries = got.logprobs.content
    assert b"".join(bytes(e.bytes) for e in entries).decode() == got.message.content
    assert entries[0].logprob == -0.25 and [t.logprob for t in entries[0].top_logprobs] == [-0.25, -2.0]
    chunks = chat(client, logprobs=True, stream=True)
    assert sum(len(c.choices[0].logprobs.content) for c in chunks if c.choices[0].logprobs) == len(entries)


def test_completions(client, web):
    got = client.completions.create(model=MODEL, prompt="abc", logprobs=1, max_tokens=100)
    assert got.choices[0].text == "Hello there, how can I help you today?"
    logged = got.choices[0].logprobs
    assert (
        "".join(logged.tokens) == got.choices[0].text
        and logged.text_offset[0] == 0
        and logged.token_logprobs[0] == -0.25
    )
    got = client.completions.create(model=MODEL, prompt=[[1, 2], [3, 4]], n=2, max_tokens=1)
    assert len(got.choices) == 4 and got.choices[3].finish_reason == "length" and got.usage.completion_tokens == 4
    assert got.usage.prompt_tokens == 4
    text = "".join(
        c.choices[0].text for c in client.completions.create(model=MODEL, prompt="abc", stream=True, max_tokens=99)
    )
    assert text == "Hello there, how can I help you today?"
    got = client.completions.create(model=MODEL, prompt="abc def", echo=True, logprobs=1, max_tokens=1)
    logged = got.choices[0].logprobs
    assert got.choices[0].text.startswith("abc def") and logged.token_logprobs[0] is None
    assert len(logged.tokens) == len(logged.token_logprobs) == len(logged.top_logprobs)


def test_defaults_are_the_models_and_openais(client, engine):
    chat(client)
    params = engine.requests[-1].params
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 0.95)  # tiny-agent's generation_config.json
    assert params.max_tokens > 400 and engine.requests[-1].history is not None
    client.completions.create(model=MODEL, prompt="a")
    assert engine.requests[-1].params.max_tokens == 16


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_bad_fields_are_named(web):
    cases = [
        (dict(temperature=-1), "temperature"),
        (dict(temperature="hot"), "temperature"),
        (dict(top_p=0), "top_p"),
        (dict(max_tokens=0), "max_tokens"),
        (dict(max_tokens=-5), "max_tokens"),
        (dict(n=0), "n"),
        (dict(n=10**9), "n"),
        (dict(n=True), "n"),
        (dict(messages=[]), "messages"),
        (dict(messages="hi"), "messages"),
        (dict(messages=[{"role": "king", "content": "x"}]), None),
        (dict(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]), None),
        (dict(stop=["x"] * 99), "stop"),
        (dict(logit_bias={"x": 1}), "logit_bias"),
        (dict(logit_bias={"99999": 1}), "logit_bias"),
        (dict(seed=2**70), "seed"),
        (dict(top_logprobs=3), "top_logprobs"),
        (dict(logprobs=True, top_logprobs=21), "top_logprobs"),
        (dict(stream_options={"include_usage": True}), "stream_options"),
        (dict(tool_choice="required"), "tool_choice"),
        (dict(tools=[{"type": "function", "function": {"name": "a b"}}]), "tools[0].function.name"),
        (dict(max_tokens=2, max_completion_tokens=2), "max_tokens"),
        (dict(modalities=["audio"]), "modalities[0]"),
        (dict(response_format={"type": "xml"}), "response_format.type"),
        (dict(response_format={"type": "json_schema"}), "response_format.json_schema"),
        (dict(response_format={"type": "json_object"}, tools=TOOLS), "response_format"),
        (dict(deadline_s=-1), "deadline_s"),
        (dict(drafter="best"), "drafter"),
        (dict(priority=10**9), "priority"),
    ]
    for body, field in cases:
        assert refused(web, **body)["param"] == field, body


def test_unknown_and_missing_parameters_are_refused_in_openais_words(web, client):
    error = refused(web, audio={"voice": "x"})
    assert error == dict(
        message="Unknown parameter: 'audio'.", type="invalid_request_error", param="audio", code="unknown_parameter"
    )
    response = web.post("/v1/chat/completions", json={"model": MODEL})
    assert response.json()["error"]["code"] == "missing_required_parameter"
    with pytest.raises(openai.NotFoundError) as found:
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    assert found.value.code == "model_not_found"
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert refused(web, path, functions=[])["code"] == "unknown_parameter"
    assert refused(web, "/v1/completions", suffix="x")["param"] == "suffix"
    assert refused(web, "/v1/completions", best_of=5)["param"] == "best_of"


def test_grammars_reach_the_engine(web, client, engine):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = [
        ({"type": "json_object"}, Grammar("json_object")),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
            Grammar("json_schema", json.dumps(schema)),
        ),
        ({"type": "regex", "regex": "(a+)+b"}, Grammar("regex", "(a+)+b")),
        ({"type": "text"}, None),
    ]
    for given, grammar in wanted:
        chat(client, response_format=given)
        assert engine.requests[-1].grammar == grammar
    chat(client, response_format={"type": "json_object"}, tools=TOOLS, tool_choice="none")
    assert "unclosed" in refused(web, response_format={"type": "regex", "regex": "("})["message"]
    assert refused(web, response_format={"type": "regex", "regex": "a" * 10**5})["param"] == "response_format"
    assert refused(web, response_format={"type": "json_object"}, reasoning_effort="high")["param"] == "reasoning_effort"
    deep: Any = {}
    for _ in range(80):
        deep = {"properties": {"a": deep}}
    refused(web, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": deep}})


def test_what_has_no_effect_is_named(client):
    got = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=HELLO, tools=TOOLS, user="me", store=True, metadata={"a": "b"}, service_tier="auto"
    )
    assert got.headers["x-atlas-ignored"] == "metadata, service_tier, store, user, tools[0].function.strict"
    schema: Any = {"name": "x", "description": "A place.", "schema": {"type": "object"}}
    got = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=HELLO, response_format={"type": "json_schema", "json_schema": schema}, stream=True,
        stream_options={"include_obfuscation": True})  # fmt: skip
    told = "stream_options.include_obfuscation, response_format.json_schema.description"
    assert got.headers["x-atlas-ignored"] == told
    assert (
        "x-atlas-ignored" not in client.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO).headers
    )


def test_the_context_is_finite(client):
    for options in (dict(max_tokens=10**6), dict(max_tokens=2**40)):
        with pytest.raises(openai.BadRequestError) as found:
            chat(client, **options)
        assert found.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as found:
        chat(client, "word " * 1000)
    assert found.value.code == "context_length_exceeded" and "512" not in str(found.value.body).replace("512", "", 1)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt="")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt=[-1])
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt=[2**40])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"model": "\xff\xfe"}',
        b'{"model": NaN}',
        b'{"model": ' + b"9" * 10_000 + b"}",
        b"[" * 100_000,
        b'{"model": "tiny-agent", "messages": ' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"model": "tiny-agent", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "tiny-agent", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
        json.dumps({"model": MODEL, "messages": HELLO, "tools": [None], "n": -1}).encode(),
    ],
)  # fmt: skip
def test_malformed_bodies(web, body):
    response = web.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["message"]


def test_other_refusals(web):
    assert web.get("/v1/nothing").json()["error"]["type"] == "invalid_request_error"
    assert web.get("/v1/nothing").status_code == 404 and web.get("/v1/chat/completions").status_code == 405
    plain = web.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert plain.status_code == 415
    # a web page that has made its own name point here is not let in
    assert web.get("/v1/models", headers={"host": "evil.example"}).status_code == 421
    assert web.get("/v1/models", headers={"host": "localhost:8000"}).status_code == 200


def test_bodies_are_bounded():
    with running(FakeEngine(), grpc=None, max_body_bytes=2000) as server, web_of(server) as web:
        json_type = {"content-type": "application/json"}
        whole = web.post("/v1/completions", content=b"x" * 3000, headers=json_type)
        pieces = web.post("/v1/completions", content=(b"x" * 500 for _ in range(6)), headers=json_type)
        for response in (whole, pieces):
            assert response.status_code == 413 and response.json()["error"]["code"] == "request_too_large"


# ---- keys, TLS -------------------------------------------------------------------------------------------------------


def test_keys(tmp_path):
    cert, key = certificate(tmp_path)
    trust = ssl.create_default_context(cafile=cert)
    bad = [
        None,
        "",
        KEY,
        f"Basic {KEY}",
        f"Bearer {KEY[:-1]}",
        f"Bearer {KEY}3",
        "Bearer",
        f"Bearer {KEY},{KEY}",
    ]
    paths = ["/v1/models", "/metrics", "/stats", "/v1/../v1/models", "//v1/models", "/V1/models", "/health/../metrics"]
    options = dict(grpc=None, keys=(KEY, KEY + "2"), tls_cert=cert, tls_key=key)
    with running(FakeEngine(answer), **options) as server, web_of(server, "https", verify=trust) as web:
        for value in bad:
            headers = {} if value is None else {"authorization": value}
            for path in paths:
                assert web.get(path, headers=headers).status_code == 401, (path, value)
            assert web.post("/v1/completions", json={}, headers=headers).status_code == 401
        for good in (KEY, KEY + "2"):
            assert web.get("/v1/models", headers={"authorization": f"Bearer {good}"}).status_code == 200
        assert web.get("/health").status_code == 200 and web.get("/").status_code == 200
        assert KEY not in web.get("/openapi.json").text
        with client_of(server, KEY, "https", http_client=httpx.Client(verify=trust)) as client:
            assert chat(client).choices[0].message.content
        stranger = client_of(server, "wrong", "https", http_client=httpx.Client(verify=trust))
        with stranger as client, pytest.raises(openai.AuthenticationError):
            chat(client)


# ---- coming and going ------------------------------------------------------------------------------------------------


def wait_for(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@contextlib.contextmanager
def slow(**options):
    engine = FakeEngine(answer, pause_s=0.02)
    with running(engine, grpc=None, **options) as server:
        yield (
            engine,
            openai.OpenAI(base_url=f"http://127.0.0.1:{server.http_port}/v1", api_key="x", max_retries=0),
            server,
        )


def test_clients_that_leave_cancel_their_requests():
    with slow() as (engine, client, server):
        stream = chat(client, "long", stream=True)
        next(stream)
        stream.close()
        wait_for(lambda: not engine.live)
        with pytest.raises(openai.APITimeoutError):
            chat(client.with_options(timeout=0.2), "long")
        wait_for(lambda: not engine.live)
        with pytest.raises(openai.APITimeoutError):
            chat(client.with_options(timeout=0.2), "long", n=3)
        wait_for(lambda: not engine.live)
        assert len(engine.cancelled) == 5
        text = httpx.get(f"http://127.0.0.1:{server.http_port}/metrics").text
        assert 'atlas_requests_total{outcome="disconnected"} 5.0' in text


def test_a_killed_client_cancels_its_request():
    with slow() as (engine, _, server):
        body = json.dumps(dict(model=MODEL, messages=[{"role": "user", "content": "long"}], stream=True))
        address = f"http://127.0.0.1:{server.http_port}/v1/chat/completions"
        command = ["curl", "-sN", address, "-H", "content-type: application/json", "-d", body]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as curl:
            assert curl.stdout and curl.stdout.readline().startswith(b"data: ")
            curl.kill()
        wait_for(lambda: engine.cancelled and not engine.live)


def test_deadlines_and_failures_end_a_stream_with_an_error():
    with slow(request_timeout_s=0.15) as (engine, client, _):
        with pytest.raises(openai.APIStatusError) as found:
            chat(client, "long")
        assert found.value.status_code == 504 and found.value.code == "deadline_exceeded"
        with pytest.raises(openai.APIError, match="deadline"):
            list(chat(client, "long", stream=True))
        engine.fail_after = 2
        with pytest.raises(openai.InternalServerError, match="step failed"):
            chat(client, "Hello")
        with pytest.raises(openai.APIError, match="step failed"):
            list(chat(client, stream=True))


def test_a_full_queue_and_a_draining_server_refuse_at_once():
    with slow() as (engine, client, server):
        engine.config = type(engine.config)(max_waiting=1)
        stream = chat(client, "long", stream=True)
        next(stream)
        for options in (dict(), dict(stream=True)):
            with pytest.raises(openai.InternalServerError) as found:
                chat(client, **options)
            assert found.value.status_code == 503 and found.value.code == "engine_overloaded"
            assert found.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.InternalServerError):
            chat(client, n=3)
        server.backend.draining = True
        with pytest.raises(openai.InternalServerError) as found:
            chat(client)
        assert found.value.code == "shutting_down"
        with web_of(server) as web:
            assert web.get("/ready").status_code == 503 and web.get("/health").json() == {"status": "draining"}
        stream.close()


def test_before_the_model_is_there():
    with running(None, grpc=None) as server, web_of(server) as web:
        assert web.get("/health").status_code == 200 and web.get("/ready").status_code == 503
        assert "atlas_ready 0.0" in web.get("/metrics").text and web.get("/").status_code == 200
        for response in (
            web.get("/v1/models"),
            web.get("/stats"),
            web.post("/v1/completions", json=dict(model=MODEL, prompt="a")),
        ):
            assert response.status_code == 503 and response.json()["error"]["code"] == "not_ready"


def test_a_reader_that_stops_is_given_up_and_stalls_nobody():
    engine = FakeEngine(lambda text: "word " * (400 if "long" in text else 3))
    engine.tokenizer.token_bytes = lambda token_id: b"x" * 3000  # makes each chunk of log-probabilities large
    with running(engine, grpc=None, write_timeout_s=0.5) as server, client_of(server) as client, web_of(server) as web:
        body = json.dumps(
            dict(
                model=MODEL, messages=[{"role": "user", "content": "long"}], stream=True, logprobs=True, top_logprobs=2
            )
        ).encode()
        reader = socket.socket()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", server.http_port))
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += b"Content-Length: %d\r\n\r\n"
        reader.sendall(head % len(body) + body)
        assert reader.recv(15) == b"HTTP/1.1 200 OK"
        for _ in range(3):
            began = time.monotonic()
            chat(client)
            assert time.monotonic() - began < 5
        wait_for(lambda: "atlas_slow_readers_total 1.0" in web.get("/metrics").text)
        reader.close()


# ---- figures ---------------------------------------------------------------------------------------------------------


def test_figures(web, client):
    chat(client)
    text = web.get("/metrics").text
    for line in (
        "atlas_ready 1.0",
        'atlas_drafts_accepted_total{position="2"} 21.0',
        "atlas_slots 4.0",
        "atlas_cache_matched_tokens_total 6.0",
        "atlas_cache_restored_tokens_total 5.0",
        "atlas_cache_replayed_tokens_total 5.0",
        "atlas_cache_granularity_share 0.2",
        'atlas_source_drafts_accepted_total{source="',
        "atlas_tokens_total",
    ):
        assert line in text, line
    assert 'atlas_responses_total{method="/v1/chat/completions",server="http",status="200"}' in text
    assert "atlas_time_to_first_token_seconds_bucket" in text
    figures = web.get("/stats").json()
    assert figures["model"] == MODEL and figures["acceptance"]["positions"][0]["draft"] == 1
    page = web.get("/")
    assert (
        page.headers["content-type"].startswith("text/html")
        and "default-src 'none'" in page.headers["content-security-policy"]
    )
    assert web.get("/openapi.json").json()["openapi"] == "3.1.0"


def test_nothing_that_a_user_typed_is_logged(caplog, monkeypatch):
    secret, engine = "my secret words", FakeEngine()
    with caplog.at_level("DEBUG"), running(engine, grpc=None) as server, client_of(server) as client:
        caplog.clear()
        chat(client, secret)

        def fail(request: Any) -> None:
            raise ValueError(engine.tokenizer.decode(request.prompt.tolist()))

        monkeypatch.setattr(engine, "submit", fail)
        with pytest.raises(openai.InternalServerError) as found:
            chat(client, secret)
        assert found.value.code == "internal_error" and secret not in str(found.value)
    mine = [r for r in caplog.records if r.name.split(".")[0] not in ("openai", "httpx", "httpcore")]
    logged = "\n".join(map(logging.Formatter().format, mine))  # with tracebacks
    assert secret not in logged and "unexpected ValueError" in logged
