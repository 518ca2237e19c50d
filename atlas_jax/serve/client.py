"""An asynchronous client of the gRPC server.

async with AtlasClient("127.0.0.1:50051") as client:
    async for piece in client.generate("Once upon a time", max_tokens=64):
        print(piece.text, end="")
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2

from atlas_jax.serve.v1 import atlas_pb2 as pb
from atlas_jax.serve.v1.atlas_pb2_grpc import AtlasStub

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
_OPTIONS = frozenset(pb.Sampling.DESCRIPTOR.fields_by_name)


class AtlasRpcError(Exception):
    """A call that failed.

    Attributes:
        code: the gRPC status.
        fields: what is wrong with which field of the request, where that was the reason.
        reason: a word for programs, such as CONTEXT_LENGTH_EXCEEDED.
        retry_s: when to try again; None if that does not help.
    """

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        super().__init__(f"{error.code().name}: {error.details()}")
        self.code = error.code()
        self.fields: dict[str, str] = {}
        self.reason = ""
        self.retry_s: float | None = None
        for key, value in error.trailing_metadata() or ():
            if key == "grpc-status-details-bin" and isinstance(value, bytes):
                self._read(status_pb2.Status.FromString(value))

    def _read(self, status: status_pb2.Status) -> None:
        for detail in status.details:
            bad, info, retry = (
                error_details_pb2.BadRequest(),
                error_details_pb2.ErrorInfo(),
                error_details_pb2.RetryInfo(),
            )
            if detail.Unpack(bad):
                self.fields |= {violation.field: violation.description for violation in bad.field_violations}
            elif detail.Unpack(info):
                self.reason = info.reason
            elif detail.Unpack(retry):
                self.retry_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9


@dataclasses.dataclass(frozen=True)
class Answer:
    """A whole answer; `completion` has its figures."""

    token_ids: list[int]
    text: str
    logprobs: list[pb.TokenLogprob]
    completion: pb.Completion


class AtlasClient:
    """One connection, for any number of calls at a time.

    Args:
        address: "HOST:PORT".
        key: the token, where the server asks for one.
        tls: True for the machine's own authorities, or a PEM file with others.
        timeout_s: of a call that names none; it travels to the server, which ends the request then.
    """

    def __init__(
        self,
        address: str,
        *,
        key: str | None = None,
        tls: bool | str | pathlib.Path = False,
        timeout_s: float | None = None,
    ) -> None:
        self._metadata = (("authorization", f"Bearer {key}"),) if key else ()
        self._timeout_s = timeout_s
        options = [("grpc.max_receive_message_length", -1), ("grpc.keepalive_time_ms", 30_000)]
        if tls:
            roots = None if tls is True else pathlib.Path(tls).read_bytes()
            self._channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(roots), options)
        else:
            self._channel = grpc.aio.insecure_channel(address, options)
        self.stub: Any = AtlasStub(self._channel)

    async def __aenter__(self) -> AtlasClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def generate(self, prompt: Prompt, **options: Any) -> AsyncIterator[pb.GenerateResponse]:
        """Pieces of an answer; the last one has the completion. Leaving the loop cancels the request.

        Args:
            prompt: text, token ids, or chat messages.
            **options: fields of the proto's Sampling (max_tokens, temperature, seed, stop …), and drafter, drafts (a number or
                "auto"), priority, tools, enable_thinking, timeout_s.

        Raises:
            AtlasRpcError: the server refused or ended the request.
        """
        timeout_s = options.pop("timeout_s", self._timeout_s)
        call = self.stub.Generate(generate_request(prompt, **options), timeout=timeout_s, metadata=self._metadata)
        try:
            async for piece in call:
                yield piece
        except grpc.aio.AioRpcError as error:
            raise AtlasRpcError(error) from None
        finally:
            call.cancel()

    async def complete(self, prompt: Prompt, **options: Any) -> Answer:
        """`generate`, collected."""
        ids, text, logprobs, completion = [], [], [], None
        async for piece in self.generate(prompt, **options):
            ids += piece.token_ids
            text.append(piece.text)
            logprobs += piece.logprobs
            completion = piece.completion if piece.HasField("completion") else completion
        assert completion is not None, "an answer ends with a completion or an error"
        return Answer(ids, "".join(text), logprobs, completion)

    async def batch(self, prompts: Sequence[Prompt], **options: Any) -> AsyncIterator[pb.GenerateBatchResponse]:
        """Answers to several prompts, each when it is complete; `index` says whose it is, `failure` if it failed."""
        timeout_s = options.pop("timeout_s", self._timeout_s)
        request = pb.GenerateBatchRequest(requests=[generate_request(prompt, **options) for prompt in prompts])
        call = self.stub.GenerateBatch(request, timeout=timeout_s, metadata=self._metadata)
        try:
            async for answer in call:
                yield answer
        except grpc.aio.AioRpcError as error:
            raise AtlasRpcError(error) from None
        finally:
            call.cancel()

    async def tokenize(self, prompt: Prompt, **chat: Any) -> list[int]:
        return list((await self._call("Tokenize", pb.TokenizeRequest(prompt=_prompt(prompt, **chat)))).token_ids)

    async def detokenize(self, token_ids: Sequence[int], keep_special_tokens: bool = False) -> str:
        request = pb.DetokenizeRequest(token_ids=token_ids, keep_special_tokens=keep_special_tokens)
        return (await self._call("Detokenize", request)).text

    async def score(self, prompt: Prompt, top_logprobs: int = 0) -> pb.ScoreResponse:
        """Log-probabilities of the prompt's tokens after the first."""
        return await self._call("Score", pb.ScoreRequest(prompt=_prompt(prompt), top_logprobs=top_logprobs))

    async def model_info(self) -> pb.ModelInfoResponse:
        return await self._call("ModelInfo", pb.ModelInfoRequest())

    async def stats(self) -> pb.StatsResponse:
        return await self._call("Stats", pb.StatsRequest())

    async def _call(self, method: str, request: Any) -> Any:
        try:
            return await getattr(self.stub, method)(request, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise AtlasRpcError(error) from None


def generate_request(prompt: Prompt, **options: Any) -> pb.GenerateRequest:
    """Raises TypeError for an option that there is not."""
    chat = {name: options.pop(name) for name in ("tools", "enable_thinking") if name in options}
    sampling = {name: options.pop(name) for name in list(options) if name in _OPTIONS}
    drafts = options.pop("drafts", None)
    drafting: dict[str, Any] = (
        {} if drafts is None else dict(auto_drafts=True) if drafts == "auto" else dict(drafts=drafts)
    )
    kept = {name: options.pop(name) for name in ("drafter", "priority", "grammar") if name in options}
    if options:
        raise TypeError(f"unknown option {', '.join(options)}")
    return pb.GenerateRequest(prompt=_prompt(prompt, **chat), sampling=pb.Sampling(**sampling), **kept, **drafting)


def _prompt(prompt: Prompt, tools: Sequence[Any] = (), enable_thinking: bool | None = None) -> pb.Prompt:
    if isinstance(prompt, str):
        return pb.Prompt(text=prompt)
    if len(prompt) and isinstance(prompt[0], Mapping):
        messages: Any = prompt
        chat = pb.Chat(
            messages=[_message(message) for message in messages],
            tools_json=[json.dumps(tool) for tool in tools],
            enable_thinking=enable_thinking,
        )
        return pb.Prompt(chat=chat)
    ids: Any = prompt
    return pb.Prompt(tokens=pb.TokenIds(ids=ids))


def _message(message: Mapping[str, Any]) -> pb.ChatMessage:
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments", "{}")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        calls.append(pb.ToolCall(id=call.get("id", ""), name=function["name"], arguments_json=text))
    names = ("role", "content", "reasoning_content", "tool_call_id")
    return pb.ChatMessage(**{name: message[name] for name in names if message.get(name) is not None}, tool_calls=calls)
