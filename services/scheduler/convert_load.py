"""Protobuf <-> values of loads; the messages are those of the administration's public API."""

from services.worker.convert import MalformedMessage
from tessera.v1 import admin_pb2 as pb
from tessera.values.load import GroupLoad, WorkerLoad, WorkerState

_STATE_TO_PROTO = {state: f"WORKER_STATE_{state.name}" for state in WorkerState}
_STATE_FROM_PROTO = {pb.WorkerState.Value(name): state for state, name in _STATE_TO_PROTO.items()}


def load_to_proto(load: GroupLoad) -> pb.Load:
    """Message of `load`."""
    return pb.Load(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_swapped=load.num_swapped,
        used_kv_tokens=load.used_kv_tokens,
        total_kv_tokens=load.total_kv_tokens,
        prefix_hit_rate=load.prefix_hit_rate,
        generation_tokens_per_s=load.generation_tokens_per_s,
        num_waiting_uncached_tokens=load.num_waiting_uncached_tokens,
        max_running=load.max_running,
        workers=[_worker_to_proto(worker) for worker in load.workers],
    )


def load_from_proto(message: pb.Load) -> GroupLoad:
    """The load of a group."""
    return GroupLoad(
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        num_swapped=message.num_swapped,
        used_kv_tokens=message.used_kv_tokens,
        total_kv_tokens=message.total_kv_tokens,
        prefix_hit_rate=message.prefix_hit_rate,
        generation_tokens_per_s=message.generation_tokens_per_s,
        num_waiting_uncached_tokens=message.num_waiting_uncached_tokens,
        max_running=message.max_running,
        workers=tuple(map(_worker_from_proto, message.workers)),
    )


def _worker_to_proto(worker: WorkerLoad) -> pb.WorkerLoad:
    return pb.WorkerLoad(
        address=worker.address,
        state=_STATE_TO_PROTO[worker.state],
        num_running=worker.num_running,
        num_swapped=worker.num_swapped,
        used_kv_tokens=worker.used_kv_tokens,
        total_kv_tokens=worker.total_kv_tokens,
    )


def _worker_from_proto(message: pb.WorkerLoad) -> WorkerLoad:
    state = _STATE_FROM_PROTO.get(message.state)
    if state is None:
        raise MalformedMessage(f"load.workers: unknown state {message.state}")
    return WorkerLoad(
        message.address,
        state,
        message.num_running,
        message.num_swapped,
        message.used_kv_tokens,
        message.total_kv_tokens,
    )
