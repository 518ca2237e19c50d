"""The ASGI application: routes, errors in OpenAI's shape, the status page."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from atlas_jax.errors import AtlasError
from atlas_jax.serve.backend import Backend
from atlas_jax.serve.faults import fault, sendable
from atlas_jax.serve.http.chat import chat_completions
from atlas_jax.serve.http.completions import completions
from atlas_jax.serve.http.events import Disconnected
from atlas_jax.serve.http.guard import Guard
from atlas_jax.serve.http.openapi import description
from atlas_jax.serve.http.shared import UnknownModel, check_model

PAGE = pathlib.Path(__file__).with_name("status.html")
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'"


def create_app(backend: Backend) -> Starlette:
    routes = [
        Route("/v1/models", models),
        Route("/v1/models/{model:path}", model),
        Route("/v1/chat/completions", _json_only(chat_completions), methods=["POST"]),
        Route("/v1/completions", _json_only(completions), methods=["POST"]),
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", metrics),
        Route("/stats", stats),
        Route("/openapi.json", openapi),
        Route("/", page),
    ]
    handlers: dict[Any, Any] = {
        HTTPException: _http_error,
        AtlasError: _error,
        TimeoutError: _error,
        Disconnected: _disconnected,
        ClientDisconnect: _disconnected,  # within the body
        Exception: _error,
    }

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield

    app = Starlette(
        routes=routes, exception_handlers=handlers, middleware=[Middleware(Guard, backend=backend)], lifespan=lifespan
    )
    app.state.backend = backend
    return app


async def models(request: Request) -> Response:
    return JSONResponse(dict(object="list", data=[_model(request)]))


async def model(request: Request) -> Response:
    check_model(request.app.state.backend, request.path_params["model"])
    return JSONResponse(_model(request))


def _model(request: Request) -> dict[str, Any]:
    backend: Backend = request.app.state.backend
    length = backend.engine.runtime.run.max_length
    return dict(
        id=backend.config.name, object="model", created=backend.created, owned_by="atlas_jax", max_model_len=length
    )


async def health(request: Request) -> Response:
    """Whether the process is alive: always 200, but for an engine that has stopped by itself."""
    backend: Backend = request.app.state.backend
    dead = backend.state == "stopped" and not backend.draining
    return JSONResponse(dict(status=backend.state), status_code=503 if dead else 200)


async def ready(request: Request) -> Response:
    """Whether requests are taken."""
    state = request.app.state.backend.state
    return JSONResponse(dict(status=state), status_code=200 if state == "running" else 503)


async def metrics(request: Request) -> Response:
    text = await run_in_threadpool(request.app.state.backend.metrics.text)
    return PlainTextResponse(text, media_type="text/plain; version=1.0.0; charset=utf-8")


async def stats(request: Request) -> Response:
    backend: Backend = request.app.state.backend
    figures = await run_in_threadpool(lambda: backend.engine.stats().to_dict())
    return JSONResponse(dict(model=backend.config.name) | figures)


async def openapi(request: Request) -> Response:
    return JSONResponse(description(request.app.state.backend.config))


async def page(request: Request) -> Response:
    return HTMLResponse(PAGE.read_text(), headers={"content-security-policy": POLICY, "cache-control": "no-cache"})


def _json_only(endpoint: Any) -> Any:
    """A web page may send other types to a foreign server unasked, but not this one."""

    async def checked(request: Request) -> Any:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "the body must be sent as content-type application/json")
        return await endpoint(request)

    return checked


async def _http_error(request: Request, error: Any) -> Response:
    detail = (
        f"Unknown request URL: {request.method} {request.url.path}." if error.status_code == 404 else str(error.detail)
    )
    body = dict(message=sendable(detail[:300]), type="invalid_request_error", param=None, code=None)
    return JSONResponse(dict(error=body), status_code=error.status_code, headers=error.headers)


async def _error(request: Request, error: Exception) -> Response:
    found = fault(error)
    headers = {"retry-after": str(found.retry_s)} if found.retry_s else {}
    status = 404 if isinstance(error, UnknownModel) else found.status
    return JSONResponse(found.to_dict(), status_code=status, headers=headers)


async def _disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it; it is for the figures
