"""Failures that a caller is told about: one small tree, mapped to gRPC statuses in one place (`services.rpc.status`).

Every error has a `reason` (UPPER_SNAKE_CASE, stable, for machines), a message (for people; names the numbers) and `metadata`
(the same numbers for machines). Anything else that a handler raises is a bug, and becomes INTERNAL with a fixed text.
"""

from dataclasses import dataclass

TOKENIZER_MISMATCH = "TOKENIZER_MISMATCH"
"""Reason of the FailedPrecondition where gateway and worker were started with different tokenizers."""


class ServiceError(Exception):
    """Base of what a caller is told about."""

    def __init__(self, message: str, *, reason: str, metadata: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.metadata = metadata or {}


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One refused field: its path in the request message, for example `generation.sampling.top_p`, and why."""

    field: str
    description: str


class InvalidArgument(ServiceError):
    """The request itself is wrong; it would be at any time."""

    def __init__(
        self,
        violations: tuple[FieldViolation, ...],
        *,
        reason: str = "INVALID_FIELD",
        metadata: dict[str, str] | None = None,
    ) -> None:
        assert violations, "a refusal names at least one field"
        text = "; ".join(f"{item.field}: {item.description}" for item in violations)
        super().__init__(text, reason=reason, metadata=metadata)
        self.violations = violations

    @classmethod
    def of(cls, error: ValueError, reason: str = "INVALID_FIELD") -> "InvalidArgument":
        """Of an error whose text is the one field's name, a colon, and what is wrong with it."""
        field, _, description = str(error).partition(": ")
        return cls((FieldViolation(field, description),), reason=reason)


class NotFound(ServiceError):
    """Nothing of this name lives here."""


class AlreadyExists(ServiceError):
    """The name is taken."""


class FailedPrecondition(ServiceError):
    """Two sides do not fit together; trying again does not help until somebody changes one of them."""


class Unauthenticated(ServiceError):
    """The caller does not say who it is, or not so that it can be believed."""


class PermissionDenied(ServiceError):
    """The caller is known, and may not do this."""


class Aborted(ServiceError):
    """Somebody else took over what this call was doing."""


class Internal(ServiceError):
    """This one request failed here; the text is safe to show."""


class DeadlineExceeded(ServiceError):
    """It took longer than its caller allowed."""


class Unimplemented(ServiceError):
    """A method that another server of this service may have, and this one has not."""


class RetryableError(ServiceError):
    """It can work later: `retry_after_ms` milliseconds from now is a good time; 0 means there is no telling."""

    def __init__(self, message: str, *, reason: str, retry_after_ms: int, metadata: dict[str, str] | None = None) -> None:
        super().__init__(message, reason=reason, metadata=metadata)
        self.retry_after_ms = retry_after_ms


class Overloaded(RetryableError):
    """Too much is asked for at the moment. `subject`: whose quota it is, for example `principal:NAME`; empty where it is nobody's."""

    def __init__(
        self, message: str, *, reason: str, retry_after_ms: int, metadata: dict[str, str] | None = None, subject: str = ""
    ) -> None:
        super().__init__(message, reason=reason, retry_after_ms=retry_after_ms, metadata=metadata)
        self.subject = subject


class Unavailable(RetryableError):
    """What is needed to answer is not there at the moment."""
