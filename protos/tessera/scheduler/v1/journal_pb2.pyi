from tessera.scheduler.v1 import session_pb2 as _session_pb2
from tessera.worker.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RequestStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_STATUS_UNSPECIFIED: _ClassVar[RequestStatus]
    REQUEST_STATUS_WAITING: _ClassVar[RequestStatus]
    REQUEST_STATUS_RUNNING: _ClassVar[RequestStatus]
    REQUEST_STATUS_FINISHED: _ClassVar[RequestStatus]
REQUEST_STATUS_UNSPECIFIED: RequestStatus
REQUEST_STATUS_WAITING: RequestStatus
REQUEST_STATUS_RUNNING: RequestStatus
REQUEST_STATUS_FINISHED: RequestStatus

class JournalRecord(_message.Message):
    __slots__ = ("number", "requests", "blocks", "forgotten_request_ids")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    number: int
    requests: _containers.RepeatedCompositeFieldContainer[RequestDelta]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockDelta]
    forgotten_request_ids: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, number: _Optional[int] = ..., requests: _Optional[_Iterable[_Union[RequestDelta, _Mapping]]] = ..., blocks: _Optional[_Iterable[_Union[BlockDelta, _Mapping]]] = ..., forgotten_request_ids: _Optional[_Iterable[bytes]] = ...) -> None: ...

class RequestDelta(_message.Message):
    __slots__ = ("request_id", "submission", "arrival", "subscriber", "token_offset", "token_ids", "status", "attempt", "worker", "table_offset", "block_ids", "finish", "num_cached_tokens", "queue_us", "ttft_us", "total_us")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    TABLE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    TTFT_US_FIELD_NUMBER: _ClassVar[int]
    TOTAL_US_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    submission: _session_pb2.Submission
    arrival: Arrival
    subscriber: int
    token_offset: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    status: RequestStatus
    attempt: int
    worker: str
    table_offset: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    finish: _types_pb2.Finish
    num_cached_tokens: int
    queue_us: int
    ttft_us: int
    total_us: int
    def __init__(self, request_id: _Optional[bytes] = ..., submission: _Optional[_Union[_session_pb2.Submission, _Mapping]] = ..., arrival: _Optional[_Union[Arrival, _Mapping]] = ..., subscriber: _Optional[int] = ..., token_offset: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., status: _Optional[_Union[RequestStatus, str]] = ..., attempt: _Optional[int] = ..., worker: _Optional[str] = ..., table_offset: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., finish: _Optional[_Union[_types_pb2.Finish, _Mapping]] = ..., num_cached_tokens: _Optional[int] = ..., queue_us: _Optional[int] = ..., ttft_us: _Optional[int] = ..., total_us: _Optional[int] = ...) -> None: ...

class Arrival(_message.Message):
    __slots__ = ("epoch_number", "counter")
    EPOCH_NUMBER_FIELD_NUMBER: _ClassVar[int]
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    epoch_number: int
    counter: int
    def __init__(self, epoch_number: _Optional[int] = ..., counter: _Optional[int] = ...) -> None: ...

class BlockDelta(_message.Message):
    __slots__ = ("worker", "boot_id", "published", "unpublished_block_ids")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    UNPUBLISHED_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    boot_id: bytes
    published: _containers.RepeatedCompositeFieldContainer[PublishedBlock]
    unpublished_block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., published: _Optional[_Iterable[_Union[PublishedBlock, _Mapping]]] = ..., unpublished_block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PublishedBlock(_message.Message):
    __slots__ = ("block_id", "digest", "parent_digest", "token_ids", "published_step")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PARENT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_STEP_FIELD_NUMBER: _ClassVar[int]
    block_id: int
    digest: bytes
    parent_digest: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    published_step: int
    def __init__(self, block_id: _Optional[int] = ..., digest: _Optional[bytes] = ..., parent_digest: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., published_step: _Optional[int] = ...) -> None: ...
