"""/v1/completions: text or token ids, continued as they are."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from atlas_jax.engine.api import GenerationRequest, Score
from atlas_jax.serve.backend import Answering, Backend, EncodedPrompt
from atlas_jax.serve.faults import FieldError
from atlas_jax.serve.http.bodies import parse
from atlas_jax.serve.http.choices import Usage, closing, merged, submit_all
from atlas_jax.serve.http.events import EventStream, event, unless_gone
from atlas_jax.serve.http.logprobs import TextLogprobs
from atlas_jax.serve.http.schema import CompletionRequest
from atlas_jax.serve.http.shared import check_common, ignored

MAX_TOKENS = 16  # OpenAI's default


async def completions(request: Request) -> Response | EventStream:
    backend: Backend = request.app.state.backend
    body = parse(await request.body(), CompletionRequest)
    plan = await asyncio.to_thread(plan_completions, backend, body)
    if body.echo and body.logprobs is not None:
        scores = [await backend.score(prompt.ids, body.logprobs) for prompt in plan.prompts]
        plan = dataclasses.replace(plan, scores=scores)
    answers = await submit_all(backend, plan.requests)
    head = dict(
        id=f"cmpl-{secrets.token_hex(12)}",
        object="text_completion",
        created=int(time.time()),
        model=backend.config.name,
    )
    if body.stream:
        return EventStream(_streamed(plan, answers, body, head), backend, ignored(body), answers)
    with closing(answers):
        content = await unless_gone(request.receive, _collected(plan, answers, head))
    return JSONResponse(content, headers=ignored(body))


@dataclasses.dataclass(frozen=True)
class CompletionPlan:
    """Attributes:
    requests: one a choice; choice i answers prompt i // choices.
    echoes: what each prompt's answers begin with.
    scores: of the prompts, where their log-probabilities are asked for.
    """

    backend: Backend
    prompts: list[EncodedPrompt]
    requests: list[GenerationRequest]
    choices: int
    logged: bool
    echoes: list[str]
    scores: list[Score] | None = None


def plan_completions(backend: Backend, body: CompletionRequest) -> CompletionPlan:
    """Raises RequestError, and NotReady."""
    choices = check_common(backend, body)
    if body.suffix:
        raise FieldError("suffix is not supported: this model does not fill in the middle", "suffix")
    if body.best_of is not None and body.best_of != choices:
        raise FieldError("best_of is not supported beyond n: it would throw answers away", "best_of")
    if body.logprobs is not None:
        backend.tokenizer  # noqa: B018  # raises RequestError
    given = _prompts(body)
    if len(given) * choices > backend.config.max_choices:
        most = backend.config.max_choices
        raise FieldError(f"prompts times n may be at most {most} here, got {len(given) * choices}", "prompt")
    prompts = [backend.encode_text(p) if isinstance(p, str) else backend.encode_ids(p) for p in given]
    options = body.sampling(backend.recommended)
    options |= dict(logprobs=True, top_logprobs=body.logprobs) if body.logprobs is not None else {}
    most = MAX_TOKENS if body.max_tokens is None else body.max_tokens
    requests = []
    for prompt in prompts:
        made = backend.request(prompt, max_tokens=most, deadline_s=body.deadline_s, **options)
        for i in range(choices):
            seed = {} if body.seed is None else dict(seed=(body.seed + i) % 2**32)
            requests.append(dataclasses.replace(made, params=dataclasses.replace(made.params, **seed)))
    decode = backend.tokenizer.decode if body.echo else None
    echoes = [decode(p.ids.tolist(), skip_special_tokens=False) if decode else "" for p in prompts]
    return CompletionPlan(backend, prompts, requests, choices, body.logprobs is not None, echoes)


def _prompts(body: CompletionRequest) -> list[Any]:
    prompt: Any = body.prompt
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompt = [prompt]
    if not prompt:
        raise FieldError("the prompt is empty; give text or token ids", "prompt")
    return prompt


# ---- answers ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Piece:
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None = None
    completion: Any = None


async def _pieces(plan: CompletionPlan, index: int, answer: Answering) -> AsyncGenerator[Piece]:
    place = index // plan.choices
    logger = TextLogprobs(plan.backend.tokenizer) if plan.logged else None
    if plan.echoes[place]:
        logged = None
        if logger and plan.scores:
            score = plan.scores[place]
            tops = None if score.top_logprobs is None else [None, *score.top_logprobs]
            logged = logger.add(plan.prompts[place].ids.tolist(), [None, *score.logprobs], tops)
        yield Piece(index, plan.echoes[place], logged)
    async for delta in answer:
        logged = None
        if logger and delta.logprobs is not None:
            logged = logger.add(delta.token_ids, delta.logprobs, delta.top_logprobs)
        if delta.text or logged or delta.completion:
            yield Piece(index, delta.text, logged, delta.completion and delta.finish_reason, delta.completion)


def _count(plan: CompletionPlan, usage: Usage, piece: Piece) -> None:
    if piece.completion is not None:
        usage.add(piece.completion, first=piece.index % plan.choices == 0)


async def _streamed(
    plan: CompletionPlan, answers: list[Answering], body: CompletionRequest, head: dict[str, Any]
) -> AsyncGenerator[bytes]:
    usage, wanted = Usage(), bool(body.stream_options and body.stream_options.include_usage)
    extra: dict[str, Any] = dict(usage=None) if wanted else {}
    async with contextlib.aclosing(merged([_pieces(plan, i, a) for i, a in enumerate(answers)])) as pieces:
        async for piece in pieces:
            _count(plan, usage, piece)
            choice = dict(
                index=piece.index, text=piece.text, logprobs=piece.logprobs, finish_reason=piece.finish_reason
            )
            yield event(head | dict(choices=[choice]) | extra)
    if wanted:
        yield event(head | dict(choices=[], usage=usage.to_dict()))


async def _collected(plan: CompletionPlan, answers: list[Answering], head: dict[str, Any]) -> dict[str, Any]:
    usage, count = Usage(), len(answers)
    texts, reasons = [""] * count, [""] * count
    logged: list[dict[str, Any] | None] = [None] * count
    async with contextlib.aclosing(merged([_pieces(plan, i, a) for i, a in enumerate(answers)])) as pieces:
        async for piece in pieces:
            _count(plan, usage, piece)
            texts[piece.index] += piece.text
            reasons[piece.index] = piece.finish_reason or ""
            logged[piece.index] = _together(logged[piece.index], piece.logprobs)
    choices = [dict(index=i, text=texts[i], logprobs=logged[i], finish_reason=reasons[i]) for i in range(count)]
    return head | dict(choices=choices, usage=usage.to_dict())


def _together(a: dict[str, Any] | None, b: dict[str, Any] | None) -> dict[str, Any] | None:
    if a is None or b is None:
        return a or b
    return {name: None if a[name] is None and b[name] is None else (a[name] or []) + (b[name] or []) for name in a}
