from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_SERVING: _ClassVar[WorkerState]
    WORKER_STATE_LEAVING: _ClassVar[WorkerState]
    WORKER_STATE_AWAY: _ClassVar[WorkerState]
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_SERVING: WorkerState
WORKER_STATE_LEAVING: WorkerState
WORKER_STATE_AWAY: WorkerState

class WorkerLoad(_message.Message):
    __slots__ = ("address", "state", "num_running", "num_swapped", "used_kv_tokens", "total_kv_tokens")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_FIELD_NUMBER: _ClassVar[int]
    USED_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    address: str
    state: WorkerState
    num_running: int
    num_swapped: int
    used_kv_tokens: int
    total_kv_tokens: int
    def __init__(self, address: _Optional[str] = ..., state: _Optional[_Union[WorkerState, str]] = ..., num_running: _Optional[int] = ..., num_swapped: _Optional[int] = ..., used_kv_tokens: _Optional[int] = ..., total_kv_tokens: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_swapped", "used_kv_tokens", "total_kv_tokens", "prefix_hit_rate", "generation_tokens_per_s", "num_waiting_uncached_tokens", "max_running", "workers")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_FIELD_NUMBER: _ClassVar[int]
    USED_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_swapped: int
    used_kv_tokens: int
    total_kv_tokens: int
    prefix_hit_rate: float
    generation_tokens_per_s: float
    num_waiting_uncached_tokens: int
    max_running: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerLoad]
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_swapped: _Optional[int] = ..., used_kv_tokens: _Optional[int] = ..., total_kv_tokens: _Optional[int] = ..., prefix_hit_rate: _Optional[float] = ..., generation_tokens_per_s: _Optional[float] = ..., num_waiting_uncached_tokens: _Optional[int] = ..., max_running: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerLoad, _Mapping]]] = ...) -> None: ...
