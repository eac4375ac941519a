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
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_DRAINED: _ClassVar[WorkerState]

class RequestState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_STATE_UNSPECIFIED: _ClassVar[RequestState]
    REQUEST_STATE_WAITING: _ClassVar[RequestState]
    REQUEST_STATE_RUNNING: _ClassVar[RequestState]
    REQUEST_STATE_SWAPPED: _ClassVar[RequestState]
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_SERVING: WorkerState
WORKER_STATE_LEAVING: WorkerState
WORKER_STATE_AWAY: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_DRAINED: WorkerState
REQUEST_STATE_UNSPECIFIED: RequestState
REQUEST_STATE_WAITING: RequestState
REQUEST_STATE_RUNNING: RequestState
REQUEST_STATE_SWAPPED: RequestState

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

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("model", "epoch", "uptime_ms", "admission_paused", "durable", "journal_lag_records", "journal_lag_ms", "num_submitted", "num_ended", "num_sampled_tokens", "num_preemptions", "num_readable", "load")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_PAUSED_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_LAG_RECORDS_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_LAG_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_SUBMITTED_FIELD_NUMBER: _ClassVar[int]
    NUM_ENDED_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_READABLE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    uptime_ms: int
    admission_paused: bool
    durable: bool
    journal_lag_records: int
    journal_lag_ms: int
    num_submitted: int
    num_ended: int
    num_sampled_tokens: int
    num_preemptions: int
    num_readable: int
    load: Load
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., uptime_ms: _Optional[int] = ..., admission_paused: _Optional[bool] = ..., durable: _Optional[bool] = ..., journal_lag_records: _Optional[int] = ..., journal_lag_ms: _Optional[int] = ..., num_submitted: _Optional[int] = ..., num_ended: _Optional[int] = ..., num_sampled_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_readable: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests", "next_page_token")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestInfo]
    next_page_token: str
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class RequestInfo(_message.Message):
    __slots__ = ("id", "client_request_id", "principal", "state", "prompt_tokens", "output_tokens", "cached_tokens", "age_ms", "worker", "priority")
    ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    id: str
    client_request_id: str
    principal: str
    state: RequestState
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    age_ms: int
    worker: str
    priority: int
    def __init__(self, id: _Optional[str] = ..., client_request_id: _Optional[str] = ..., principal: _Optional[str] = ..., state: _Optional[_Union[RequestState, str]] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., age_ms: _Optional[int] = ..., worker: _Optional[str] = ..., priority: _Optional[int] = ...) -> None: ...

class AbortRequestsRequest(_message.Message):
    __slots__ = ("id", "principal")
    ID_FIELD_NUMBER: _ClassVar[int]
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    id: str
    principal: str
    def __init__(self, id: _Optional[str] = ..., principal: _Optional[str] = ...) -> None: ...

class AbortRequestsResponse(_message.Message):
    __slots__ = ("num_aborted",)
    NUM_ABORTED_FIELD_NUMBER: _ClassVar[int]
    num_aborted: int
    def __init__(self, num_aborted: _Optional[int] = ...) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetPrefixCacheResponse(_message.Message):
    __slots__ = ("num_forgotten_blocks", "num_held_blocks")
    NUM_FORGOTTEN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_forgotten_blocks: int
    num_held_blocks: int
    def __init__(self, num_forgotten_blocks: _Optional[int] = ..., num_held_blocks: _Optional[int] = ...) -> None: ...

class PauseAdmissionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseAdmissionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeAdmissionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeAdmissionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ("num_requests",)
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    def __init__(self, num_requests: _Optional[int] = ...) -> None: ...

class UndrainWorkerRequest(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class UndrainWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
