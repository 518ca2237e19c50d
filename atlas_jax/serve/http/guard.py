"""What stands before every route: keys, host names, sizes. Plain ASGI, so that streams pass through untouched."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atlas_jax.serve.auth import Keys
from atlas_jax.serve.backend import Backend
from atlas_jax.serve.faults import report

OPEN = ("/health", "/ready", "/", "/openapi.json")  # the page holds no figures; it asks for them with the reader's key
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


class Guard:
    """Refuses requests without a key (401), with a foreign host name (421), and with too long a body (413).

    A server on loopback that asks for no key answers to local names only: a web page that has made its own name point to this
    machine would otherwise reach it through the reader's browser.
    """

    def __init__(self, app: ASGIApp, backend: Backend) -> None:
        self.app, self.backend = app, backend
        config = backend.config
        self.keys = Keys(config.keys)
        self.local_only = not config.keys and config.http is not None and config.http.loopback
        self.max_body_bytes = config.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        identity = f"req_{uuid.uuid4().hex}".encode()
        began, status = time.perf_counter(), 0

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                elapsed = b"%d" % (1e3 * (time.perf_counter() - began))
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", identity),
                    (b"openai-processing-ms", elapsed),
                    (b"x-content-type-options", b"nosniff"),
                ]
            await send(message)

        try:
            refusal = self._refusal(scope["path"], headers)
            if refusal is not None:
                await _refuse(tell, *refusal)
            else:
                await self.app(scope, self._bounded(receive), tell)
        except _TooLong:
            await _refuse(tell, *self._too_long())
        finally:
            route = scope.get("route")
            self.backend.metrics.response("http", getattr(route, "path", "other"), str(status))

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> tuple[int, str, str] | None:
        if self.local_only and _host(headers.get(b"host", b"")) not in LOCAL_NAMES:
            return 421, "this server answers to local names only; give it --api-keys to use others", "wrong_host"
        if path not in OPEN and not self.keys.admit(headers.get(b"authorization")):
            return 401, "Incorrect API key provided. Send one as 'Authorization: Bearer KEY'.", "invalid_api_key"
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self.max_body_bytes:
            return self._too_long()
        return None

    def _too_long(self) -> tuple[int, str, str]:
        return 413, f"the body is longer than {self.max_body_bytes} bytes", "request_too_large"

    def _bounded(self, receive: Receive) -> Receive:
        seen = 0

        async def read() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.max_body_bytes:
                raise _TooLong
            return message

        return read


class Quiet:
    """Keeps unexpected errors, which the application has answered by then, from the server that would log them whole."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        except Exception as error:
            report(error)


class _TooLong(Exception):
    pass


def _host(value: bytes) -> str:
    """A Host header without its port."""
    text = value.decode("latin-1").lower()
    return text[1 : text.find("]")] if text.startswith("[") else text.partition(":")[0]


async def _refuse(send: Send, status: int, message: str, code: str) -> None:
    error: dict[str, Any] = dict(message=message, type="invalid_request_error", param=None, code=code)
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    headers += [(b"www-authenticate", b"Bearer")] if status == 401 else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(dict(error=error)).encode()})
