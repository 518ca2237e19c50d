"""The gRPC server: service, health, reflection, keys, TLS, limits."""

from __future__ import annotations

import pathlib
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from atlas_jax.errors import ConfigError
from atlas_jax.serve.auth import Keys
from atlas_jax.serve.backend import Backend
from atlas_jax.serve.config import ServeConfig
from atlas_jax.serve.rpc.service import Service
from atlas_jax.serve.v1 import atlas_pb2 as pb
from atlas_jax.serve.v1.atlas_pb2_grpc import add_AtlasServicer_to_server

NAME = pb.DESCRIPTOR.services_by_name["Atlas"].full_name
HEALTH = "/grpc.health.v1.Health/"
MAX_REPLY_BYTES = 64 << 20  # a Score of a long prompt
METADATA_BYTES = 16 << 10


class RpcServer:
    """`start` binds and serves at once; `ready` is what health says; `stop` lets calls go on for the time given."""

    def __init__(self, backend: Backend) -> None:
        config = backend.config
        assert config.grpc is not None, "there is an address to listen at"
        options = [
            ("grpc.max_receive_message_length", config.max_body_bytes),
            ("grpc.max_send_message_length", MAX_REPLY_BYTES),
            ("grpc.max_metadata_size", METADATA_BYTES),
            ("grpc.so_reuseport", 0),  # a second server at this address fails instead of taking half of the calls
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),  # a client that vanished without a word is noticed
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ]
        self._server = grpc.aio.server(interceptors=[_Admission(Keys(config.keys))], options=options)
        self._health = HealthServicer()
        add_AtlasServicer_to_server(Service(backend), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [NAME, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self._server)
        try:
            address = str(config.grpc)
            credentials = _credentials(config)
            if credentials:
                self.port = self._server.add_secure_port(address, credentials)
            else:
                self.port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"gRPC cannot listen at {config.grpc}: {str(error).splitlines()[0]}") from None

    async def start(self) -> None:
        await self.ready(False)
        await self._server.start()

    async def ready(self, ready: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", NAME):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


class _Admission(grpc.aio.ServerInterceptor):
    """Lets calls with a key through; health is open to all."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        metadata = dict(handler_call_details.invocation_metadata or ())
        if handler_call_details.method.startswith(HEALTH) or self._keys.admit(metadata.get("authorization")):
            return await continuation(handler_call_details)
        return _REFUSAL


async def _refuse(request: Any, context: Any) -> None:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED, "a key is needed: send it as the metadata 'authorization: Bearer KEY'"
    )


_REFUSAL = grpc.stream_stream_rpc_method_handler(_refuse)  # fits calls of every kind, which are not read


def _credentials(config: ServeConfig) -> grpc.ServerCredentials | None:
    if not (config.tls_cert and config.tls_key):
        return None
    read = lambda path: pathlib.Path(path).read_bytes()  # noqa: E731
    authority = read(config.tls_client_ca) if config.tls_client_ca else None
    return grpc.ssl_server_credentials(
        [(read(config.tls_key), read(config.tls_cert))], authority, require_client_auth=authority is not None
    )
