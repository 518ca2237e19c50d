"""The gRPC server with real clients, in front of made-up answers."""

import asyncio
import contextlib
import pathlib
import subprocess
import sys
import time
from typing import Any

import grpc
import grpc_status.rpc_status
import pytest
from fake_engine import FakeEngine
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from serving import KEY, MODEL, certificate, running

from atlas_jax.serve.client import AtlasClient, AtlasRpcError
from atlas_jax.serve.v1 import atlas_pb2 as pb
from atlas_jax.serve.v1.atlas_pb2_grpc import AtlasStub

ROOT = pathlib.Path(__file__).resolve().parent.parent
HELLO = [{"role": "user", "content": "Hello"}]
REPLY = "Hello there, how can I help you? Ålesund 𝄞"


def answer(text: str) -> str:
    return "word " * 300 if "long" in text else REPLY


@pytest.fixture(scope="module")
def engine():
    return FakeEngine(answer)


@pytest.fixture(scope="module")
def server(engine):
    with running(engine, http=None, max_batch=8) as servers:
        yield servers


@pytest.fixture(scope="module")
def stub(server):
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        yield AtlasStub(channel)


def asked(server, work, **options):
    """Runs `work(client)` with an asynchronous client."""

    async def main():
        async with AtlasClient(f"127.0.0.1:{server.grpc_port}", **options) as client:
            return await work(client)

    return asyncio.run(main())


def wait_for(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def details(error):
    """The rich status of a failed call, by type."""
    status = grpc_status.rpc_status.from_call(error)
    kinds = [error_details_pb2.BadRequest, error_details_pb2.RetryInfo, error_details_pb2.ErrorInfo]
    out = {}
    for detail in status.details:
        for kind in kinds:
            message = kind()
            if detail.Unpack(message):
                out[kind.__name__] = message
    return out


def test_an_answer_comes_in_pieces_with_figures_in_the_last(server):
    async def work(client):
        return [p async for p in client.generate(HELLO, max_tokens=64, seed=3, logprobs=True, top_logprobs=2)]

    pieces = asked(server, work)
    assert "".join(p.text for p in pieces) == REPLY
    assert [p.HasField("completion") for p in pieces] == [False] * (len(pieces) - 1) + [True]
    done = pieces[-1].completion
    ids = [i for p in pieces for i in p.token_ids]
    assert done.completion_tokens == len(ids) == sum(len(p.logprobs) for p in pieces)
    assert done.finish_reason == pb.FINISH_REASON_STOP and done.cache.restored == 2 and done.cache.matched == 3
    assert done.prompt_tokens == done.cache.restored + done.cache.replayed
    assert [p.accepted for p in done.acceptance.positions] == [3, 2] and done.acceptance.accepted == 5
    assert pieces[0].logprobs[0].top[1].token_id == 1


def test_every_kind_of_prompt_and_option(server, engine):
    tools = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]

    async def work(client):
        await client.complete(
            "text", max_tokens=3, temperature=0.5, top_k=4, stop=["zzz"], stop_token_ids=[9], logit_bias={5: -1.5}
        )
        await client.complete([1, 2, 3], ignore_eos=True, repetition_penalty=1.25, priority=7, drafter="none")
        call = dict(id="1", function=dict(name="find", arguments='{"a": 1}'))
        talk = [
            *HELLO,
            dict(role="assistant", tool_calls=[call]),
            dict(role="tool", content="[]", tool_call_id="1"),
            *HELLO,
        ]
        return await client.complete(talk, tools=tools, enable_thinking=True)

    answer = asked(server, work)
    assert answer.text == REPLY and answer.completion.finish_reason == pb.FINISH_REASON_STOP
    text, ids, talk = engine.requests[-3:]
    assert (text.params.max_tokens, text.params.temperature, text.params.top_k, text.params.stop) == (
        3,
        0.5,
        4,
        ("zzz",),
    )
    assert text.params.logit_bias == {5: -1.5} and text.params.stop_token_ids == (9,)
    assert (
        ids.prompt.tolist() == [1, 2, 3] and ids.params.ignore_eos and ids.priority == 7 and ids.params.temperature == 0
    )
    shown = engine.tokenizer.decode(talk.prompt.tolist(), skip_special_tokens=False)
    assert (
        shown.endswith("<think>\n") and "find" in shown and "<parameter=a>\n1\n" in shown and talk.history is not None
    )


def test_batches_answer_each_when_it_is_complete(server, engine):
    async def work(client):
        return [r async for r in client.batch(["a long one", "short", "another"], max_tokens=200)]

    answers = asked(server, work)
    assert sorted(r.index for r in answers) == [0, 1, 2]
    assert {r.index: r.text for r in answers}[1] == REPLY and all(r.completion.completion_tokens for r in answers)

    async def many(client):
        return [r async for r in client.batch(["x"] * 9)]

    with pytest.raises(AtlasRpcError) as found:
        asked(server, many)
    assert found.value.fields.keys() == {"requests"}

    async def bad(client):
        return [r async for r in client.batch(["x", ""])]

    before = len(engine.requests)
    with pytest.raises(AtlasRpcError) as found:
        asked(server, bad)
    assert "requests[1]" in found.value.fields and len(engine.requests) == before


def test_tokens_scores_and_figures(server, engine):
    async def work(client):
        ids = await client.tokenize("Hello <|im_end|>")
        texts = [await client.detokenize(ids), await client.detokenize(ids, keep_special_tokens=True)]
        return ids, texts, await client.score("Hello there", 1), await client.model_info(), await client.stats()

    ids, texts, score, info, stats = asked(server, work)
    assert ids == engine.tokenizer.encode("Hello <|im_end|>") and texts == ["Hello ", "Hello <|im_end|>"]
    assert len(score.logprobs) == len(score.token_ids) - 1 and score.logprobs[0].top[0].token_id == score.token_ids[1]
    assert (
        info.name == MODEL and info.max_length == 512 and info.has_chat_template and list(info.eos_token_ids) == [8185]
    )
    assert stats.state == "running" and stats.slots == 4 and stats.acceptance.positions[1].accepted == 21
    assert stats.finished["stop"] >= 1


def test_bad_requests_name_the_field(stub):
    P, S, user = pb.Prompt, pb.Sampling, [pb.ChatMessage(role="user")]
    cases = [
        (pb.GenerateRequest(), "prompt"),
        (pb.GenerateRequest(prompt=P(text="")), ""),
        (pb.GenerateRequest(prompt=P(tokens=pb.TokenIds(ids=[99999]))), ""),
        (pb.GenerateRequest(prompt=P(text="x"), sampling=S(temperature=-1)), "sampling.temperature"),
        (pb.GenerateRequest(prompt=P(text="x"), sampling=S(temperature=float("nan"))), "sampling.temperature"),
        (pb.GenerateRequest(prompt=P(text="x"), sampling=S(max_tokens=0)), "sampling.max_tokens"),
        (pb.GenerateRequest(prompt=P(text="x"), sampling=S(max_tokens=2**32 - 1)), ""),
        (pb.GenerateRequest(prompt=P(text="x"), sampling=S(top_logprobs=3)), "sampling.top_logprobs"),
        (pb.GenerateRequest(prompt=P(text="x"), drafter="best"), "drafter"),
        (pb.GenerateRequest(prompt=P(chat=pb.Chat())), ""),
        (pb.GenerateRequest(prompt=P(chat=pb.Chat(messages=[pb.ChatMessage(role="king")]))), ""),
        (pb.GenerateRequest(prompt=P(chat=pb.Chat(messages=user, tools_json=["{"]))), "prompt.chat.tools_json[0]"),
        (pb.GenerateRequest(prompt=P(chat=pb.Chat(messages=user, tools_json=["[" * 10**5]))), "prompt.chat.tools_json[0]"),
        (pb.GenerateRequest(prompt=P(text="x"), grammar=pb.Grammar(regex="(")), "grammar"),
    ]  # fmt: skip
    for request, field in cases:
        with pytest.raises(grpc.RpcError) as found:
            list(stub.Generate(request))
        assert found.value.code() is grpc.StatusCode.INVALID_ARGUMENT, request
        (violation,) = details(found.value)["BadRequest"].field_violations
        assert violation.field == field and violation.description, request
    with pytest.raises(grpc.RpcError) as found:
        list(stub.Generate(pb.GenerateRequest(prompt=P(text="word " * 1000))))
    assert details(found.value)["ErrorInfo"].reason == "CONTEXT_LENGTH_EXCEEDED"
    with pytest.raises(grpc.RpcError) as found:
        stub.Score(pb.ScoreRequest(prompt=P(text="x"), top_logprobs=999))
    assert found.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_messages_are_bounded():
    with running(FakeEngine(), http=None, max_body_bytes=2000) as server:
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel, pytest.raises(grpc.RpcError) as found:
            AtlasStub(channel).Tokenize(pb.TokenizeRequest(prompt=pb.Prompt(text="x" * 3000)))
        assert found.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_bytes_that_are_no_message_are_refused(server):
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        call = channel.unary_unary("/atlas.v1.Atlas/Tokenize")
        for body in (b"\xff\xff\xff", b"\x0a\x04\x0a\x02\xff\xfe"):  # a broken field; text that is no UTF-8
            with pytest.raises(grpc.RpcError) as found:
                call(body)
            assert found.value.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)  # gRPC's own word
        with pytest.raises(grpc.RpcError) as found:
            channel.unary_unary("/atlas.v1.Atlas/Nothing")(b"")
        assert found.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_client_that_knows_nothing_finds_its_way_by_reflection(server):
    """As grpcurl does it."""
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {"atlas.v1.Atlas", "grpc.health.v1.Health"} <= set(database.get_services())
        pool = DescriptorPool(database)
        method = pool.FindServiceByName("atlas.v1.Atlas").FindMethodByName("Generate")
        request = GetMessageClass(method.input_type)(sampling=dict(max_tokens=4), prompt=dict(text="x"))
        reply = GetMessageClass(method.output_type)
        call = channel.unary_stream(
            "/atlas.v1.Atlas/Generate",
            request_serializer=type(request).SerializeToString,
            response_deserializer=reply.FromString,
        )
        pieces: list[Any] = list(call(request))
    assert pieces[-1].completion.completion_tokens == 4


# ---- coming and going ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def slow(**options):
    engine = FakeEngine(answer, pause_s=0.02)
    with (
        running(engine, http=None, **options) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
    ):
        yield engine, AtlasStub(channel), server


LONG = pb.GenerateRequest(prompt=pb.Prompt(text="long"), sampling=pb.Sampling(max_tokens=300))


def test_clients_that_leave_and_deadlines_cancel():
    with slow() as (engine, stub, _):
        call = stub.Generate(LONG)
        next(call)
        call.cancel()
        wait_for(lambda: not engine.live)
        with pytest.raises(grpc.RpcError) as found:
            list(stub.Generate(LONG, timeout=0.2))
        assert found.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        wait_for(lambda: not engine.live)
        limit = engine.requests[-1].deadline_s
        assert limit is not None and limit < 0.25  # the deadline of the call, which gRPC rounds up a little
        with pytest.raises(grpc.RpcError):
            list(stub.GenerateBatch(pb.GenerateBatchRequest(requests=[LONG] * 3), timeout=0.2))
        wait_for(lambda: not engine.live)


def test_a_killed_client_cancels_its_request():
    program = (
        "import sys, grpc\nfrom atlas_jax.serve.v1 import atlas_pb2 as pb\n"
        "from atlas_jax.serve.v1.atlas_pb2_grpc import AtlasStub\n"
        "for p in AtlasStub(grpc.insecure_channel(sys.argv[1])).Generate(pb.GenerateRequest(prompt=pb.Prompt(text='long'),"
        "sampling=pb.Sampling(max_tokens=300))): print(p.text, flush=True)"
    )
    with slow() as (engine, _, server):
        command = [sys.executable, "-c", program, f"127.0.0.1:{server.grpc_port}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as client:
            assert client.stdout and client.stdout.readline()
            client.kill()
        wait_for(lambda: engine.cancelled and not engine.live)


def test_failures_full_queues_and_draining():
    with slow() as (engine, stub, server):
        engine.fail_after = 2
        with pytest.raises(grpc.RpcError) as found:
            list(stub.Generate(LONG))
        assert (
            found.value.code() is grpc.StatusCode.INTERNAL and details(found.value)["ErrorInfo"].reason == "STEP_FAILED"
        )
        answers = list(stub.GenerateBatch(pb.GenerateBatchRequest(requests=[LONG, LONG])))
        assert [a.failure.code for a in answers] == [grpc.StatusCode.INTERNAL.value[0]] * 2
        engine.fail_after, engine.config = None, type(engine.config)(max_waiting=1)
        call = stub.Generate(LONG)
        next(call)
        with pytest.raises(grpc.RpcError) as found:
            list(stub.Generate(LONG))
        assert found.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details(found.value)["RetryInfo"].retry_delay.seconds == 1
        server.backend.draining = True
        with pytest.raises(grpc.RpcError) as found:
            list(stub.Generate(LONG))
        assert found.value.code() is grpc.StatusCode.UNAVAILABLE
        call.cancel()


def test_stopping_lets_answers_end():
    serving = running(FakeEngine(answer, pause_s=0.02), http=None)
    server = serving.__enter__()
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        call = AtlasStub(channel).Generate(pb.GenerateRequest(prompt=pb.Prompt(text="Hello")))
        pieces = [next(call)]
        serving.__exit__(None, None, None)
        pieces += list(call)
    assert "".join(p.text for p in pieces) == REPLY and pieces[-1].HasField("completion")


def test_a_reader_that_stops_is_given_up_and_stalls_nobody():
    reply = lambda text: "word " * 450 if "long" in text else "brief"  # noqa: E731
    engine = FakeEngine(reply, pause_s=0.001)
    with running(engine, http=None, write_timeout_s=0.5) as server:
        options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}", options) as channel:
            stub = AtlasStub(channel)
            many = pb.Sampling(max_tokens=450, logprobs=True, top_logprobs=2)
            calls = [stub.Generate(pb.GenerateRequest(prompt=pb.Prompt(text="long"), sampling=many)) for _ in range(40)]
            next(calls[0])  # and no more
            with grpc.insecure_channel(
                f"127.0.0.1:{server.grpc_port}", [("grpc.use_local_subchannel_pool", 1)]
            ) as other:
                began = time.monotonic()
                list(AtlasStub(other).Generate(pb.GenerateRequest(prompt=pb.Prompt(text="Hello"))))
                assert time.monotonic() - began < 5
            wait_for(lambda: not engine.live)
            wait_for(lambda: b"atlas_slow_readers_total 0.0" not in server.backend.metrics.text())
            for call in calls:
                call.cancel()


# ---- keys, TLS, health -----------------------------------------------------------------------------------------------


def test_keys_and_tls(tmp_path):
    cert, key = certificate(tmp_path)
    reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    roots = grpc.ssl_channel_credentials(pathlib.Path(cert).read_bytes())
    with running(FakeEngine(answer), http=None, keys=(KEY,), tls_cert=cert, tls_key=key) as server:
        address = f"localhost:{server.grpc_port}"
        with grpc.secure_channel(address, roots) as channel:
            stub = AtlasStub(channel)
            bad = [
                (),
                (("authorization", KEY),),
                (("authorization", f"Bearer {KEY}x"),),
                (("x-authorization", f"Bearer {KEY}"),),
            ]
            for metadata in bad:
                for call in (
                    lambda m: stub.ModelInfo(pb.ModelInfoRequest(), metadata=m),
                    lambda m: list(stub.Generate(LONG, metadata=m)),
                    lambda m: channel.unary_unary("/atlas.v1.Atlas/Nothing")(b"", metadata=m),
                    lambda m: list(channel.stream_stream(reflection)(iter([b""]), metadata=m)),
                ):
                    with pytest.raises(grpc.RpcError) as found:
                        call(metadata)
                    assert found.value.code() is grpc.StatusCode.UNAUTHENTICATED
            checker: Any = health_pb2_grpc.HealthStub(channel)
            health = checker.Check(health_pb2.HealthCheckRequest(service="atlas.v1.Atlas"))
            assert health.status == health_pb2.HealthCheckResponse.SERVING

        async def main():
            async with AtlasClient(address, key=KEY, tls=cert) as client:
                return (await client.complete("Hello")).text

        assert asyncio.run(main()) == REPLY
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError):
            AtlasStub(channel).ModelInfo(pb.ModelInfoRequest(), timeout=2)


def test_health_before_the_model_is_there_and_while_draining():
    with running(None, http=None) as server, grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        assert stub.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.RpcError) as found:
            AtlasStub(channel).ModelInfo(pb.ModelInfoRequest())
        assert found.value.code() is grpc.StatusCode.UNAVAILABLE
        assert details(found.value)["RetryInfo"].retry_delay.seconds > 0


# ---- stubs and the example -------------------------------------------------------------------------------------------


def test_the_stubs_are_those_of_the_proto(tmp_path):
    protoc = pytest.importorskip("grpc_tools.protoc")
    source = "atlas_jax/serve/v1/atlas.proto"
    out = [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    assert protoc.main(["protoc", f"-I{ROOT}", *out, source]) == 0
    for made in sorted((tmp_path / source).parent.iterdir()):
        committed = ROOT / pathlib.PurePath(source).parent / made.name
        assert committed.read_text() == made.read_text(), f"{made.name} is not what the proto gives: run make stubs"


def test_the_example_runs(server, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import grpc_client  # pyright: ignore[reportMissingImports]

    asyncio.run(grpc_client.main(f"127.0.0.1:{server.grpc_port}"))
    assert REPLY in capsys.readouterr().out
    lines = [line for line in (ROOT / "examples" / "grpc_client.py").read_text().splitlines() if line.strip()]
    assert len(lines) <= 20
