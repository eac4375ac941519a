"""The numbered journal as a state machine: what to ask of the store next, and what has been acknowledged.

At most one call is in flight. The shell takes `next_call`, makes it, and gives the answer to `on_reply`; nothing here does I/O
or reads a clock. Times are microseconds on the caller's clock.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from services.scheduler.core.block_map import BlockPage
from services.scheduler.core.changes import Changes
from services.scheduler.core.folded_log import LogFolder
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
    OlderEpoch,
    RewriteChunk,
)
from services.scheduler.core.record import Record, StoredState
from tessera.values.config import Config
from tessera.values.identity import Epoch

RECORDS_PER_CALL_MAX = 64
CHUNK_TOKENS_MAX = 65_536
CHUNK_REQUESTS_MAX = 256
CHUNK_PAGES_MAX = 128

BLOCKS_PER_RECORD_MAX = 4096
"""A record that changes more prefix-cache entries is not appended: a rewrite tells it in pieces. A step's own are fewer."""

RETRY_US_MIN = 20_000
RETRY_US_MAX = 1_000_000
"""Pause after a failed call; doubles with each failure in a row."""


@dataclass(frozen=True, slots=True)
class WorkerStep:
    """The output of one step of one boot of a worker."""

    worker: str
    boot_id: bytes
    step_id: int


@dataclass(slots=True)
class _Unacknowledged:
    """Records up to `number`, the oldest of them made at `since_us`, and per worker the last step whose effects they hold."""

    number: int
    since_us: int
    steps: dict[str, WorkerStep] = field(default_factory=dict)

    def merge(self, later: "_Unacknowledged") -> None:
        self.number = later.number
        self.steps.update(later.steps)


class Journal:
    """One leader's journal, from its first record, which holds everything it recovered, to the end of its term.

    It begins with a rewrite, and owes another one when the store's state is not continued by the records (`Gap`), when more
    than `journal_backlog_max` records wait, or when a worker comes back under a new boot or is removed (dropping its
    entries one by one would be unbounded), or brings a whole cache. While a rewrite is owed, records go into the state that it will write;
    while it runs, they wait, so that it writes the state as of one record.
    """

    def __init__(self, config: Config, epoch_number: int, last_record: int) -> None:
        self._wait_us = config.journal_wait_ms * 1000
        self._backlog_max = config.journal_backlog_max
        self._generation = Generation(epoch_number, 0)
        self._folder = LogFolder(last_record)
        self._backlog: deque[Record] = deque()
        self._rewrite_owed = True
        self._rewrite: Iterator[JournalCall] | None = None
        self._retry: Append | None = None
        self._in_flight: JournalCall | None = None
        self._not_before_us = 0
        self._retry_us = RETRY_US_MIN
        self._unacknowledged: deque[_Unacknowledged] = deque()
        self._boots: dict[str, bytes] = {}
        self._durable_steps: dict[str, WorkerStep] = {}  # by worker, of its present boot
        self._lost = False
        self._recovered = last_record
        self.last_record = last_record
        self.acked = last_record
        self.superseded: Epoch | None = None

    @property
    def backlog_len(self) -> int:
        """Records not yet handed to the store."""
        return len(self._backlog)

    def lag_us(self, now_us: int) -> int:
        """The age of the oldest record that the store has not acknowledged; 0 where it has all."""
        return now_us - self._unacknowledged[0].since_us if self._unacknowledged else 0

    def add(self, changes: Changes, now_us: int, step: WorkerStep | None = None) -> Record:
        """Number the next changes; `step` names the worker output whose effects they hold, if they hold one's."""
        self.last_record += 1
        record = Record(
            self.last_record, changes.requests, changes.blocks, changes.forgotten, changes.decoded, changes.removed_workers
        )
        is_unbounded = self._retires_boot(record) or _num_blocks(record) > BLOCKS_PER_RECORD_MAX
        pending = _Unacknowledged(record.number, now_us)
        if step is not None:
            pending.steps[step.worker] = step
        if self._rewrite_owed:
            self._folder.absorb(record)
            if self._unacknowledged:
                self._unacknowledged[-1].merge(pending)
            else:
                self._unacknowledged.append(pending)
            return record
        self._backlog.append(record)
        self._unacknowledged.append(pending)
        if is_unbounded or len(self._backlog) > self._backlog_max:
            self._owe_rewrite()
        return record

    def cover(self, step: WorkerStep) -> None:
        """An output that changed nothing here (it only dropped slots) is as durable as the records made so far."""
        if self._unacknowledged:
            self._unacknowledged[-1].steps[step.worker] = step
        else:
            self._durable_steps[step.worker] = step

    def next_call(self, now_us: int) -> JournalCall | None:
        """The call to make now; None while one is in flight, before a retry is due, and when the store has everything."""
        if self._in_flight is not None or self.superseded is not None or now_us < self._not_before_us:
            return None
        self._in_flight = self._choose_call()
        return self._in_flight

    def on_reply(self, reply: JournalReply, now_us: int) -> None:
        """The answer to the call in flight. A shell that gave up waiting answers with `Failed`."""
        call, self._in_flight = self._in_flight, None
        assert call is not None, "no call is in flight"
        match reply:
            case OlderEpoch(epoch):
                self.superseded = epoch
            case Applied(last):
                self._retry_us = RETRY_US_MIN
                self._on_applied(call, last)
            case Gap(last):
                self._on_gap(last)
            case Failed():
                self._not_before_us = now_us + self._retry_us
                self._retry_us = min(2 * self._retry_us, RETRY_US_MAX)
                if isinstance(call, Append):
                    self._retry = None if self._rewrite_owed else call
                else:
                    self._owe_rewrite()

    def store_was_emptied(self) -> None:
        """The store was seen to hold nothing. One rewrite mends that; a no-op while it is owed or under way."""
        if self.is_stored:
            self._lost = True
            self._owe_rewrite()

    @property
    def is_stored(self) -> bool:
        """Whether the store has acknowledged the whole state, and has not been seen to lose it."""
        return self.acked > self._recovered and not self._lost

    def is_durable(self, now_us: int) -> bool:
        """Whether the store keeps up: false from `journal_wait_ms` without an acknowledgement until it has caught up, and
        from the moment it is seen to have lost acknowledged records until the rewrite is done."""
        overdue_us = self._overdue_us()
        return not self._lost and (overdue_us is None or now_us < overdue_us)

    def durable_step(self, worker: str, boot_id: bytes) -> int:
        """The highest step of this boot whose output's record is acknowledged; 0 before any."""
        step = self._durable_steps.get(worker)
        return step.step_id if step is not None and step.boot_id == boot_id else 0

    def wake_us(self, now_us: int) -> int | None:
        """The next time at which, without any event, `next_call` or `is_durable` may answer differently; None for never."""
        times = [self._overdue_us()]
        if self._in_flight is None and (self._rewrite_owed or self._rewrite or self._retry or self._backlog):
            times.append(self._not_before_us)
        return min((time for time in times if time is not None and time > now_us), default=None)

    def _overdue_us(self) -> int | None:
        """When the oldest record will have waited too long."""
        return self._unacknowledged[0].since_us + self._wait_us if self._unacknowledged else None

    def _choose_call(self) -> JournalCall | None:
        # Never before the first record: it holds what was recovered.
        if self._rewrite_owed and self.last_record > self._recovered:
            self._generation = Generation(self._generation.epoch_number, self._generation.counter + 1)
            self._rewrite_owed = False
            self._rewrite = _rewrite(self._generation, self._folder.state())
        if self._rewrite is not None:
            return next(self._rewrite)
        if self._retry is not None:
            return self._retry
        if self._backlog:
            records = list(islice(self._backlog, RECORDS_PER_CALL_MAX))
            for _ in records:
                self._backlog.popleft()
            return self._folder.append(self._generation, records)
        return None

    def _on_applied(self, call: JournalCall, last: int) -> None:
        match call:
            case Append() if last < call.last:
                self._on_gap(last)
            case Append():
                self._retry = None
                self._acknowledge(call.last)
            case EndRewrite():
                self._rewrite = None
                self._lost = False
                self._folder.rewritten()
                self._acknowledge(call.last)
            case _:
                pass

    def _on_gap(self, last: int) -> None:
        self._lost = self._lost or last < self.acked
        self._owe_rewrite()

    def _acknowledge(self, number: int) -> None:
        self.acked = max(self.acked, number)
        while self._unacknowledged and self._unacknowledged[0].number <= number:
            self._durable_steps.update(self._unacknowledged.popleft().steps)

    def _owe_rewrite(self) -> None:
        """Give up what is queued or half done; one rewrite brings the store up to date."""
        self._rewrite_owed = True
        self._rewrite = None
        self._retry = None
        while self._backlog:
            self._folder.absorb(self._backlog.popleft())
        while len(self._unacknowledged) > 1:
            later = self._unacknowledged.pop()
            self._unacknowledged[-1].merge(later)

    def _retires_boot(self, record: Record) -> bool:
        """Whether a worker came back under a new boot or is gone. Of one that is gone nothing is kept."""
        retires = False
        for worker in record.removed_workers:
            retires |= self._boots.pop(worker, None) is not None
            self._durable_steps.pop(worker, None)
            for item in self._unacknowledged:
                item.steps.pop(worker, None)
        for delta in record.blocks:
            retires |= self._boots.setdefault(delta.worker, delta.boot_id) != delta.boot_id
            self._boots[delta.worker] = delta.boot_id
        return retires


def _rewrite(generation: Generation, state: StoredState) -> Iterator[JournalCall]:
    """The calls that write `state`, which must not change before the last of them is taken."""
    yield BeginRewrite(generation)
    for requests in _request_chunks(state):
        yield RewriteChunk(generation, requests, ())
    pages = _pages(state)
    while chunk := tuple(islice(pages, CHUNK_PAGES_MAX)):
        yield RewriteChunk(generation, (), chunk)
    yield EndRewrite(generation, state.last)


def _request_chunks(state: StoredState) -> Iterator[tuple[FoldedRequest, ...]]:
    chunk: list[FoldedRequest] = []
    tokens = 0
    for request in state.requests.values():
        chunk.append(FoldedRequest(state.last, request.copy()))
        tokens += len(request.submission.prompt_token_ids) + len(request.output_token_ids)
        tokens += 2 * request.num_logprobs  # an id and a number each
        if tokens >= CHUNK_TOKENS_MAX or len(chunk) == CHUNK_REQUESTS_MAX:
            yield tuple(chunk)
            chunk, tokens = [], 0
    if chunk:
        yield tuple(chunk)


def _pages(state: StoredState) -> Iterator[BlockPage]:
    for (worker, boot_id), blocks in state.blocks.items():
        for index in blocks.page_indices():
            yield BlockPage(state.last, worker, boot_id, index, blocks.page(index))


def _num_blocks(record: Record) -> int:
    return sum(len(delta.published) + len(delta.unpublished) for delta in record.blocks)
