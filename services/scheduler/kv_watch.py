"""Which gateways are told of the workers' prefix caches, and what each has still to be told.

Nothing is kept for a gateway but what changed since it was last told: one that does not read is told of the whole again.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from kv_manager.hash_chain import namespace_link
from kv_manager.published_blocks import PublishedBlocks
from services.scheduler.core.held_blocks import kv_namespace
from services.scheduler.core.record import BlockDelta
from services.scheduler.core.replica import Replica
from services.scheduler.sessions import GatewaySession
from tessera.values.kv_events import KvEvents, PoolChange

PART_BLOCKS = 1024
"""A message tells of so many blocks, or of one larger change: about 100 KB, so that frames do not wait for long behind it."""

PENDING_BLOCKS_MAX = 32_768
"""A gateway that has not been told of so many changes is told of the whole again."""

_NO_IDS = np.empty(0, np.int64)


class KvOutbox:
    """What one session has to be told. `pools` are the workers' caches as they are now."""

    def __init__(self, pools: Callable[[], Iterable[Replica]], wake: Callable[[], None]) -> None:
        self._pools = pools
        self._wake = wake
        self._whole: Iterator[PoolChange] | None = None  # what is left of it
        self._next: PoolChange | None = None
        self._pending: deque[PoolChange] = deque()
        self._num_pending = 0
        self._is_void = True  # it is to be told of the whole

    def add(self, changes: Sequence[PoolChange]) -> None:
        """These have happened."""
        if not self._is_void:
            self._pending.extend(changes)
            self._num_pending += sum(change.size for change in changes)
            if self._num_pending > PENDING_BLOCKS_MAX:
                self._is_void = True
                self._pending.clear()
                self._num_pending = 0
        self._wake()

    def take(self) -> KvEvents | None:
        """The next message; None where there is nothing to tell. Wakes the session where there is more."""
        begins = self._is_void
        if begins:
            self._is_void = False
            self._whole = chain.from_iterable(map(_whole_of, self._pools()))
            self._next = next(self._whole, None)
        if self._whole is not None:
            told, self._next = self._next, next(self._whole, None)
            more = self._next is not None
            if not more:
                self._whole = None
            if more or self._pending:
                self._wake()
            return KvEvents(() if told is None else (told,), begins, more)
        changes: list[PoolChange] = []
        room = PART_BLOCKS
        while self._pending and (not changes or self._pending[0].size <= room):
            changes.append(self._pending.popleft())
            room -= changes[-1].size
        self._num_pending -= PART_BLOCKS - room
        if self._pending:
            self._wake()
        return KvEvents(tuple(changes)) if changes else None


class KvWatch:
    """All gateways that are told. Without one a turn costs one look."""

    def __init__(self, pools: Callable[[], Iterable[Replica]]) -> None:
        self._pools = pools
        self._outboxes: dict[GatewaySession, KvOutbox] = {}

    def __bool__(self) -> bool:
        return bool(self._outboxes)

    def watch(self, session: GatewaySession, is_on: bool) -> None:
        """A session is to be told from now on, of the whole first; or no more."""
        self.forget(session)
        if is_on:
            session.kv_events = self._outboxes[session] = KvOutbox(self._pools, session.wake)
            session.wake()

    def forget(self, session: GatewaySession) -> None:
        """A session is gone, or wants to be told nothing."""
        session.kv_events = None
        self._outboxes.pop(session, None)

    def changed(self, deltas: Iterable[BlockDelta]) -> None:
        """What the journal learns in a turn."""
        pools = {replica.name: replica for replica in self._pools()}
        changes = [_change_of(pools[delta.worker], delta) for delta in deltas if delta.worker in pools]
        if changes:
            self._add(changes)

    def lost(self, worker: str) -> None:
        """Nobody finds anything in this worker's cache, until it is there again and tells what it holds."""
        self._add([_change(worker, 0, PublishedBlocks.of(()), is_gone=True)])

    def _add(self, changes: Sequence[PoolChange]) -> None:
        for outbox in self._outboxes.values():
            outbox.add(changes)


def _whole_of(replica: Replica) -> Iterator[PoolChange]:
    published, root = replica.manager.published(), _root_of(replica)
    for first in range(0, len(published), PART_BLOCKS):
        yield _change(replica.name, root, published[first : first + PART_BLOCKS])


def _change_of(replica: Replica, delta: BlockDelta) -> PoolChange:
    return _change(delta.worker, _root_of(replica), PublishedBlocks.of(delta.published), np.array(delta.unpublished, np.int64))


def _root_of(replica: Replica) -> int:
    return namespace_link(kv_namespace(replica.description)) or 0


def _change(
    worker: str, root: int, published: PublishedBlocks, removed: np.ndarray = _NO_IDS, is_gone: bool = False
) -> PoolChange:
    rows = published.rows
    return PoolChange(
        worker=worker,
        root=root,
        is_gone=is_gone,
        removed=removed,
        block_ids=published.block_ids,
        digests=published.digests,
        links=rows["parent"],
        has_parent=(rows["step_and_parent"] & 1).astype(np.bool_),
        token_ids=rows["token_ids"],
    )
