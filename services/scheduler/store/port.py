"""The store port: what a scheduler needs of the place that keeps its journal."""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from services.scheduler.core.journal_call import Failed, Generation, JournalCall, JournalReply, OlderEpoch
from services.scheduler.core.record import StoredState
from tessera.values.identity import Epoch


@dataclass(frozen=True, slots=True)
class EpochTaken:
    """The new epoch is stored: calls under any earlier one are refused from now on."""


@dataclass(frozen=True, slots=True)
class EpochMoved:
    """Nothing was done: the stored epoch is `epoch`, not the expected one."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class StoredJournal:
    """What the last complete generation holds; an empty state and no generation where no generation is complete."""

    generation: Generation | None
    state: StoredState


TakeReply: TypeAlias = EpochTaken | EpochMoved | Failed
ReadReply: TypeAlias = StoredJournal | OlderEpoch | Failed


class Store(Protocol):
    """One scheduler group's state. Every answer is a value, and comes within a bounded time; nothing is raised for the world's faults.

    Calls come one at a time. A call that was answered `Failed` may still be carried out, even later and after others.
    An epoch equal to the stored one, or of a higher number, is accepted; anyone else is told `OlderEpoch`.
    """

    async def read_epoch(self) -> Epoch | Failed:
        """The stored epoch; NO_EPOCH where none was ever taken."""

    async def take_epoch(self, expected: Epoch, new: Epoch) -> TakeReply:
        """Store `new` if `expected` is stored now (compare and set)."""

    async def read(self, epoch: Epoch) -> ReadReply:
        """Read the last complete generation. Only after `take_epoch`: then nobody else can change it meanwhile."""

    async def call(self, epoch: Epoch, call: JournalCall) -> JournalReply:
        """Carry out one call of the journal, wholly or not at all. Carrying it out twice changes nothing more."""

    async def close(self) -> None:
        """Give up the connection."""
