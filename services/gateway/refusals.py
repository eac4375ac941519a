"""From what goes wrong inside a gateway to what its clients are told."""

from gateway.errors import GatewayError, InvalidRequest, OutputGap, TokenizerMismatch, UnknownModel
from gateway.resume import GENERATION
from services.rpc.errors import (
    TOKENIZER_MISMATCH,
    Aborted,
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    FieldViolation,
    Internal,
    InvalidArgument,
    NotFound,
    Overloaded,
    ServiceError,
    Unavailable,
)
from tessera.values.finish import Finish
from tessera.values.protocol import VERSION_SKEW
from tessera.values.session import Rejected, RejectReason

SKEW_RETRY_MS = 1000
"""When to try again what only a gateway of another release can do."""

ELSEWHERE_RETRY_MS = 100
"""When to try again what another gateway can do at once."""


def refusal_of(error: GatewayError, prefix: str = "") -> ServiceError:
    """What `error` means to a client. `prefix` leads from the request message to the fields that the error names."""
    match error:
        case InvalidRequest():
            return InvalidArgument(tuple(FieldViolation(prefix + item.field, item.description) for item in error.fields))
        case UnknownModel():
            return NotFound(prefix + str(error), reason="MODEL_NOT_FOUND", metadata={"field": prefix + "model"})
        case TokenizerMismatch():
            return tokenizer_mismatch(str(error))
        case OutputGap():
            return Internal("output of this request was lost between scheduler and gateway", reason="OUTPUT_GAP")
        case _:
            return Internal(str(error), reason="GATEWAY_ERROR")


def rejection_of(rejected: Rejected, prompt_field: str) -> ServiceError:
    """Why the scheduler did not admit a request; `prompt_field` is where its prompt stands in the client's message, beside its id or deeper."""
    match rejected.reason:
        case RejectReason.TOO_LONG:
            return InvalidArgument((FieldViolation(prompt_field, rejected.message),), reason="TOO_LONG")
        case RejectReason.INVALID:
            return InvalidArgument((FieldViolation(prompt_field, rejected.message),))
        case RejectReason.OVERLOADED:
            after_ms = rejected.retry_after_ms
            return Overloaded(rejected.message, reason="OVERLOADED", retry_after_ms=after_ms, subject="scheduler")
        case RejectReason.PAUSED:
            return Unavailable(rejected.message, reason="ADMISSION_PAUSED", retry_after_ms=rejected.retry_after_ms)
        case RejectReason.ALREADY_EXISTS:
            field = f"{GENERATION if prompt_field.startswith(GENERATION) else ''}request_id"
            return AlreadyExists(rejected.message, reason="REQUEST_ID_IN_USE", metadata={"field": field})


def too_late(finish: Finish) -> ServiceError:
    """A time limit of the request is over; `reason` is its name."""
    reason = "DEADLINE" if finish.limit == "deadline_ms" else finish.limit.upper()
    return DeadlineExceeded(f"{finish.limit}: {finish.message}", reason=reason, metadata={"limit": finish.limit})


def taken_over() -> ServiceError:
    """Another stream of the same request goes on instead of this one."""
    return Aborted("another stream has taken this request over", reason="TAKEN_OVER")


def draining() -> ServiceError:
    """This gateway is shutting down; another one can go on with the request."""
    text = "this gateway is shutting down; resume or retry at another one"
    return Unavailable(text, reason="DRAINING", retry_after_ms=ELSEWHERE_RETRY_MS)


def tokenizer_mismatch(text: str) -> ServiceError:
    """The leader's workers have another tokenizer."""
    return FailedPrecondition(text, reason=TOKENIZER_MISMATCH)


def version_skew(text: str) -> ServiceError:
    """The leader is of another release; a gateway of that release can serve."""
    return Unavailable(text, reason=VERSION_SKEW, retry_after_ms=SKEW_RETRY_MS)
