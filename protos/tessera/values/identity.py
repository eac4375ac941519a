"""Who speaks, and for which incarnation: request ids and leader epochs."""

import secrets
from dataclasses import dataclass

REQUEST_ID_BYTES = 16
"""Length of an internal request id: 128 random bits, drawn by the gateway, never reused."""

INSTANCE_ID_BYTES = 16
"""Length of a process's random instance id (scheduler instance, worker boot)."""


def new_request_id() -> bytes:
    """Draw an internal request id (16 random bytes)."""
    return secrets.token_bytes(REQUEST_ID_BYTES)


def new_instance_id() -> bytes:
    """Draw the random id of one process incarnation (16 random bytes)."""
    return secrets.token_bytes(INSTANCE_ID_BYTES)


@dataclass(frozen=True, slots=True)
class Epoch:
    """A leader's term: a number, and the random id of the scheduler process that took it.

    Two leaders can draw the same number when Redis comes back from an older file, so an equal number
    counts only from the same instance; everybody else is told "older epoch" and takes a higher one.
    """

    number: int
    instance: bytes

    def supersedes(self, held: "Epoch") -> bool:
        """Whether a holder of `held` must accept a call made under this epoch (same term, or a later number)."""
        return self == held or self.number > held.number


EPOCH_LEAP_MAX = 1_000_000
"""How far above the last known one an epoch's number may be to be believed: one near the type's end would leave none to take."""

NO_EPOCH = Epoch(0, b"")
"""What a worker or a store holds before any leader has taken it."""
