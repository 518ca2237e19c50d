"""Server-sent events that notice when nobody reads them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any

from starlette.types import Receive, Scope, Send

from atlas_jax.serve.backend import Answering, Backend
from atlas_jax.serve.faults import fault

KEEP_ALIVE_S = 15.0  # a comment as often as this while an answer is awaited, so that proxies do not hang up


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class Disconnected(Exception):
    """The client went away."""


class EventStream:
    """An ASGI response of server-sent events, ended by "[DONE]" or by an error event.

    The iterator and the answers that it reads are closed, which cancels them, as soon as the client disconnects, and when it
    has not taken anything for the time that the configuration allows.
    """

    def __init__(
        self, events: AsyncGenerator[bytes], backend: Backend, headers: dict[str, str], answers: Sequence[Answering]
    ) -> None:
        self.events, self.backend, self.headers, self.answers = events, backend, headers, answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_gone(receive))
        try:
            async with contextlib.aclosing(self.events):
                await self._send(send, gone)
        except (Disconnected, OSError):
            pass
        finally:
            gone.cancel()
            for answer in self.answers:
                answer.close()

    async def _send(self, send: Send, gone: asyncio.Future[None]) -> None:
        headers = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in self.headers.items()]
        headers += [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await self._write(send, {"type": "http.response.start", "status": 200, "headers": headers})
        while True:
            coming = asyncio.ensure_future(anext(self.events, b""))
            try:
                while not coming.done():
                    await asyncio.wait((coming, gone), timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                    if gone.done():
                        raise Disconnected
                    if not coming.done():
                        await self._body(send, b": waiting\n\n")
                body = coming.result()
            except (Disconnected, asyncio.CancelledError):
                raise
            except Exception as error:
                await self._body(send, event(fault(error).to_dict()), last=True)
                return
            finally:
                if not coming.done():
                    coming.cancel()
                    with contextlib.suppress(asyncio.CancelledError, Exception):
                        await coming
            if not body:
                await self._body(send, b"data: [DONE]\n\n", last=True)
                return
            await self._body(send, body)

    async def _body(self, send: Send, body: bytes, last: bool = False) -> None:
        await self._write(send, {"type": "http.response.body", "body": body, "more_body": not last})

    async def _write(self, send: Send, message: dict[str, Any]) -> None:
        """Waits while the client's connection is full."""
        try:
            async with asyncio.timeout(self.backend.config.write_timeout_s):
                await send(message)
        except TimeoutError:
            self.backend.metrics.slow_reader()
            raise Disconnected from None


async def unless_gone[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` and cancels it when the client goes away. Raises Disconnected then."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
