"""Bodies of requests, as OpenAI's API has them. A field that is not listed is refused, as there.

Beyond that API: top_k, min_p, repetition_penalty, stop_token_ids, ignore_eos, chat_template_kwargs (all as in vLLM), drafter,
drafts, priority, deadline_s, and response_format {"type": "regex", "regex": …}.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

INERT = {
    "metadata": "kept by OpenAI for its dashboards",
    "prediction": "a hint for speed; drafting here needs none",
    "prompt_cache_key": "the prefix cache needs no hint",
    "prompt_cache_retention": "the prefix cache decides",
    "safety_identifier": "nothing is reported",
    "service_tier": "there is one",
    "store": "nothing is stored",
    "user": "nothing is reported",
}
"""Fields that change no answer at OpenAI either: accepted, and named in the response header x-atlas-ignored."""


class Body(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against eavesdroppers: TLS's business


class ReasoningOptions(Body):
    """Variables of the model's chat template."""

    enable_thinking: bool | None = None


class JsonSchema(Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    regex: str | None = None


class Function(Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class ChosenFunction(Body):
    name: str


class ChosenTool(Body):
    type: Literal["function"]
    function: ChosenFunction


class Request(Body):
    """What chat and plain completions share."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    drafter: str | None = None
    drafts: Annotated[int, Field(ge=0)] | Literal["auto"] | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    deadline_s: Annotated[float, Field(gt=0)] | None = None

    def sampling(self, recommended: dict[str, float | int]) -> dict[str, Any]:
        """Options of `Engine.request`; what the client left open is as the model recommends, or as at OpenAI."""
        values: dict[str, Any] = dict(temperature=1.0) | recommended
        names = "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty ignore_eos".split()
        names += "drafter drafts priority".split()
        values |= {name: value for name in names if (value := getattr(self, name)) is not None}
        if values.get("top_k") == -1:  # vLLM's way to say all
            values["top_k"] = 0
        if self.seed is not None:
            values["seed"] = self.seed % 2**32
        if self.stop:
            values["stop"] = self.stop
        if self.stop_token_ids:
            values["stop_token_ids"] = tuple(self.stop_token_ids)
        if self.logit_bias:
            values["logit_bias"] = {_token_id(key): value for key, value in self.logit_bias.items()}
        return values


class ChatRequest(Request):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    modalities: list[Literal["text"]] | None = None
    metadata: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: bool | None = None
    chat_template_kwargs: ReasoningOptions | None = None


class CompletionRequest(Request):
    prompt: str | list[str] | list[int] | list[list[int]]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    suffix: str | None = None


def _token_id(key: str) -> int:
    from atlas_jax.serve.faults import FieldError

    if not key.isascii() or not key.isdecimal() or len(key) > 10:
        raise FieldError(f"logit_bias must have token ids as keys, got {key[:20]!r}", "logit_bias")
    return int(key)
