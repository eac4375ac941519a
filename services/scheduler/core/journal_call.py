"""What the journal asks of the store, and what the store answers."""

from dataclasses import dataclass
from typing import TypeAlias

from services.scheduler.core.block_map import BlockPage
from services.scheduler.core.record import BlockDelta, DecodeColumns, StoredRequest
from tessera.values.identity import Epoch
from tessera.values.request import Submission


@dataclass(frozen=True, slots=True, order=True)
class Generation:
    """One full writing of the state: (epoch number, counter), a new one for each attempt. The store refuses a lower one."""

    epoch_number: int
    counter: int


@dataclass(frozen=True, slots=True)
class FoldedRequest:
    """A whole request as of record `as_of`. The store keeps its submission apart: it never changes, and is written once."""

    as_of: int
    request: StoredRequest

    @property
    def request_id(self) -> bytes:
        """The internal id."""
        return self.request.submission.request_id


@dataclass(frozen=True, slots=True)
class LogEntry:
    """What the log tells of one record.

    Columns that are no key name the same requests as the columns in the log before them, each with its next token: a store need not keep
    ids and offsets of those. The first columns of a generation's log are a key.
    """

    decoded: DecodeColumns | None = None
    is_key: bool = False
    blocks: tuple[BlockDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class Append:
    """Records `first` to `last`, in the form the store keeps them.

    Entry i of `log` is of record `first + i`; all else is the net effect of the call. `submissions` are those of
    new requests, `requests` and `pages` are as of record `last`. Log entries below `log_from` are needed no more:
    every request and page of blocks in them is stored whole as of a later record.
    """

    generation: Generation
    first: int
    log: tuple[LogEntry, ...]
    submissions: tuple[Submission, ...]
    requests: tuple[FoldedRequest, ...]
    forgotten: tuple[bytes, ...]
    pages: tuple[BlockPage, ...]
    log_from: int

    @property
    def last(self) -> int:
        """Number of the last record in this call."""
        return self.first + len(self.log) - 1


@dataclass(frozen=True, slots=True)
class BeginRewrite:
    """Start writing the whole state again beside the complete generation, which stays readable."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class RewriteChunk:
    """A piece of the state: whole requests, submissions included, and pages of prefix-cache entries."""

    generation: Generation
    requests: tuple[FoldedRequest, ...]
    pages: tuple[BlockPage, ...]


@dataclass(frozen=True, slots=True)
class EndRewrite:
    """The state as of record `last` is written: this generation becomes the complete one, the one before it goes."""

    generation: Generation
    last: int


JournalCall: TypeAlias = Append | BeginRewrite | RewriteChunk | EndRewrite


@dataclass(frozen=True, slots=True)
class Applied:
    """The call is in the store, now or from an earlier try. `last` is the last record of the complete generation."""

    last: int


@dataclass(frozen=True, slots=True)
class Gap:
    """Nothing was done: the records do not continue the store's state, whose last one is `last`. A rewrite is owed."""

    last: int


@dataclass(frozen=True, slots=True)
class OlderEpoch:
    """Nothing was done: `epoch` has been taken since. The caller's term is over."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Failed:
    """No word that the call was done; it may have been. `why` is for people."""

    why: str


JournalReply: TypeAlias = Applied | Gap | OlderEpoch | Failed
