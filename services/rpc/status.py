"""From the error tree to what goes over the wire: status code, rich details (google.rpc), trailers."""

from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from services.rpc import errors

DOMAIN = "tessera"
"""The `domain` of every google.rpc.ErrorInfo sent from here."""

INTERNAL_TEXT = "internal error; the server's log has the details"
"""What a caller sees of a bug."""

# gRPC drops a call whose metadata is beyond 8 KiB, and base64 makes the details a third larger.
_TEXT_CHARS_MAX = 512
_DESCRIPTION_CHARS_MAX = 256
_STATUS_BYTES_MAX = 4096

_CODES: dict[type[errors.ServiceError], grpc.StatusCode] = {
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.FailedPrecondition: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.Aborted: grpc.StatusCode.ABORTED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Internal: grpc.StatusCode.INTERNAL,
    errors.Unimplemented: grpc.StatusCode.UNIMPLEMENTED,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
}


def code_of(error: errors.ServiceError) -> grpc.StatusCode:
    """The status code of `error`."""
    return _CODES[type(error)]


def status_of(error: errors.ServiceError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]:
    """Code, text and trailing metadata to end a call with.

    The details carry ErrorInfo always, BadRequest for InvalidArgument, QuotaFailure for a quota, RetryInfo where trying again makes
    sense. gRPC itself heeds only the trailer `grpc-retry-pushback-ms`, so both are sent.
    """
    code, text = code_of(error), _cut(error.message, _TEXT_CHARS_MAX)
    status = status_pb2.Status(code=code.value[0], message=text)
    _add(status, error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=_cut_all(error.metadata)))
    trailers: list[tuple[str, str | bytes]] = []
    if isinstance(error, errors.InvalidArgument):
        _add(status, _bad_request(error, status.ByteSize()))
    if isinstance(error, errors.Overloaded) and error.subject:
        subject, description = _cut(error.subject, _DESCRIPTION_CHARS_MAX), _cut(error.message, _DESCRIPTION_CHARS_MAX)
        violation = error_details_pb2.QuotaFailure.Violation(subject=subject, description=description)
        _add(status, error_details_pb2.QuotaFailure(violations=[violation]))
    if isinstance(error, errors.RetryableError) and error.retry_after_ms > 0:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(error.retry_after_ms)
        _add(status, error_details_pb2.RetryInfo(retry_delay=delay))
        trailers.append(("grpc-retry-pushback-ms", str(error.retry_after_ms)))
    return code, text, (*rpc_status.to_status(status).trailing_metadata, *trailers)


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """The `reason` that one of our servers gave; empty where the details hold none."""
    return str(_info_of(error).reason)


def metadata_of(error: grpc.aio.AioRpcError) -> dict[str, str]:
    """The numbers that one of our servers gave beside its reason; empty where the details hold none."""
    return dict(_info_of(error).metadata)


def _info_of(error: grpc.aio.AioRpcError) -> Any:
    """The ErrorInfo of one of our servers, an empty one where there is none."""
    info = error_details_pb2.ErrorInfo()
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # details that contradict the status: not ours
        return info
    for detail in status.details if status is not None else ():
        if detail.Unpack(info) and info.domain == DOMAIN:
            return info
    return error_details_pb2.ErrorInfo()


def _bad_request(error: errors.InvalidArgument, bytes_used: int) -> error_details_pb2.BadRequest:
    """As many violations as fit."""
    bad = error_details_pb2.BadRequest()
    for item in error.violations:
        description = _cut(item.description, _DESCRIPTION_CHARS_MAX)
        bad.field_violations.add(field=_cut(item.field, _DESCRIPTION_CHARS_MAX), description=description)
        if bytes_used + bad.ByteSize() > _STATUS_BYTES_MAX:
            del bad.field_violations[-1]
            break
    return bad


def _add(status: status_pb2.Status, detail: Message) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)


def _cut(text: str, chars_max: int) -> str:
    return text if len(text) <= chars_max else text[: chars_max - 3] + "..."


def _cut_all(metadata: dict[str, str]) -> dict[str, str]:
    return {key: _cut(value, _DESCRIPTION_CHARS_MAX) for key, value in metadata.items()}
