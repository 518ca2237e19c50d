"""Both servers and the engine in one process: binding, loading, signals, draining."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from typing import Any

import uvicorn

from atlas_jax.engine.api import EngineApi
from atlas_jax.errors import ConfigError
from atlas_jax.serve.backend import Backend
from atlas_jax.serve.config import ServeConfig
from atlas_jax.serve.http.app import create_app
from atlas_jax.serve.http.guard import Quiet
from atlas_jax.serve.rpc.server import RpcServer

log = logging.getLogger("atlas_jax.serve")
MAX_HEAD_BYTES = 64 << 10  # of a request: its line and its headers
CLOSE_S = 5.0  # for connections to close once their answers are over


class _Http(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:  # they are the business of `Servers`
        yield


class Servers:
    """Listens from `start` on, answers once `load` has given an engine, and ends with `stop`.

    Attributes:
        http_port, grpc_port: where they listen; None for one that is not wanted.
    """

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.backend = Backend(config)
        self.http_port: int | None = None
        self.grpc_port: int | None = None
        self._http: _Http | None = None
        self._http_task: asyncio.Task[None] | None = None
        self._rpc: RpcServer | None = None

    async def start(self) -> None:
        """Raises ConfigError where an address is taken or a certificate is none."""
        if self.config.http:
            listening = _listen(self.config)
            self.http_port = listening.getsockname()[1]
            self._http = _Http(_http_config(self.config, Quiet(create_app(self.backend))))
            self._http_task = asyncio.create_task(self._http.serve(sockets=[listening]))
        if self.config.grpc:
            self._rpc = RpcServer(self.backend)
            self.grpc_port = self._rpc.port
            await self._rpc.start()

    async def load(self, make: Callable[[], EngineApi]) -> None:
        """Makes and starts the engine in a thread of its own; meanwhile the servers say that they are not ready."""
        engine = await asyncio.to_thread(make)
        try:
            await asyncio.to_thread(engine.start)
        except BaseException:
            engine.close()
            raise
        self.backend.use(engine)
        if self._rpc:
            await self._rpc.ready(True)

    async def stop(self) -> None:
        """Takes no more requests, lets answers end for as long as the configuration allows, and closes everything."""
        backend = self.backend
        backend.draining = True
        if self._rpc:
            await self._rpc.ready(False)
        if backend.loaded:
            limit = self.config.drain_timeout_s
            if not await asyncio.to_thread(backend.engine.drain, limit):
                log.warning("some answers were not complete after %g s and are broken off", limit)
            await asyncio.to_thread(backend.engine.close)
        if self._rpc:
            await self._rpc.stop(CLOSE_S)
        if self._http and self._http_task:
            self._http.should_exit = True
            with contextlib.suppress(asyncio.CancelledError):
                await self._http_task
        backend.close()

    @property
    def where(self) -> str:
        """One line for whoever started it."""
        scheme = "https" if self.config.tls_cert else "http"
        parts = []
        if self.config.http:
            parts.append(f"{scheme}://{self.config.http.with_port(self.http_port or 0)}")
        if self.config.grpc:
            parts.append(
                f"gRPC{' with TLS' if self.config.tls_cert else ''} at {self.config.grpc.with_port(self.grpc_port or 0)}"
            )
        return ", ".join(parts)


async def serve(config: ServeConfig, make: Callable[[], EngineApi], tell: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT, then drains; a second signal ends the process at once."""
    servers, ending = Servers(config), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if ending.is_set():
            sys.stderr.flush()
            os._exit(130)
        ending.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    waiting = asyncio.create_task(ending.wait())
    try:
        await servers.start()
        tell(f"listening: {servers.where}; loading the model")
        loading = asyncio.create_task(servers.load(make))
        await asyncio.wait((loading, waiting), return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()  # raises what loading raised
            tell("ready")
            await waiting
        tell("draining")
    finally:
        waiting.cancel()
        await servers.stop()
    tell("stopped")


def _listen(config: ServeConfig) -> socket.socket:
    assert config.http is not None, "there is an address to listen at"
    host, port = config.http.host, config.http.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as undo:
            listening = undo.enter_context(socket.socket(family, kind, protocol))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                # What was sent to a client that stopped reading is not kept for ever. Far beyond the write timeout, since the
                # kernel counts in probes and was seen to give up after a quarter of this.
                patience_ms = 1000 * max(60, math.ceil(4 * config.write_timeout_s))
                listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience_ms)
            listening.bind(address)
            listening.listen(1024)
            undo.pop_all()
            return listening
    except OSError as error:
        raise ConfigError(f"HTTP cannot listen at {config.http}: {error.strerror or error}") from None


def _http_config(config: ServeConfig, app: Any) -> uvicorn.Config:
    options: dict[str, Any] = {}
    if config.tls_cert:
        options |= dict(ssl_certfile=config.tls_cert, ssl_keyfile=config.tls_key)
        if config.tls_client_ca:
            options |= dict(ssl_ca_certs=config.tls_client_ca, ssl_cert_reqs=ssl.CERT_REQUIRED)
    made = uvicorn.Config(
        app,
        http="h11",  # of uvicorn's parsers the one that bounds a request's head
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,  # paths are harmless, but so are logs without them
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(CLOSE_S),
        **options,
    )
    try:
        made.load()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{config.tls_cert} and {config.tls_key} cannot be used: {error.strerror or error}") from None
    return made
