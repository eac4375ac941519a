"""Why a call failed: one class per kind of status, with the details that the server sent."""

from dataclasses import dataclass, field

import grpc
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status


@dataclass(frozen=True, slots=True)
class ErrorDetails:
    """`reason` is stable and for machines, empty where none was sent. `fields` names what was refused: path -> why.
    `retry_after_ms` is when trying again makes sense; None where the server did not say."""

    reason: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    fields: dict[str, str] = field(default_factory=dict)
    retry_after_ms: int | None = None


class TesseraError(Exception):
    """A call that failed. The client itself stays usable: its connections come back by themselves.

    For an answer, `received_tokens` is how many output tokens had arrived (0 for other calls); `request_id` is the id of the request.
    """

    retryable = False
    """Whether the same request can succeed later, unchanged. A stream begun again gives the same tokens only with the same seed."""

    def __init__(self, message: str, code: grpc.StatusCode, details: ErrorDetails) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.details = details
        self.request_id = ""
        self.received_tokens = 0

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"


class InvalidArgument(TesseraError):
    """The request is wrong; `details.fields` says where."""


class NotFound(TesseraError):
    """No such model, or no such running request."""


class AlreadyExists(TesseraError):
    """A request with this id is running."""


class FailedPrecondition(TesseraError):
    """The servers do not fit together."""


class AccessDenied(TesseraError):
    """The gateway does not know the caller, or does not let it do this; `code` says which."""


class RequestAborted(TesseraError):
    """Another stream took the request over."""


class DeadlineExceeded(TesseraError):
    """`timeout_s` is over, or the limit that `details.reason` names; the request has ended."""


class InternalError(TesseraError):
    """The server failed on this request."""


class Overloaded(TesseraError):
    """Too many requests at the moment, or one beyond the size limit."""

    retryable = True


class Unavailable(TesseraError):
    """Nobody can answer at the moment, or the connection broke; an answer was tried to be resumed for `resume_timeout_s`."""

    retryable = True


_CLASSES: dict[grpc.StatusCode, type[TesseraError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
    grpc.StatusCode.UNAUTHENTICATED: AccessDenied,
    grpc.StatusCode.PERMISSION_DENIED: AccessDenied,
    grpc.StatusCode.ABORTED: RequestAborted,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.INTERNAL: InternalError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
}


def error_of(call: grpc.RpcError, request_id: str = "") -> TesseraError:
    """The error that `call` (of grpc or grpc.aio) ended with."""
    code: grpc.StatusCode = call.code()
    error = _CLASSES.get(code, TesseraError)(call.details() or code.name, code, _details_of(call))
    error.request_id = request_id
    return error


def _details_of(call: grpc.RpcError) -> ErrorDetails:
    try:
        status = rpc_status.from_call(call)
    except ValueError:  # details that contradict the status, for example from a proxy
        status = None
    if status is None:
        return ErrorDetails()
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    found = {type(kind) for detail in status.details for kind in (info, bad, retry) if detail.Unpack(kind)}
    return ErrorDetails(
        reason=info.reason,
        metadata=dict(info.metadata),
        fields={item.field: item.description for item in bad.field_violations},
        retry_after_ms=retry.retry_delay.ToMilliseconds() if type(retry) in found else None,
    )
