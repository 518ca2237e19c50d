"""The OpenAPI description, made of the schemas that requests are checked with."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

import atlas_jax.serve.http.schema as schema
from atlas_jax.serve.config import ServeConfig

ERROR: dict[str, Any] = dict(
    type="object",
    required=["error"],
    properties=dict(
        error=dict(
            type="object",
            required=["message", "type", "param", "code"],
            properties=dict(
                message=dict(type="string"),
                type=dict(type="string"),
                param=dict(type=["string", "null"]),
                code=dict(type=["string", "null"]),
            ),
        )
    ),
)
ERRORS = {
    "400": "The request cannot work; `param` says which field",
    "401": "No key, or a wrong one",
    "404": "Another model than the one that is served",
    "413": "The body is too long",
    "415": "Not application/json",
    "421": "A foreign host name",
    "500": "A step failed",
    "503": "Loading, full, or shutting down; Retry-After says when to come back",
    "504": "The deadline passed",
}


def description(config: ServeConfig) -> dict[str, Any]:
    _, made = models_json_schema(
        [(schema.ChatRequest, "validation"), (schema.CompletionRequest, "validation")],
        ref_template="#/components/schemas/{model}",
    )
    object_of = lambda *names: dict(type="object", required=list(names))  # noqa: E731
    answer = object_of("id", "object", "created", "model", "choices")
    paths: dict[str, Any] = {
        "/v1/chat/completions": _post("ChatRequest", "Answer a chat", answer),
        "/v1/completions": _post("CompletionRequest", "Continue text or token ids", answer),
        "/v1/models": _get("The model that is served", object_of("object", "data"), "401", "503"),
        "/v1/models/{model}": _get("The model that is served", object_of("id", "object"), "401", "404", "503"),
        "/stats": _get("The engine's figures", object_of("state", "running", "tokens"), "401", "503"),
        "/health": _get("Whether the process is alive", object_of("status")),
        "/ready": _get("Whether requests are taken", object_of("status")),
    }
    for path in ("/health", "/ready"):
        responses = paths[path]["get"]["responses"]
        responses["503"] = dict(responses["200"], description="It is not")
    name = dict(name="model", required=True, schema=dict(type="string"))
    paths["/v1/models/{model}"]["get"]["parameters"] = [name | {"in": "path"}]
    components: dict[str, Any] = dict(schemas=made["$defs"] | dict(Error=ERROR))
    out: dict[str, Any] = dict(
        openapi="3.1.0",
        info=dict(title="atlas_jax", version="1", description=schema.__doc__),
        paths=paths,
        components=components,
    )
    if config.keys:
        components["securitySchemes"] = dict(key=dict(type="http", scheme="bearer"))
        out["security"] = [dict(key=[])]
    return out


def _post(model: str, summary: str, answer: dict[str, Any]) -> dict[str, Any]:
    content = {"application/json": dict(schema={"$ref": f"#/components/schemas/{model}"})}
    streamed = {"text/event-stream": dict(schema=dict(type="string"))}
    ok = dict(description="The answer, or its pieces", content={"application/json": dict(schema=answer)} | streamed)
    return dict(
        post=dict(
            summary=summary,
            requestBody=dict(required=True, content=content),
            responses={"200": ok} | {status: _error(status) for status in ERRORS},
        )
    )


def _get(summary: str, answer: dict[str, Any], *errors: str) -> dict[str, Any]:
    ok = dict(description=summary, content={"application/json": dict(schema=answer)})
    return dict(
        get=dict(summary=summary, responses={"200": ok} | {status: _error(status) for status in (*errors, "421")})
    )


def _error(status: str) -> dict[str, Any]:
    return {
        "description": ERRORS[status],
        "content": {"application/json": dict(schema={"$ref": "#/components/schemas/Error"})},
    }
