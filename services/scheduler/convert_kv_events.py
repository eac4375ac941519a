"""Protobuf <-> values for what a gateway is told of prefix caches."""

import numpy as np
import numpy.typing as npt

from services.worker.convert import MalformedMessage
from tessera.scheduler.v1 import session_pb2
from tessera.values.kv_events import KvEvents, PoolChange


def kv_events_to_proto(events: KvEvents) -> session_pb2.KvEvents:
    """Message of `events`."""
    return session_pb2.KvEvents(changes=map(_change_to_proto, events.changes), begins=events.begins, more=events.more)


def kv_events_from_proto(message: session_pb2.KvEvents) -> KvEvents:
    """Changes of prefix caches."""
    return KvEvents(tuple(map(_change_from_proto, message.changes)), message.begins, message.more)


def _change_to_proto(change: PoolChange) -> session_pb2.PoolChange:
    return session_pb2.PoolChange(
        worker=change.worker,
        root=change.root,
        is_gone=change.is_gone,
        removed_block_ids=change.removed.tolist(),
        block_ids=change.block_ids.tolist(),
        digests=change.digests.astype("<u8").tobytes(),
        links=change.links.astype("<u8").tobytes(),
        have_parents=change.has_parent.astype(np.uint8).tobytes(),
        token_ids=change.token_ids.astype("<i4").tobytes(),
    )


def _change_from_proto(message: session_pb2.PoolChange) -> PoolChange:
    count = len(message.block_ids)
    token_ids = _column(message, "token_ids", "<i4").astype(np.int32)
    if len(token_ids) % count if count else len(token_ids):
        raise MalformedMessage(f"kv_events.changes.token_ids: {len(token_ids)} ids of {count} blocks")
    change = PoolChange(
        worker=message.worker,
        root=message.root,
        is_gone=message.is_gone,
        removed=np.array(message.removed_block_ids, np.int64),
        block_ids=np.array(message.block_ids, np.int64),
        digests=_column(message, "digests", "<u8").astype(np.uint64),
        links=_column(message, "links", "<u8").astype(np.uint64),
        has_parent=_column(message, "have_parents", "u1").astype(np.bool_),
        token_ids=token_ids.reshape(count, len(token_ids) // count if count else 0),
    )
    lengths = {len(change.digests), len(change.links), len(change.has_parent), count}
    if lengths != {count}:
        raise MalformedMessage(f"kv_events.changes: columns of {sorted(lengths)} rows")
    return change


def _column(message: session_pb2.PoolChange, name: str, dtype: str) -> npt.NDArray[np.generic]:
    data: bytes = getattr(message, name)
    if len(data) % np.dtype(dtype).itemsize:
        raise MalformedMessage(f"kv_events.changes.{name}: {len(data)} bytes")
    return np.frombuffer(data, dtype)
