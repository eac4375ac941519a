"""Why a term of leadership ends while its process goes on."""

from tessera.values.identity import Epoch


class TermEnd(Exception):
    """This term is over; the process stands by, and may lead again above epoch number `told`."""

    def __init__(self, message: str, told: int) -> None:
        super().__init__(message)
        self.told = told


class Deposed(TermEnd):
    """Another scheduler has taken a later epoch; this term has nothing more to say. `worker`: who said so, empty where the store did."""

    def __init__(self, message: str, told: int, worker: str = "") -> None:
        super().__init__(message, told)
        self.worker = worker

    @classmethod
    def by(cls, newer: Epoch) -> "Deposed":
        """Deposed by whoever took `newer`."""
        return cls(f"another scheduler of this group has taken over: epoch {newer.number} was taken", newer.number)


class GatewayAhead(TermEnd):
    """A gateway has seen epoch `told`, which Redis and the workers have lost: a new term has to begin above it."""

    def __init__(self, told: int) -> None:
        super().__init__(f"a gateway has seen epoch {told}", told)
