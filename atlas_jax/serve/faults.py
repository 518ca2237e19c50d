"""What a client is told of an error: one table for HTTP and gRPC."""

from __future__ import annotations

import dataclasses
import http
import logging
import traceback

import grpc

from atlas_jax.engine.api import Cancelled, DeadlineExceeded, EngineFull, EngineStopping, StepFailed
from atlas_jax.errors import AtlasError, RequestError

log = logging.getLogger("atlas_jax.serve")
MAX_MESSAGE = 1000  # characters; gRPC's trailers must fit into a client's limit of headers, often 8 KiB


class ContextTooLong(RequestError):
    """Prompt and answer are longer than a sequence may be."""


class FieldError(RequestError):
    """A field of a request that cannot work.

    Attributes:
        field: its path, as in "messages[0].role".
        code: of OpenAI's error, where there is one.
    """

    def __init__(self, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message, field)
        self.code = code


class NotReady(AtlasError):
    """The model is still being loaded."""


class SlowReader(AtlasError):
    """The client did not take its answer in time."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """Attributes:
    status, kind, code: the HTTP status, and `type` and `code` of OpenAI's error object.
    grpc: the gRPC status.
    retry_s: when trying again may help; None if it will not.
    """

    status: http.HTTPStatus
    kind: str
    code: str | None
    grpc: grpc.StatusCode
    message: str
    field: str | None = None
    retry_s: int | None = None

    def to_dict(self) -> dict[str, object]:
        """OpenAI's error object."""
        return dict(error=dict(message=self.message, type=self.kind, param=self.field, code=self.code))


_S, _G = http.HTTPStatus, grpc.StatusCode
_TABLE: list[tuple[type[Exception], http.HTTPStatus, str, str | None, grpc.StatusCode, int | None]] = [
    (ContextTooLong, _S.BAD_REQUEST, "invalid_request_error", "context_length_exceeded", _G.INVALID_ARGUMENT, None),
    (RequestError, _S.BAD_REQUEST, "invalid_request_error", None, _G.INVALID_ARGUMENT, None),
    (EngineFull, _S.SERVICE_UNAVAILABLE, "server_error", "engine_overloaded", _G.RESOURCE_EXHAUSTED, 1),
    (EngineStopping, _S.SERVICE_UNAVAILABLE, "server_error", "shutting_down", _G.UNAVAILABLE, 5),
    (NotReady, _S.SERVICE_UNAVAILABLE, "server_error", "not_ready", _G.UNAVAILABLE, 5),
    (DeadlineExceeded, _S.GATEWAY_TIMEOUT, "timeout", "deadline_exceeded", _G.DEADLINE_EXCEEDED, None),
    (TimeoutError, _S.GATEWAY_TIMEOUT, "timeout", "deadline_exceeded", _G.DEADLINE_EXCEEDED, None),
    (Cancelled, _S.SERVICE_UNAVAILABLE, "server_error", "cancelled", _G.CANCELLED, None),
    (SlowReader, _S.REQUEST_TIMEOUT, "timeout", "slow_reader", _G.RESOURCE_EXHAUSTED, None),
    (StepFailed, _S.INTERNAL_SERVER_ERROR, "server_error", "step_failed", _G.INTERNAL, None),
]


def fault(error: BaseException) -> Fault:
    """What to tell a client. The inside of an unexpected error stays in the log."""
    for kind, status, name, code, status_code, retry_s in _TABLE:
        if isinstance(error, kind):
            field = getattr(error, "field", None)
            message = sendable(str(error) or "the request took too long")
            field = None if field is None else sendable(field)
            return Fault(status, name, getattr(error, "code", None) or code, status_code, message, field, retry_s)
    report(error)
    return Fault(
        _S.INTERNAL_SERVER_ERROR, "server_error", "internal_error", _G.INTERNAL, "the server failed; its log says where"
    )


def sendable(text: str) -> str:
    """Text that UTF-8 can encode, and not much of it: it may quote half of a surrogate pair, or all that a client sent."""
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + " …"


def report(error: BaseException) -> None:
    """Logs, once, where an unexpected error came up; its message may hold what a user typed, and is left out."""
    if getattr(error, "reported", False):
        return
    error.reported = True  # pyright: ignore[reportAttributeAccessIssue]
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    where = " < ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames))
    log.error("unexpected %s at %s", type(error).__name__, where)
