from tessera.worker.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RequestStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_STATUS_UNSPECIFIED: _ClassVar[RequestStatus]
    REQUEST_STATUS_WAITING: _ClassVar[RequestStatus]
    REQUEST_STATUS_RUNNING: _ClassVar[RequestStatus]
    REQUEST_STATUS_FINISHED: _ClassVar[RequestStatus]
    REQUEST_STATUS_SWAPPED: _ClassVar[RequestStatus]
    REQUEST_STATUS_ABORTED: _ClassVar[RequestStatus]
REQUEST_STATUS_UNSPECIFIED: RequestStatus
REQUEST_STATUS_WAITING: RequestStatus
REQUEST_STATUS_RUNNING: RequestStatus
REQUEST_STATUS_FINISHED: RequestStatus
REQUEST_STATUS_SWAPPED: RequestStatus
REQUEST_STATUS_ABORTED: RequestStatus

class StoredRequest(_message.Message):
    __slots__ = ("as_of", "arrival", "status", "subscriber", "attempt", "worker", "output_token_ids", "block_ids", "finish", "num_cached_tokens", "queue_us", "ttft_us", "total_us", "num_preemptions", "tokens_max", "logprobs", "prompt_logprobs")
    AS_OF_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    TTFT_US_FIELD_NUMBER: _ClassVar[int]
    TOTAL_US_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    as_of: int
    arrival: Arrival
    status: RequestStatus
    subscriber: int
    attempt: int
    worker: str
    output_token_ids: bytes
    block_ids: bytes
    finish: _types_pb2.Finish
    num_cached_tokens: int
    queue_us: int
    ttft_us: int
    total_us: int
    num_preemptions: int
    tokens_max: int
    logprobs: _types_pb2.Logprobs
    prompt_logprobs: _types_pb2.Logprobs
    def __init__(self, as_of: _Optional[int] = ..., arrival: _Optional[_Union[Arrival, _Mapping]] = ..., status: _Optional[_Union[RequestStatus, str]] = ..., subscriber: _Optional[int] = ..., attempt: _Optional[int] = ..., worker: _Optional[str] = ..., output_token_ids: _Optional[bytes] = ..., block_ids: _Optional[bytes] = ..., finish: _Optional[_Union[_types_pb2.Finish, _Mapping]] = ..., num_cached_tokens: _Optional[int] = ..., queue_us: _Optional[int] = ..., ttft_us: _Optional[int] = ..., total_us: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., tokens_max: _Optional[int] = ..., logprobs: _Optional[_Union[_types_pb2.Logprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_types_pb2.Logprobs, _Mapping]] = ...) -> None: ...

class Arrival(_message.Message):
    __slots__ = ("epoch_number", "counter")
    EPOCH_NUMBER_FIELD_NUMBER: _ClassVar[int]
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    epoch_number: int
    counter: int
    def __init__(self, epoch_number: _Optional[int] = ..., counter: _Optional[int] = ...) -> None: ...
