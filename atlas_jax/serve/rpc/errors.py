"""Errors as rich gRPC statuses: google.rpc.Status with BadRequest, RetryInfo and ErrorInfo."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from atlas_jax.serve.faults import Fault

DETAILS = "grpc-status-details-bin"
DOMAIN = "atlas_jax"


async def abort(context: Any, found: Fault) -> None:
    """Ends the call with the fault's status."""
    status = status_of(found)
    await context.abort(found.grpc, status.message, trailing_metadata=((DETAILS, status.SerializeToString()),))


def status_of(found: Fault) -> status_pb2.Status:
    """The status with its details."""
    message = found.message
    status = status_pb2.Status(code=found.grpc.value[0], message=message)
    if found.grpc is grpc.StatusCode.INVALID_ARGUMENT:
        violation = error_details_pb2.BadRequest.FieldViolation(field=found.field or "", description=message)
        _add(status, error_details_pb2.BadRequest(field_violations=[violation]))
    if found.retry_s is not None:
        _add(status, error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=found.retry_s)))
    reason = (found.code or found.kind).upper()
    _add(status, error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN))
    return status


def _add(status: status_pb2.Status, detail: Any) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)
