"""How commands that ask a gateway end."""

from tessera.client import DeadlineExceeded, InvalidArgument, NotFound, TesseraError, Unavailable

FAILED = 1
REFUSED = 2
UNREACHABLE = 3
INTERRUPTED = 130
"""After a signal: 128 + SIGINT."""


def exit_status(error: TesseraError) -> int:
    """Where a call failed so: whether it was refused, or nobody answers, or anything else."""
    match error:
        case InvalidArgument() | NotFound():
            return REFUSED
        case Unavailable() | DeadlineExceeded():
            return UNREACHABLE
        case _:
            return FAILED
