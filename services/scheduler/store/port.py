"""The store port: what a scheduler needs of the place that keeps its journal and the group's lease."""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from services.scheduler.core.journal_call import Failed, Generation, JournalCall, JournalReply, OlderEpoch
from services.scheduler.core.record import StoredState
from tessera.values.identity import Epoch

JOURNAL_FORMAT = "5"
"""The form of everything kept in a store. A change that the code before it would misread takes the next number."""

UNNUMBERED_FORMAT = "1"
"""The form of a store that does not name one: they did not have numbers then."""


@dataclass(frozen=True, slots=True)
class LeaseView:
    """Who leads, as the store knows it: the stored epoch (NO_EPOCH where none was ever taken), whether its holder's lease runs, and
    whether the store is empty, that is, no generation of a journal is complete in it."""

    epoch: Epoch
    is_held: bool
    is_empty: bool


@dataclass(frozen=True, slots=True)
class WrongFormat:
    """Nothing was read or done: the store holds something written in format `found`, and this code knows only `expected`."""

    found: str
    expected: str

    @property
    def why(self) -> str:
        """For people."""
        return (
            f"the store holds a journal of format {self.found}, and this version of Tessera reads and writes format {self.expected}: "
            "let the version that wrote it finish its requests, then give this one another group or a store without that group's keys"
        )


@dataclass(frozen=True, slots=True)
class EpochTaken:
    """The new epoch is stored and its lease runs: calls under any earlier one are refused from now on."""


@dataclass(frozen=True, slots=True)
class EpochMoved:
    """Nothing was done: the stored epoch is `epoch`, not the expected one."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Renewed:
    """The epoch is the stored one, and its lease runs for the time asked."""


@dataclass(frozen=True, slots=True)
class Released:
    """The epoch has no lease any more: the next scheduler need not wait."""


@dataclass(frozen=True, slots=True)
class StoredJournal:
    """What the last complete generation holds; an empty state and no generation where no generation is complete."""

    generation: Generation | None
    state: StoredState


LookReply: TypeAlias = LeaseView | WrongFormat | Failed
TakeReply: TypeAlias = EpochTaken | EpochMoved | WrongFormat | Failed
RenewReply: TypeAlias = Renewed | OlderEpoch | Failed
ReleaseReply: TypeAlias = Released | OlderEpoch | Failed
ReadReply: TypeAlias = StoredJournal | OlderEpoch | WrongFormat | Failed


class Store(Protocol):
    """One scheduler group's state. Every answer is a value, and comes within a bounded time; nothing is raised for the world's faults.

    Calls of the lease (`look`, `take_epoch`, `renew`, `release`) come one at a time, and so do calls of the journal (`read`, `call`);
    neither kind waits for the other. A call that was answered `Failed` may still be carried out, even later and after others. A call
    made again after that does no more than one.

    The fence is the stored epoch, not the life of its lease: under an epoch equal to the stored one, or of a higher number, calls are
    accepted; anyone else is told `OlderEpoch`. A store in another format is not touched: where the reply has no
    `WrongFormat`, `Failed` says so. A full store refuses whatever makes the journal longer, and nothing else.
    """

    async def look(self) -> LookReply:
        """Who leads, changing nothing."""

    async def take_epoch(self, expected: Epoch, new: Epoch, lease_ms: int) -> TakeReply:
        """Store `new` if `expected` is stored now (compare and set), and start its lease. Whether the lease of `expected` still runs
        is for the caller to judge."""

    async def renew(self, epoch: Epoch, lease_ms: int) -> RenewReply:
        """Have the lease of `epoch` run for `lease_ms` from now. A lease that ended begins again, and an epoch that the store has lost is
        stored again."""

    async def release(self, epoch: Epoch) -> ReleaseReply:
        """End the lease of `epoch`, which stays the stored one."""

    async def read(self, epoch: Epoch) -> ReadReply:
        """Read the last complete generation. Only after `take_epoch`: then nobody else can change it meanwhile."""

    async def call(self, epoch: Epoch, call: JournalCall) -> JournalReply:
        """Carry out one call of the journal, wholly or not at all. Carrying it out twice changes nothing more."""

    async def close(self) -> None:
        """Give up the connections."""
