"""What is cached, as batches of vllm.grpc.engine: numbered without gaps from where the subscriber stands.

The numbers are of one stream. Each begins with a snapshot, which voids what its subscriber knew; so it does not matter who had numbered
that, this process or another, and no history is kept to be asked for. A subscriber hashes token ids itself: our digests only name blocks.
"""

import time
from collections.abc import Iterator
from typing import Any

from smg_grpc_proto.generated import common_pb2 as pb

from gateway.cached_blocks import CachedBlock, CacheEvent, Cleared, Removed, Stored
from services.gateway.cache_feed import Told
from services.gateway.vllm_engine.convert_answer import load_record_to_proto

START_MAX = 2**63
"""A stream that goes on from here will not come to the end of the numbers."""

BATCH_BLOCKS = 512
"""A batch tells of about so many at most: some 50 KB."""


class KvEventStream:
    """One subscriber's. `start`: the last number that it knows. The load comes with every batch, and in batches of its own, which repeat the last
    number; before the first batch, numbered 0, only where `takes_load_first`: others would take that for a repetition."""

    def __init__(self, start: int, takes_load_first: bool = False) -> None:
        self._number = start
        self._takes_load_first = takes_load_first
        self._has_begun = False
        self._num_loads = 0

    def batches(self, told: Told) -> Iterator[Any]:
        """What is told, as KvEventBatch messages."""
        if told.is_load_alone:
            if told.load is not None and (self._has_begun or self._takes_load_first):
                number = self._number if self._has_begun else 0
                yield pb.KvEventBatch(
                    sequence_number=number, timestamp=time.time(), dp_rank=0, load=self._load(told, alone=True)
                )
            return
        groups = list(_grouped(told.events))
        if told.is_whole:
            num_blocks = sum(len(event.blocks) for event in told.events if isinstance(event, Stored))
            groups = groups or [[]]
            for index, group in enumerate(groups):
                events = [pb.KvCacheEvent(cleared=pb.KvCacheCleared())] if index == 0 else []
                events += map(_event_to_proto, group)
                snapshot = pb.KvSnapshotChunk(index=index, count=len(groups), blocks=num_blocks)
                yield self._batch(told, events, snapshot)
            return
        for group in groups:
            yield self._batch(told, list(map(_event_to_proto, group)), None)

    def _batch(self, told: Told, events: list[Any], snapshot: Any) -> Any:
        self._number += 1
        self._has_begun = True
        if snapshot is None:
            for event in events:
                event.event_id = self._number
        load = self._load(told, alone=False) if told.load is not None else None
        return pb.KvEventBatch(
            sequence_number=self._number, timestamp=time.time(), events=events, dp_rank=0, snapshot=snapshot, load=load
        )

    def _load(self, told: Told, alone: bool) -> Any:
        assert told.load is not None, "there is a load to tell"
        self._num_loads += 1
        return load_record_to_proto(told.load, told.load_age_ms, self._num_loads, alone)


def _grouped(events: list[Stored] | list[CacheEvent]) -> Iterator[list[CacheEvent]]:
    """In order, with the longer ones cut: each group of about BATCH_BLOCKS blocks at most."""
    group: list[CacheEvent] = []
    room = BATCH_BLOCKS
    for event in events:
        for piece in _cut(event):
            size = _size(piece)
            if group and size > room:
                yield group
                group, room = [], BATCH_BLOCKS
            group.append(piece)
            room -= size
    if group:
        yield group


def _cut(event: CacheEvent) -> Iterator[CacheEvent]:
    match event:
        case Stored(blocks):
            for first in range(0, len(blocks), BATCH_BLOCKS):
                yield Stored(blocks[first : first + BATCH_BLOCKS])
        case Removed(digests):
            for first in range(0, len(digests), BATCH_BLOCKS):
                yield Removed(digests[first : first + BATCH_BLOCKS])
        case Cleared():
            yield event


def _size(event: CacheEvent) -> int:
    match event:
        case Stored(blocks):
            return len(blocks)
        case Removed(digests):
            return len(digests)
        case Cleared():
            return 0


def _event_to_proto(event: CacheEvent) -> Any:
    match event:
        case Stored(blocks):
            stored = pb.KvBlocksStored(blocks=map(_block_to_proto, blocks), tier=pb.KV_CACHE_TIER_DEVICE)
            if blocks[0].parent is not None:
                stored.parent_block_hash = _signed(blocks[0].parent)
            return pb.KvCacheEvent(stored=stored)
        case Removed(digests):
            hashes = map(_signed, digests)
            return pb.KvCacheEvent(removed=pb.KvBlocksRemoved(block_hashes=hashes, tier=pb.KV_CACHE_TIER_DEVICE))
        case Cleared():
            return pb.KvCacheEvent(cleared=pb.KvCacheCleared())


def _block_to_proto(block: CachedBlock) -> Any:
    token_ids = memoryview(block.token_ids).cast("i")
    return pb.KvBlock(block_hash=_signed(block.digest), token_ids=token_ids.tolist(), block_size=len(token_ids))


def _signed(digest: int) -> int:
    """The same 64 bits as the protocol has them."""
    return digest - (1 << 64) if digest >> 63 else digest
