"""/v1/chat/completions."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from atlas_jax.completion import Completion, Delta
from atlas_jax.engine.api import GenerationRequest, Grammar
from atlas_jax.engine.tool_grammar import tool_call_source
from atlas_jax.errors import RequestError
from atlas_jax.serve.answer_parser import (
    AnswerParser,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
    joined,
)
from atlas_jax.serve.backend import Answering, Backend, EncodedPrompt
from atlas_jax.serve.faults import FieldError
from atlas_jax.serve.http.bodies import parse
from atlas_jax.serve.http.choices import Usage, closing, merged, submit_all
from atlas_jax.serve.http.events import EventStream, event, unless_gone
from atlas_jax.serve.http.logprobs import chat_logprobs
from atlas_jax.serve.http.schema import ChatRequest, ChosenTool, Tool
from atlas_jax.serve.http.shared import check_common, ignored

MAX_GRAMMAR = 64 << 10  # characters of a schema or an expression


async def chat_completions(request: Request) -> Response | EventStream:
    backend: Backend = request.app.state.backend
    body = parse(await request.body(), ChatRequest)
    plan = await asyncio.to_thread(plan_chat, backend, body)
    answers = await submit_all(backend, plan.requests)
    head = dict(id=f"chatcmpl-{secrets.token_hex(12)}", created=int(time.time()), model=backend.config.name)
    strict = [f"tools[{i}].function.strict" for i, tool in enumerate(body.tools or []) if tool.function.strict]
    described = (
        body.response_format and body.response_format.json_schema and body.response_format.json_schema.description
    )
    told = ["response_format.json_schema.description"] if described else []
    headers = ignored(body, told + ([] if plan.strict else strict))
    if body.stream:
        return EventStream(_streamed(plan, answers, body, head), backend, headers, answers)
    with closing(answers):
        content = await unless_gone(request.receive, _collected(plan, answers, head))
    return JSONResponse(content, headers=headers)


@dataclasses.dataclass(frozen=True)
class ChatPlan:
    """Attributes:
    requests: one a choice.
    tools: parameter schemas by name; None where calls are plain text.
    prefix: what the answer was made to begin with.
    one_call: whether an answer ends after its first call.
    strict: whether its calls are held to the schemas of the tools that ask for it.
    """

    backend: Backend
    prompt: EncodedPrompt
    requests: list[GenerationRequest]
    tools: dict[str, dict[str, Any]] | None
    prefix: str
    one_call: bool
    strict: bool


def plan_chat(backend: Backend, body: ChatRequest) -> ChatPlan:
    """Raises RequestError, and NotReady."""
    choices = check_common(backend, body)
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise FieldError("give max_completion_tokens or max_tokens, not both", "max_tokens")
    if body.top_logprobs and not body.logprobs:
        raise FieldError("top_logprobs needs logprobs to be true", "top_logprobs")
    names = [tool.function.name for tool in body.tools or ()]
    if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
        raise FieldError(f"two tools are called {twice!r}; give each a name of its own", "tools")
    tools = None if body.tool_choice == "none" or not body.tools else {tool.function.name: tool for tool in body.tools}
    grammar = _grammar(body, bool(tools))
    forced = tools is not None and body.tool_choice not in (None, "auto")
    if not tools and body.tool_choice not in (None, "none", "auto"):
        raise FieldError("tool_choice needs tools", "tool_choice")
    if body.parallel_tool_calls is not None and not body.tools:
        raise FieldError("parallel_tool_calls needs tools", "parallel_tool_calls")
    prefix = _prefix(backend, body, tools) if tools and forced else ""
    if tools and forced:
        grammar = _strict(backend, body, tools)
    thinking = _thinking(body)
    if thinking is None and (forced or grammar):
        thinking = False
    elif thinking and (forced or grammar):
        wanted = "a forced tool call" if forced else "response_format"
        raise FieldError(f"{wanted} needs the answer to begin at once: switch thinking off", "reasoning_effort")
    template = {} if thinking is None else dict(enable_thinking=thinking)
    offered = [_plain(tool) for tool in body.tools] if tools and body.tools else None
    prompt = backend.encode_chat(body.messages, offered, prefix, **template)
    if prompt.reasoning and (forced or grammar):
        raise FieldError("this model's template always thinks first, which a forced answer cannot", "response_format")
    options = body.sampling(backend.recommended)
    options |= dict(logprobs=True, top_logprobs=body.top_logprobs or 0) if body.logprobs else {}
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    made = backend.request(prompt, max_tokens=most, deadline_s=body.deadline_s, grammar=grammar, **options)
    requests = [
        dataclasses.replace(made, params=dataclasses.replace(made.params, **seed)) for seed in _seeds(body, choices)
    ]
    schemas = {name: tool.function.parameters or {} for name, tool in tools.items()} if tools else None
    return ChatPlan(
        backend, prompt, requests, schemas, prefix, body.parallel_tool_calls is False, bool(tools and grammar)
    )


def _seeds(body: ChatRequest, choices: int) -> list[dict[str, int]]:
    return [{} if body.seed is None else dict(seed=(body.seed + i) % 2**32) for i in range(choices)]


def _thinking(body: ChatRequest) -> bool | None:
    asked = body.chat_template_kwargs.enable_thinking if body.chat_template_kwargs else None
    effort = None if body.reasoning_effort is None else body.reasoning_effort != "none"
    if asked is not None and effort is not None and asked != effort:
        raise FieldError("reasoning_effort and chat_template_kwargs.enable_thinking disagree", "reasoning_effort")
    return effort if asked is None else asked


def _grammar(body: ChatRequest, tools: bool) -> Grammar | None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if tools:
        raise FieldError("response_format cannot go with tools unless tool_choice is 'none'", "response_format")
    for name in ("json_schema", "regex"):
        if (getattr(wanted, name) is not None) != (wanted.type == name):
            raise FieldError(
                f"response_format.{name} belongs to the type {name!r}, which needs it", f"response_format.{name}"
            )
    source = wanted.regex or ""
    if wanted.json_schema is not None:
        if wanted.json_schema.schema_ is None:
            raise FieldError("response_format.json_schema needs a schema", "response_format.json_schema.schema")
        source = json.dumps(wanted.json_schema.schema_)
    if len(source) > MAX_GRAMMAR:
        raise FieldError(f"response_format may have at most {MAX_GRAMMAR} characters", "response_format")
    return Grammar(wanted.type, source)


def _prefix(backend: Backend, body: ChatRequest, tools: dict[str, Tool]) -> str:
    """The beginning of an answer that calls a tool, in the form that the model's template teaches."""
    templates = backend.tokenizer.templates.values()
    if not any("<tool_call>" in template for template in templates):
        raise FieldError("this model's template has no form of tool calls that can be forced", "tool_choice")
    if not isinstance(body.tool_choice, ChosenTool):
        return "<tool_call>\n"
    name = body.tool_choice.function.name
    if name not in tools:
        raise FieldError(f"tool_choice names {name[:64]!r}, which is not among the tools", "tool_choice")
    if any("<function=" in template for template in templates):
        return f"<tool_call>\n<function={name}>\n"
    return f'<tool_call>\n{{"name": "{name}", "arguments":'


def _strict(backend: Backend, body: ChatRequest, tools: dict[str, Tool]) -> Grammar | None:
    """Of a forced call, where a tool that it may be of is strict: the name of one of them, arguments by its schema if it is."""
    form = "xml" if any("<function=" in template for template in backend.tokenizer.templates.values()) else "json"
    schemas = {name: tool.function.parameters or {} if tool.function.strict else None for name, tool in tools.items()}
    name = body.tool_choice.function.name if isinstance(body.tool_choice, ChosenTool) else None
    wanted = schemas if name is None else {name: schemas[name]}
    if not any(schema is not None for schema in wanted.values()):
        return None
    try:
        source = tool_call_source(form, wanted, name, more=name is None and body.parallel_tool_calls is not False)
    except RequestError as error:
        raise FieldError(str(error), "tools") from None
    if len(source) > MAX_GRAMMAR:
        raise FieldError(f"strict tools may have at most {MAX_GRAMMAR} characters together", "tools")
    return Grammar("tool_call", source)


def _plain(tool: Tool) -> dict[str, Any]:
    """A tool as templates show it to the model."""
    shown = {"name", "description", "parameters"}
    return dict(type="function", function=tool.function.model_dump(include=shown, exclude_none=True))


# ---- answers ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Piece:
    """What a delta adds to a choice. The last one has a finish reason and the completion."""

    index: int
    events: list[Event]
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    completion: Completion | None = None


async def _pieces(plan: ChatPlan, index: int, answer: Answering) -> AsyncGenerator[Piece]:
    parser = AnswerParser(plan.tools, reasoning=plan.prompt.reasoning)
    begun = parser.push(plan.prefix) if plan.prefix else []
    async for delta in answer:
        events = joined(begun + parser.push(delta.text))
        begun = []
        logprobs = chat_logprobs(plan.backend.tokenizer, delta) if delta.logprobs else None
        ended = next((i + 1 for i, e in enumerate(events) if isinstance(e, CallEnd)), None) if plan.one_call else None
        if ended is not None:
            completion = await answer.stop()
            yield Piece(index, events[:ended], logprobs, "tool_calls", completion)
            return
        if delta.completion is None:
            if events or logprobs:
                yield Piece(index, events, logprobs)
            continue
        events = joined([*events, *parser.finish()])
        yield Piece(index, events, logprobs, _finish_reason(parser, delta), delta.completion)


def _finish_reason(parser: AnswerParser, delta: Delta) -> str:
    reason = delta.finish_reason or "stop"
    return "tool_calls" if reason == "stop" and parser.calls and not parser.broken else reason


def _count(plan: ChatPlan, usage: Usage, piece: Piece) -> None:
    if piece.completion is None:
        return
    reasoning = 0
    if plan.prompt.reasoning:
        ids, end = piece.completion.token_ids, plan.backend.tokenizer.token_id("</think>")
        reasoning = ids.index(end) + 1 if end in ids else len(ids)
    usage.add(piece.completion, first=piece.index == 0, reasoning=reasoning)


async def _streamed(
    plan: ChatPlan, answers: list[Answering], body: ChatRequest, head: dict[str, Any]
) -> AsyncGenerator[bytes]:
    usage, wanted = Usage(), bool(body.stream_options and body.stream_options.include_usage)
    extra: dict[str, Any] = dict(usage=None) if wanted else {}

    def chunk(index: int, delta: dict[str, Any], logprobs: Any = None, finish_reason: str | None = None) -> bytes:
        choice = dict(index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)
        return event(head | dict(object="chat.completion.chunk", choices=[choice]) | extra)

    for i in range(len(answers)):
        yield chunk(i, dict(role="assistant", content=""))
    async with contextlib.aclosing(merged([_pieces(plan, i, a) for i, a in enumerate(answers)])) as pieces:
        async for piece in pieces:
            deltas = [made for e in piece.events if (made := _delta(e))]
            if piece.logprobs and not deltas:
                deltas = [{}]
            out = [chunk(piece.index, d, piece.logprobs if i == 0 else None) for i, d in enumerate(deltas)]
            if piece.finish_reason:
                out.append(chunk(piece.index, {}, None, piece.finish_reason))
            _count(plan, usage, piece)
            if out:
                yield b"".join(out)
    if wanted:
        yield event(head | dict(object="chat.completion.chunk", choices=[], usage=usage.to_dict()))


def _delta(e: Event) -> dict[str, Any] | None:
    if isinstance(e, Content):
        return dict(content=e.text)
    if isinstance(e, Reasoning):
        return dict(reasoning_content=e.text)
    if isinstance(e, CallBegin):
        return dict(tool_calls=[dict(index=e.index) | _call(e.name, "")])
    if isinstance(e, CallArguments):
        return dict(tool_calls=[dict(index=e.index, function=dict(arguments=e.text))])
    return None


def _call(name: str, arguments: str) -> dict[str, Any]:
    return dict(id=f"call_{secrets.token_hex(12)}", type="function", function=dict(name=name, arguments=arguments))


async def _collected(plan: ChatPlan, answers: list[Answering], head: dict[str, Any]) -> dict[str, Any]:
    usage, count = Usage(), len(answers)
    events: list[list[Event]] = [[] for _ in range(count)]
    logprobs: list[list[Any]] = [[] for _ in range(count)]
    reasons: list[str | None] = [None] * count
    async with contextlib.aclosing(merged([_pieces(plan, i, a) for i, a in enumerate(answers)])) as pieces:
        async for piece in pieces:
            events[piece.index] += piece.events
            logprobs[piece.index] += piece.logprobs["content"] if piece.logprobs else []
            reasons[piece.index] = piece.finish_reason or reasons[piece.index]
            _count(plan, usage, piece)
    logged = plan.requests[0].params.logprobs
    choices = [
        dict(
            index=i,
            message=_message(events[i]),
            logprobs=dict(content=logprobs[i], refusal=None) if logged else None,
            finish_reason=reasons[i],
        )
        for i in range(count)
    ]
    return head | dict(object="chat.completion", choices=choices, usage=usage.to_dict())


def _message(events: list[Event]) -> dict[str, Any]:
    content = [e.text for e in events if isinstance(e, Content)]
    reasoning = [e.text for e in events if isinstance(e, Reasoning)]
    calls: list[Any] = []
    for e in events:
        if isinstance(e, CallBegin):
            calls.append(_call(e.name, ""))
        elif isinstance(e, CallArguments):
            calls[e.index]["function"]["arguments"] += e.text
    message: dict[str, Any] = dict(
        role="assistant", content="".join(content) if content or not calls else None, refusal=None
    )
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    return message | (dict(tool_calls=calls) if calls else {})
