"""The store in memory: the same rules as in Redis, for tests. Nothing survives the process."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from services.scheduler.core.block_map import BlockPage
from services.scheduler.core.folded_log import read_back
from services.scheduler.core.journal_call import (
    Append,
    Applied,
    BeginRewrite,
    EndRewrite,
    Failed,
    FoldedRequest,
    Gap,
    Generation,
    JournalCall,
    JournalReply,
    LogEntry,
    OlderEpoch,
    RewriteChunk,
)
from services.scheduler.core.record import StoredState
from services.scheduler.store.port import (
    JOURNAL_FORMAT,
    EpochMoved,
    EpochTaken,
    LeaseView,
    LookReply,
    ReadReply,
    Released,
    ReleaseReply,
    Renewed,
    RenewReply,
    StoredJournal,
    TakeReply,
    WrongFormat,
)
from tessera.values.identity import NO_EPOCH, Epoch

_FULL = "OOM told to be full"


@dataclass(slots=True)
class _Side:
    """One generation's data."""

    generation: Generation | None = None
    last: int = 0
    log: list[LogEntry] = field(default_factory=list)
    requests: dict[bytes, FoldedRequest] = field(default_factory=dict)
    pages: dict[tuple[str, bytes, int], BlockPage] = field(default_factory=dict)

    def put(self, requests: Iterable[FoldedRequest], pages: Iterable[BlockPage]) -> None:
        self.requests.update((folded.request_id, folded) for folded in requests)
        self.pages.update(((page.worker, page.boot_id, page.index), page) for page in pages)

    def copy(self) -> "_Side":
        return replace(self, log=self.log[:], requests=self.requests.copy(), pages=self.pages.copy())


class MemoryStore:
    """`Store` in memory. `execute` is the whole of `call` without the waiting, for tests that step by hand.

    `failing` makes every call answer `Failed` without doing anything, as an unreachable server would; `is_full` makes it
    refuse what a full one does. `format` is that of what is stored. `now_ms` is the clock of leases.
    """

    def __init__(self, now_ms: Callable[[], float] = lambda: time.monotonic() * 1000) -> None:
        self.epoch = NO_EPOCH
        self.failing = False
        self.is_full = False
        self.format = JOURNAL_FORMAT
        self._now_ms = now_ms
        self._held_until_ms = 0.0
        self._complete: _Side | None = None
        self._begun: _Side | None = None

    async def look(self) -> LookReply:
        """See `Store`."""
        return self._refusal() or LeaseView(self.epoch, self._is_held, self._complete is None)

    async def take_epoch(self, expected: Epoch, new: Epoch, lease_ms: int) -> TakeReply:
        """See `Store`."""
        assert new.supersedes(expected), "a taken epoch is above the one before"
        if refusal := self._refusal():
            return refusal
        if self.epoch not in (expected, new):
            return EpochMoved(self.epoch)
        self.epoch = new
        self._held_until_ms = self._now_ms() + lease_ms
        return EpochTaken()

    async def renew(self, epoch: Epoch, lease_ms: int) -> RenewReply:
        """See `Store`."""
        if refusal := self._refusal():
            return Failed(refusal.why)
        if not epoch.supersedes(self.epoch):
            return OlderEpoch(self.epoch)
        self.epoch = epoch
        self._held_until_ms = self._now_ms() + lease_ms
        return Renewed()

    async def release(self, epoch: Epoch) -> ReleaseReply:
        """See `Store`."""
        if refusal := self._refusal():
            return Failed(refusal.why)
        if not epoch.supersedes(self.epoch):
            return OlderEpoch(self.epoch)
        if epoch == self.epoch:
            self._held_until_ms = 0.0
        return Released()

    async def read(self, epoch: Epoch) -> ReadReply:
        """See `Store`."""
        if refusal := self._refusal():
            return refusal
        return self.stored() if epoch.supersedes(self.epoch) else OlderEpoch(self.epoch)

    async def call(self, epoch: Epoch, call: JournalCall) -> JournalReply:
        """See `Store`."""
        if refusal := self._refusal():
            return Failed(refusal.why)
        return self.execute(epoch, call)

    async def close(self) -> None:
        """See `Store`."""

    def execute(self, epoch: Epoch, call: JournalCall) -> JournalReply:
        """Carry out `call` at once."""
        if not epoch.supersedes(self.epoch):
            return OlderEpoch(self.epoch)
        match call:
            case Append():
                return self._append(epoch, call)
            case BeginRewrite(generation):
                return self._begin(epoch, generation)
            case RewriteChunk():
                return self._chunk(epoch, call)
            case EndRewrite(generation, last):
                return self._end(epoch, generation, last)

    def stored(self) -> StoredJournal:
        """What a reader finds now: a copy."""
        side = self._complete
        if side is None:
            return StoredJournal(None, StoredState())
        folded = {key: FoldedRequest(item.as_of, item.request.copy()) for key, item in side.requests.items()}
        return StoredJournal(side.generation, read_back(side.last, side.log, folded, side.pages.values()))

    @property
    def log_len(self) -> int:
        """Entries in the log of the complete generation."""
        return 0 if self._complete is None else len(self._complete.log)

    @property
    def is_bare(self) -> bool:
        """Whether no request and no log entry is kept anywhere."""
        sides = [side for side in (self._complete, self._begun) if side is not None]
        return not any(side.requests or side.log for side in sides)

    def save(self) -> "MemoryStore":
        """A copy to go back to: a server restarted with an older file."""
        saved = MemoryStore(self._now_ms)
        saved.epoch, saved.format = self.epoch, self.format
        saved._complete = self._complete and self._complete.copy()
        saved._begun = self._begun and self._begun.copy()
        return saved

    @property
    def _is_held(self) -> bool:
        return self._now_ms() < self._held_until_ms

    def _refusal(self) -> Failed | WrongFormat | None:
        """What a call is answered that cannot even be looked at."""
        if self.failing:
            return Failed("told to fail")
        if self.format != JOURNAL_FORMAT:
            return WrongFormat(self.format, JOURNAL_FORMAT)
        return None

    def _append(self, epoch: Epoch, call: Append) -> JournalReply:
        side = self._complete
        if side is None or self.epoch != epoch or side.generation != call.generation or call.first > side.last + 1:
            return Gap(0 if side is None else side.last)
        if call.last <= side.last:
            return Applied(side.last)
        if self.is_full:
            return Failed(_FULL)
        side.log.extend(call.log[side.last + 1 - call.first :])
        side.last = call.last
        del side.log[: max(0, call.log_from - (side.last - len(side.log) + 1))]
        side.put(call.requests, call.pages)
        for request_id in call.forgotten:
            side.requests.pop(request_id, None)
        return Applied(side.last)

    def _begin(self, epoch: Epoch, generation: Generation) -> JournalReply:
        for side in (self._complete, self._begun):
            if side is not None and side.generation is not None and generation <= side.generation:
                return Failed(f"generation {generation} is not above {side.generation}")
        self.epoch = epoch
        self._begun = _Side(generation)
        return Applied(0 if self._complete is None else self._complete.last)

    def _chunk(self, epoch: Epoch, call: RewriteChunk) -> JournalReply:
        side = self._begun
        if side is None or self.epoch != epoch or side.generation != call.generation:
            return Failed(f"generation {call.generation} is not begun")
        if self.is_full:
            return Failed(_FULL)
        side.put(call.requests, call.pages)
        return Applied(0 if self._complete is None else self._complete.last)

    def _end(self, epoch: Epoch, generation: Generation, last: int) -> JournalReply:
        side = self._begun
        if side is None or self.epoch != epoch or side.generation != generation:
            return Failed(f"generation {generation} is not begun")
        side.last = last
        self._complete, self._begun = side, None
        return Applied(last)
