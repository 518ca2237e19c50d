"""Between protobuf messages and the engine's types."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Sequence
from typing import Any

from atlas_jax.completion import Completion, Delta
from atlas_jax.engine.api import EngineStats, GenerationRequest, Grammar, Score
from atlas_jax.errors import RequestError
from atlas_jax.metrics import Acceptance
from atlas_jax.serve.backend import Backend, EncodedPrompt
from atlas_jax.serve.faults import FieldError
from atlas_jax.serve.v1 import atlas_pb2 as pb

MAX_TOKENS = 128  # of an answer whose request does not say, as in the Python API
REASONS = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}


def prompt_of(backend: Backend, prompt: pb.Prompt, field: str = "prompt") -> EncodedPrompt:
    """Raises RequestError."""
    kind = prompt.WhichOneof("kind")
    if kind == "text":
        return backend.encode_text(prompt.text)
    if kind == "tokens":
        return backend.encode_ids(list(prompt.tokens.ids))
    if kind == "chat":
        chat = prompt.chat
        tools = [_json(text, f"{field}.chat.tools_json[{i}]") for i, text in enumerate(chat.tools_json)]
        template: dict[str, Any] = {}
        if chat.HasField("enable_thinking"):
            template["enable_thinking"] = chat.enable_thinking
        return backend.encode_chat([_message(m) for m in chat.messages], tools or None, **template)
    raise FieldError(f"{field} must be text, tokens or a chat", field)


def _message(message: pb.ChatMessage) -> dict[str, Any]:
    out: dict[str, Any] = dict(role=message.role, content=message.content)
    if message.reasoning_content:
        out["reasoning_content"] = message.reasoning_content
    if message.tool_call_id:
        out["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        out["tool_calls"] = [
            dict(id=call.id, type="function", function=dict(name=call.name, arguments=call.arguments_json or "{}"))
            for call in message.tool_calls
        ]
    return out


def _json(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise FieldError(f"{field} is not JSON", field) from None


def request_of(backend: Backend, request: pb.GenerateRequest, deadline_s: float | None) -> GenerationRequest:
    """Raises RequestError."""
    sampling, options = request.sampling, dict[str, Any]()
    names = "temperature top_k top_p min_p presence_penalty frequency_penalty repetition_penalty seed".split()
    options |= {name: getattr(sampling, name) for name in names if sampling.HasField(name)}
    for name, value in (("stop", sampling.stop), ("stop_token_ids", sampling.stop_token_ids)):
        if value:
            options[name] = tuple(value)
    if sampling.logit_bias:
        options["logit_bias"] = dict(sampling.logit_bias)
    for name in ("ignore_eos", "logprobs", "top_logprobs"):
        if value := getattr(sampling, name):
            options[name] = value
    if request.drafter:
        options["drafter"] = request.drafter
    drafting = request.WhichOneof("drafting")
    if drafting == "drafts" or request.auto_drafts:
        options["drafts"] = "auto" if request.auto_drafts else request.drafts
    if request.priority:
        options["priority"] = request.priority
    kind = request.grammar.WhichOneof("kind")
    if kind:
        source = "" if kind == "json_object" else getattr(request.grammar, kind)
        options["grammar"] = Grammar(kind, source)
    most = sampling.max_tokens if sampling.HasField("max_tokens") else MAX_TOKENS
    prompt = prompt_of(backend, request.prompt)
    try:
        return backend.request(prompt, max_tokens=most, deadline_s=deadline_s, **options)
    except RequestError as error:
        if error.field in pb.Sampling.DESCRIPTOR.fields_by_name:
            error.field = f"sampling.{error.field}"
        raise


def logprobs_of(logprobs: Sequence[float] | None, tops: Sequence[Any] | None) -> list[pb.TokenLogprob]:
    return [
        pb.TokenLogprob(
            logprob=value,
            top=[pb.TopLogprob(token_id=token, logprob=likely) for token, likely in (tops[i] if tops else ())],
        )
        for i, value in enumerate(logprobs or ())
    ]


def delta_message(delta: Delta) -> pb.GenerateResponse:
    out = pb.GenerateResponse(
        token_ids=delta.token_ids, text=delta.text, logprobs=logprobs_of(delta.logprobs, delta.top_logprobs)
    )
    if delta.completion:
        out.completion.CopyFrom(completion_message(delta.completion))
    return out


def completion_message(completion: Completion) -> pb.Completion:
    timings = completion.timings
    return pb.Completion(
        finish_reason=REASONS.get(completion.finish_reason, pb.FINISH_REASON_UNSPECIFIED),
        prompt_tokens=completion.prompt_tokens,
        completion_tokens=len(completion.token_ids),
        cache=pb.CacheUse(
            matched=completion.matched,
            restored=completion.restored,
            replayed=completion.replayed,
            granularity_share=completion.reuse.granularity_share,
        ),
        acceptance=acceptance_message(completion.acceptance),
        timings=pb.Timings(ttft_ms=timings.ttft_ms, tpot_ms=timings.tpot_ms, tokens_per_s=timings.tokens_per_s),
    )


def acceptance_message(acceptance: Acceptance) -> pb.Acceptance:
    figures = acceptance.to_dict()
    names = "draft offered matched reached accepted".split()
    return pb.Acceptance(
        steps=acceptance.steps,
        drafted=acceptance.drafted,
        accepted=acceptance.drafts_accepted,
        emitted=acceptance.emitted,
        positions=[pb.DraftPosition(**{name: place[name] for name in names}) for place in figures["positions"]],
    )


def score_message(score: Score) -> pb.ScoreResponse:
    return pb.ScoreResponse(token_ids=score.token_ids, logprobs=logprobs_of(score.logprobs, score.top_logprobs))


def stats_message(stats: EngineStats) -> pb.StatsResponse:
    names = "state running waiting slots max_waiting submitted refused finished prompt_tokens restored_tokens tokens tokens_per_s"
    names += " pages pages_free uptime_s"
    return pb.StatsResponse(
        **{name: getattr(stats, name) for name in names.split()}, acceptance=acceptance_message(stats.acceptance)
    )


def _version() -> str:
    try:
        return importlib.metadata.version("atlas-jax")
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        return ""


def info_message(backend: Backend) -> pb.ModelInfoResponse:
    runtime = backend.engine.runtime
    tokenizer, run = runtime.tokenizer, runtime.run
    return pb.ModelInfoResponse(
        name=backend.config.name,
        runtime_version=_version(),
        model_type=runtime.config.model_type,
        vocab_size=runtime.config.vocab_size,
        max_length=run.max_length,
        slots=run.slots,
        max_drafts=run.max_drafts,
        default_drafter=runtime.default_drafter,
        dtype=run.dtype,
        has_tokenizer=tokenizer is not None,
        has_chat_template=tokenizer is not None and bool(tokenizer.templates),
        eos_token_ids=runtime.config.eos_token_ids,
    )
