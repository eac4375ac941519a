"""Which requests may be what brings workers down, and when that is proven."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from services.scheduler.core.sequence import Sequence
from services.scheduler.core.step_plan import IssuedBatch
from services.scheduler.core.worker_loss import LossKind, WorkerLoss

ALONE_AFTER = 2
"""Losses in a row after which a request is computed alone."""

GUILTY_AFTER = 2
"""Losses while it was computed alone after which a request ends."""


@dataclass(frozen=True, slots=True)
class _Charge:
    boot_id: bytes  # of the worker lost; empty where it lives and has refused the batch
    is_trial: bool  # the request was computed alone because of the charges before


@dataclass(slots=True)
class Suspicion:
    """What speaks against a request: positions `[first, end)` were in flight at every one of the losses in `charges`.

    One request brings a worker down at one of its positions. So a loss in flight over other positions begins a new suspicion, and an
    output that leaves them behind ends it: whoever only stood by when workers were killed is never taken for the cause.
    """

    sequence: Sequence
    first: int
    end: int
    charges: list[_Charge] = field(default_factory=list)

    @property
    def is_strong(self) -> bool:
        """Whether the request has to be computed alone."""
        return len(self.charges) >= ALONE_AFTER

    @property
    def is_proven(self) -> bool:
        """Whether the request ends."""
        return self.is_strong and sum(charge.is_trial for charge in self.charges) >= GUILTY_AFTER


class Suspects:
    """All suspicions of one scheduler, by request."""

    __slots__ = ("_suspicions", "strong")

    def __init__(self) -> None:
        self._suspicions: dict[bytes, Suspicion] = {}
        self.strong: dict[bytes, Suspicion] = {}  # those who have to be computed alone

    def __len__(self) -> int:
        return len(self._suspicions)

    def charge(self, in_flight: Iterable[IssuedBatch], boot_id: bytes, loss: WorkerLoss) -> list[Sequence]:
        """A worker was lost with these batches in flight, whose sequences still hold their slots. Returns those who are proven
        guilty: the caller ends them."""
        if loss.kind is LossKind.LEFT:
            return []
        is_refusal = loss.kind is LossKind.REFUSED
        meant = [batch for batch in in_flight if not is_refusal or loss.step_id in (None, batch.step_id)]
        rows = {
            sequence.request_id: sequence
            for batch in meant
            for sequence, attempt in zip(batch.sequences, batch.attempts, strict=True)
            if sequence.attempt == attempt and sequence.slot is not None
        }
        everybody = {
            sequence.request_id for batch in meant for sequence in batch.sequences
        }  # those that have ended meanwhile too
        accuser = b"" if is_refusal else boot_id
        return [sequence for sequence in rows.values() if self._add(sequence, accuser, len(everybody) == 1).is_proven]

    def withdraw(self, boot_id: bytes) -> None:
        """A worker thought lost is back, under the same boot: it was cut off, and nothing brought it down."""
        for suspicion in list(self._suspicions.values()):
            suspicion.charges = [charge for charge in suspicion.charges if charge.boot_id != boot_id]
            self._sort(suspicion)

    def clear(self, sequences: Iterable[Sequence]) -> None:
        """Outputs of these sequences have come, or they ended: who has got beyond the positions in question is free of suspicion."""
        for sequence in sequences:
            suspicion = self._suspicions.get(sequence.request_id)
            if suspicion is not None and (sequence.finish is not None or sequence.ledger.computed_len >= suspicion.end):
                suspicion.charges.clear()
                self._sort(suspicion)

    def check_integrity(self) -> None:
        """Assert that suspicions are of live requests, and sorted."""
        for request_id, suspicion in self._suspicions.items():
            assert suspicion.charges and suspicion.sequence.finish is None and suspicion.first < suspicion.end
            assert suspicion.is_strong == (request_id in self.strong)
        assert self.strong.keys() <= self._suspicions.keys()

    def _add(self, sequence: Sequence, boot_id: bytes, is_alone: bool) -> Suspicion:
        first, end = sequence.ledger.computed_len, sequence.ledger.scheduled_len
        suspicion = self._suspicions.get(sequence.request_id)
        if suspicion is None or not max(first, suspicion.first) < min(end, suspicion.end):
            suspicion = self._suspicions[sequence.request_id] = Suspicion(sequence, first, end)
        suspicion.first, suspicion.end = max(first, suspicion.first), min(end, suspicion.end)
        suspicion.charges.append(_Charge(boot_id, is_alone and suspicion.is_strong))
        self._sort(suspicion)
        return suspicion

    def _sort(self, suspicion: Suspicion) -> None:
        request_id = suspicion.sequence.request_id
        if not suspicion.charges:
            self._suspicions.pop(request_id, None)
        if suspicion.is_strong:
            self.strong[request_id] = suspicion
        else:
            self.strong.pop(request_id, None)
