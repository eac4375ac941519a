from tessera.worker.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReadBlocksRequest(_message.Message):
    __slots__ = ("block_ids", "is_host")
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    IS_HOST_FIELD_NUMBER: _ClassVar[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    is_host: bool
    def __init__(self, block_ids: _Optional[_Iterable[int]] = ..., is_host: _Optional[bool] = ...) -> None: ...

class ReadBlocksResponse(_message.Message):
    __slots__ = ("block_id", "last_write_step", "kv")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_WRITE_STEP_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    block_id: int
    last_write_step: int
    kv: bytes
    def __init__(self, block_id: _Optional[int] = ..., last_write_step: _Optional[int] = ..., kv: _Optional[bytes] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("description", "epoch", "protocol")
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    description: _types_pb2.WorkerDescription
    epoch: _types_pb2.Epoch
    protocol: int
    def __init__(self, description: _Optional[_Union[_types_pb2.WorkerDescription, _Mapping]] = ..., epoch: _Optional[_Union[_types_pb2.Epoch, _Mapping]] = ..., protocol: _Optional[int] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("epoch", "nonce", "protocol")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    epoch: _types_pb2.Epoch
    nonce: int
    protocol: int
    def __init__(self, epoch: _Optional[_Union[_types_pb2.Epoch, _Mapping]] = ..., nonce: _Optional[int] = ..., protocol: _Optional[int] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("nonce", "header", "slot", "dropped", "end", "heartbeat")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    header: ReportHeader
    slot: SlotReport
    dropped: DroppedSlot
    end: ReportEnd
    heartbeat: Heartbeat
    def __init__(self, nonce: _Optional[int] = ..., header: _Optional[_Union[ReportHeader, _Mapping]] = ..., slot: _Optional[_Union[SlotReport, _Mapping]] = ..., dropped: _Optional[_Union[DroppedSlot, _Mapping]] = ..., end: _Optional[_Union[ReportEnd, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class ReportHeader(_message.Message):
    __slots__ = ("description", "last_step", "last_write_step")
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_WRITE_STEP_FIELD_NUMBER: _ClassVar[int]
    description: _types_pb2.WorkerDescription
    last_step: int
    last_write_step: bytes
    def __init__(self, description: _Optional[_Union[_types_pb2.WorkerDescription, _Mapping]] = ..., last_step: _Optional[int] = ..., last_write_step: _Optional[bytes] = ...) -> None: ...

class SlotReport(_message.Message):
    __slots__ = ("slot", "request_id", "attempt", "prompt_len", "token_ids", "block_table", "computed_len", "is_swapped", "cache_salt")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLE_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_LEN_FIELD_NUMBER: _ClassVar[int]
    IS_SWAPPED_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    slot: int
    request_id: bytes
    attempt: int
    prompt_len: int
    token_ids: bytes
    block_table: bytes
    computed_len: int
    is_swapped: bool
    cache_salt: str
    def __init__(self, slot: _Optional[int] = ..., request_id: _Optional[bytes] = ..., attempt: _Optional[int] = ..., prompt_len: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., block_table: _Optional[bytes] = ..., computed_len: _Optional[int] = ..., is_swapped: _Optional[bool] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class DroppedSlot(_message.Message):
    __slots__ = ("slot", "finish", "drop_step")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    DROP_STEP_FIELD_NUMBER: _ClassVar[int]
    slot: SlotReport
    finish: _types_pb2.Finish
    drop_step: int
    def __init__(self, slot: _Optional[_Union[SlotReport, _Mapping]] = ..., finish: _Optional[_Union[_types_pb2.Finish, _Mapping]] = ..., drop_step: _Optional[int] = ...) -> None: ...

class ReportEnd(_message.Message):
    __slots__ = ("num_slots", "num_dropped")
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DROPPED_FIELD_NUMBER: _ClassVar[int]
    num_slots: int
    num_dropped: int
    def __init__(self, num_slots: _Optional[int] = ..., num_dropped: _Optional[int] = ...) -> None: ...

class ExecuteRequest(_message.Message):
    __slots__ = ("batch", "heartbeat")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    batch: ScheduledBatch
    heartbeat: Heartbeat
    def __init__(self, batch: _Optional[_Union[ScheduledBatch, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class ExecuteResponse(_message.Message):
    __slots__ = ("output", "heartbeat", "refused", "leaving")
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    output: ScheduledBatchOutput
    heartbeat: Heartbeat
    refused: Refused
    leaving: Leaving
    def __init__(self, output: _Optional[_Union[ScheduledBatchOutput, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("epoch", "nonce")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    epoch: _types_pb2.Epoch
    nonce: int
    def __init__(self, epoch: _Optional[_Union[_types_pb2.Epoch, _Mapping]] = ..., nonce: _Optional[int] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Refused(_message.Message):
    __slots__ = ("step_id", "reason")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    reason: str
    def __init__(self, step_id: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class SlotEntry(_message.Message):
    __slots__ = ("slot", "request_id", "attempt", "prompt_len", "token_ids", "block_table", "num_cached_tokens", "sampling", "cache_salt", "trace_context")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLE_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TRACE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    slot: int
    request_id: bytes
    attempt: int
    prompt_len: int
    token_ids: bytes
    block_table: bytes
    num_cached_tokens: int
    sampling: _types_pb2.SamplingParams
    cache_salt: str
    trace_context: str
    def __init__(self, slot: _Optional[int] = ..., request_id: _Optional[bytes] = ..., attempt: _Optional[int] = ..., prompt_len: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., block_table: _Optional[bytes] = ..., num_cached_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., cache_salt: _Optional[str] = ..., trace_context: _Optional[str] = ...) -> None: ...

class SlotDrop(_message.Message):
    __slots__ = ("slot", "request_id", "attempt", "finish")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    slot: int
    request_id: bytes
    attempt: int
    finish: _types_pb2.Finish
    def __init__(self, slot: _Optional[int] = ..., request_id: _Optional[bytes] = ..., attempt: _Optional[int] = ..., finish: _Optional[_Union[_types_pb2.Finish, _Mapping]] = ...) -> None: ...

class SlotSwap(_message.Message):
    __slots__ = ("slot", "request_id", "attempt", "block_table", "pairs")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLE_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    request_id: bytes
    attempt: int
    block_table: bytes
    pairs: bytes
    def __init__(self, slot: _Optional[int] = ..., request_id: _Optional[bytes] = ..., attempt: _Optional[int] = ..., block_table: _Optional[bytes] = ..., pairs: _Optional[bytes] = ...) -> None: ...

class ScheduledBatch(_message.Message):
    __slots__ = ("epoch", "nonce", "step_id", "durable_step", "entries", "drops", "slots", "num_scheduled_tokens", "context_lens", "new_block_counts", "new_block_ids", "num_decodes", "swap_outs", "swap_ins", "copies", "zero_blocks", "is_dummy_run", "seen_step")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    DURABLE_STEP_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    DROPS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SCHEDULED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENS_FIELD_NUMBER: _ClassVar[int]
    NEW_BLOCK_COUNTS_FIELD_NUMBER: _ClassVar[int]
    NEW_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODES_FIELD_NUMBER: _ClassVar[int]
    SWAP_OUTS_FIELD_NUMBER: _ClassVar[int]
    SWAP_INS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    ZERO_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IS_DUMMY_RUN_FIELD_NUMBER: _ClassVar[int]
    SEEN_STEP_FIELD_NUMBER: _ClassVar[int]
    epoch: _types_pb2.Epoch
    nonce: int
    step_id: int
    durable_step: int
    entries: _containers.RepeatedCompositeFieldContainer[SlotEntry]
    drops: _containers.RepeatedCompositeFieldContainer[SlotDrop]
    slots: bytes
    num_scheduled_tokens: bytes
    context_lens: bytes
    new_block_counts: bytes
    new_block_ids: bytes
    num_decodes: int
    swap_outs: _containers.RepeatedCompositeFieldContainer[SlotSwap]
    swap_ins: _containers.RepeatedCompositeFieldContainer[SlotSwap]
    copies: bytes
    zero_blocks: bytes
    is_dummy_run: bool
    seen_step: int
    def __init__(self, epoch: _Optional[_Union[_types_pb2.Epoch, _Mapping]] = ..., nonce: _Optional[int] = ..., step_id: _Optional[int] = ..., durable_step: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[SlotEntry, _Mapping]]] = ..., drops: _Optional[_Iterable[_Union[SlotDrop, _Mapping]]] = ..., slots: _Optional[bytes] = ..., num_scheduled_tokens: _Optional[bytes] = ..., context_lens: _Optional[bytes] = ..., new_block_counts: _Optional[bytes] = ..., new_block_ids: _Optional[bytes] = ..., num_decodes: _Optional[int] = ..., swap_outs: _Optional[_Iterable[_Union[SlotSwap, _Mapping]]] = ..., swap_ins: _Optional[_Iterable[_Union[SlotSwap, _Mapping]]] = ..., copies: _Optional[bytes] = ..., zero_blocks: _Optional[bytes] = ..., is_dummy_run: _Optional[bool] = ..., seen_step: _Optional[int] = ...) -> None: ...

class RowError(_message.Message):
    __slots__ = ("row", "message")
    ROW_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    row: int
    message: str
    def __init__(self, row: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class ScheduledBatchOutput(_message.Message):
    __slots__ = ("epoch", "nonce", "step_id", "token_counts", "token_ids", "row_errors", "compute_us", "draft_counts", "logprobs", "prompt_logprobs")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ROW_ERRORS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    DRAFT_COUNTS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    epoch: _types_pb2.Epoch
    nonce: int
    step_id: int
    token_counts: bytes
    token_ids: bytes
    row_errors: _containers.RepeatedCompositeFieldContainer[RowError]
    compute_us: int
    draft_counts: bytes
    logprobs: _types_pb2.Logprobs
    prompt_logprobs: PromptLogprobs
    def __init__(self, epoch: _Optional[_Union[_types_pb2.Epoch, _Mapping]] = ..., nonce: _Optional[int] = ..., step_id: _Optional[int] = ..., token_counts: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., row_errors: _Optional[_Iterable[_Union[RowError, _Mapping]]] = ..., compute_us: _Optional[int] = ..., draft_counts: _Optional[bytes] = ..., logprobs: _Optional[_Union[_types_pb2.Logprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("row_counts", "tokens")
    ROW_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    row_counts: bytes
    tokens: _types_pb2.Logprobs
    def __init__(self, row_counts: _Optional[bytes] = ..., tokens: _Optional[_Union[_types_pb2.Logprobs, _Mapping]] = ...) -> None: ...
