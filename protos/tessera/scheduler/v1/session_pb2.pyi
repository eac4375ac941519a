from tessera.v1 import admin_pb2 as _admin_pb2
from tessera.worker.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RejectReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REJECT_REASON_UNSPECIFIED: _ClassVar[RejectReason]
    REJECT_REASON_TOO_LONG: _ClassVar[RejectReason]
    REJECT_REASON_OVERLOADED: _ClassVar[RejectReason]
    REJECT_REASON_ALREADY_EXISTS: _ClassVar[RejectReason]
    REJECT_REASON_INVALID: _ClassVar[RejectReason]
    REJECT_REASON_PAUSED: _ClassVar[RejectReason]
REJECT_REASON_UNSPECIFIED: RejectReason
REJECT_REASON_TOO_LONG: RejectReason
REJECT_REASON_OVERLOADED: RejectReason
REJECT_REASON_ALREADY_EXISTS: RejectReason
REJECT_REASON_INVALID: RejectReason
REJECT_REASON_PAUSED: RejectReason

class SessionRequest(_message.Message):
    __slots__ = ("hello", "submit", "abort", "stop_found", "heartbeat", "detach", "admin_query", "watch_kv")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    STOP_FOUND_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    ADMIN_QUERY_FIELD_NUMBER: _ClassVar[int]
    WATCH_KV_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    submit: Submit
    abort: Abort
    stop_found: StopFound
    heartbeat: Heartbeat
    detach: Detach
    admin_query: AdminQuery
    watch_kv: WatchKv
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., stop_found: _Optional[_Union[StopFound, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., detach: _Optional[_Union[Detach, _Mapping]] = ..., admin_query: _Optional[_Union[AdminQuery, _Mapping]] = ..., watch_kv: _Optional[_Union[WatchKv, _Mapping]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("epoch", "hello_ack", "frame", "rejected", "taken_over", "heartbeat", "standby", "invite", "known_as", "length_changed", "admin_reply", "load", "kv_events")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HELLO_ACK_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    TAKEN_OVER_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    INVITE_FIELD_NUMBER: _ClassVar[int]
    KNOWN_AS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_CHANGED_FIELD_NUMBER: _ClassVar[int]
    ADMIN_REPLY_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    epoch: _types_pb2.Epoch
    hello_ack: HelloAck
    frame: Frame
    rejected: Rejected
    taken_over: TakenOver
    heartbeat: Heartbeat
    standby: Standby
    invite: Invite
    known_as: KnownAs
    length_changed: LengthChanged
    admin_reply: AdminReply
    load: _admin_pb2.Load
    kv_events: KvEvents
    def __init__(self, epoch: _Optional[_Union[_types_pb2.Epoch, _Mapping]] = ..., hello_ack: _Optional[_Union[HelloAck, _Mapping]] = ..., frame: _Optional[_Union[Frame, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ..., taken_over: _Optional[_Union[TakenOver, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., standby: _Optional[_Union[Standby, _Mapping]] = ..., invite: _Optional[_Union[Invite, _Mapping]] = ..., known_as: _Optional[_Union[KnownAs, _Mapping]] = ..., length_changed: _Optional[_Union[LengthChanged, _Mapping]] = ..., admin_reply: _Optional[_Union[AdminReply, _Mapping]] = ..., load: _Optional[_Union[_admin_pb2.Load, _Mapping]] = ..., kv_events: _Optional[_Union[KvEvents, _Mapping]] = ...) -> None: ...

class Standby(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Invite(_message.Message):
    __slots__ = ("protocol",)
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    def __init__(self, protocol: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("highest_epoch", "tokenizer_digest", "gateway_id", "live", "protocol")
    HIGHEST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    highest_epoch: _types_pb2.Epoch
    tokenizer_digest: str
    gateway_id: bytes
    live: _containers.RepeatedCompositeFieldContainer[LiveRequest]
    protocol: int
    def __init__(self, highest_epoch: _Optional[_Union[_types_pb2.Epoch, _Mapping]] = ..., tokenizer_digest: _Optional[str] = ..., gateway_id: _Optional[bytes] = ..., live: _Optional[_Iterable[_Union[LiveRequest, _Mapping]]] = ..., protocol: _Optional[int] = ...) -> None: ...

class LiveRequest(_message.Message):
    __slots__ = ("request_id", "subscriber", "token_ids")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    subscriber: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[bytes] = ..., subscriber: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class HelloAck(_message.Message):
    __slots__ = ("unknown_request_ids", "model", "max_request_len")
    UNKNOWN_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_LEN_FIELD_NUMBER: _ClassVar[int]
    unknown_request_ids: _containers.RepeatedScalarFieldContainer[bytes]
    model: _types_pb2.ModelInfo
    max_request_len: int
    def __init__(self, unknown_request_ids: _Optional[_Iterable[bytes]] = ..., model: _Optional[_Union[_types_pb2.ModelInfo, _Mapping]] = ..., max_request_len: _Optional[int] = ...) -> None: ...

class LengthChanged(_message.Message):
    __slots__ = ("max_request_len",)
    MAX_REQUEST_LEN_FIELD_NUMBER: _ClassVar[int]
    max_request_len: int
    def __init__(self, max_request_len: _Optional[int] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("submission", "subscriber", "received_token_ids")
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBER_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    submission: Submission
    subscriber: int
    received_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, submission: _Optional[_Union[Submission, _Mapping]] = ..., subscriber: _Optional[int] = ..., received_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Submission(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "sampling", "detokenize", "client_request_id", "principal", "priority", "cache_salt", "max_model_length", "fork_of", "is_seed_given", "limits", "trace_context")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DETOKENIZE_FIELD_NUMBER: _ClassVar[int]
    CLIENT_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LENGTH_FIELD_NUMBER: _ClassVar[int]
    FORK_OF_FIELD_NUMBER: _ClassVar[int]
    IS_SEED_GIVEN_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    TRACE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _types_pb2.SamplingParams
    detokenize: DetokenizeOptions
    client_request_id: str
    principal: str
    priority: int
    cache_salt: str
    max_model_length: int
    fork_of: bytes
    is_seed_given: bool
    limits: TimeLimits
    trace_context: str
    def __init__(self, request_id: _Optional[bytes] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., detokenize: _Optional[_Union[DetokenizeOptions, _Mapping]] = ..., client_request_id: _Optional[str] = ..., principal: _Optional[str] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., max_model_length: _Optional[int] = ..., fork_of: _Optional[bytes] = ..., is_seed_given: _Optional[bool] = ..., limits: _Optional[_Union[TimeLimits, _Mapping]] = ..., trace_context: _Optional[str] = ...) -> None: ...

class TimeLimits(_message.Message):
    __slots__ = ("max_queue_ms", "max_first_token_ms", "max_total_ms", "deadline_ms")
    MAX_QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_FIRST_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    max_queue_ms: int
    max_first_token_ms: int
    max_total_ms: int
    deadline_ms: int
    def __init__(self, max_queue_ms: _Optional[int] = ..., max_first_token_ms: _Optional[int] = ..., max_total_ms: _Optional[int] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class DetokenizeOptions(_message.Message):
    __slots__ = ("stop_strings", "include_stop_in_output", "skip_special_tokens")
    STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    stop_strings: _containers.RepeatedScalarFieldContainer[str]
    include_stop_in_output: bool
    skip_special_tokens: bool
    def __init__(self, stop_strings: _Optional[_Iterable[str]] = ..., include_stop_in_output: _Optional[bool] = ..., skip_special_tokens: _Optional[bool] = ...) -> None: ...

class Detach(_message.Message):
    __slots__ = ("request_id", "subscriber", "grace_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBER_FIELD_NUMBER: _ClassVar[int]
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    subscriber: int
    grace_ms: int
    def __init__(self, request_id: _Optional[bytes] = ..., subscriber: _Optional[int] = ..., grace_ms: _Optional[int] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("request_id", "subscriber")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBER_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    subscriber: int
    def __init__(self, request_id: _Optional[bytes] = ..., subscriber: _Optional[int] = ...) -> None: ...

class StopFound(_message.Message):
    __slots__ = ("request_id", "subscriber", "output_len", "stop_string")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBER_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_LEN_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    subscriber: int
    output_len: int
    stop_string: str
    def __init__(self, request_id: _Optional[bytes] = ..., subscriber: _Optional[int] = ..., output_len: _Optional[int] = ..., stop_string: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Frame(_message.Message):
    __slots__ = ("request_ids", "subscribers", "token_offsets", "token_counts", "token_ids", "ends", "logprobs", "prompt_logprobs")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBERS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_ids: bytes
    subscribers: _containers.RepeatedScalarFieldContainer[int]
    token_offsets: _containers.RepeatedScalarFieldContainer[int]
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    ends: _containers.RepeatedCompositeFieldContainer[RequestEnd]
    logprobs: _types_pb2.Logprobs
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    def __init__(self, request_ids: _Optional[bytes] = ..., subscribers: _Optional[_Iterable[int]] = ..., token_offsets: _Optional[_Iterable[int]] = ..., token_counts: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., ends: _Optional[_Iterable[_Union[RequestEnd, _Mapping]]] = ..., logprobs: _Optional[_Union[_types_pb2.Logprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("index", "logprobs")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    index: int
    logprobs: _types_pb2.Logprobs
    def __init__(self, index: _Optional[int] = ..., logprobs: _Optional[_Union[_types_pb2.Logprobs, _Mapping]] = ...) -> None: ...

class RequestEnd(_message.Message):
    __slots__ = ("index", "finish", "num_cached_tokens", "queue_us", "ttft_us", "total_us", "num_preemptions")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    TTFT_US_FIELD_NUMBER: _ClassVar[int]
    TOTAL_US_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    index: int
    finish: _types_pb2.Finish
    num_cached_tokens: int
    queue_us: int
    ttft_us: int
    total_us: int
    num_preemptions: int
    def __init__(self, index: _Optional[int] = ..., finish: _Optional[_Union[_types_pb2.Finish, _Mapping]] = ..., num_cached_tokens: _Optional[int] = ..., queue_us: _Optional[int] = ..., ttft_us: _Optional[int] = ..., total_us: _Optional[int] = ..., num_preemptions: _Optional[int] = ...) -> None: ...

class WatchKv(_message.Message):
    __slots__ = ("is_on",)
    IS_ON_FIELD_NUMBER: _ClassVar[int]
    is_on: bool
    def __init__(self, is_on: _Optional[bool] = ...) -> None: ...

class KvEvents(_message.Message):
    __slots__ = ("changes", "begins", "more")
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    BEGINS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[PoolChange]
    begins: bool
    more: bool
    def __init__(self, changes: _Optional[_Iterable[_Union[PoolChange, _Mapping]]] = ..., begins: _Optional[bool] = ..., more: _Optional[bool] = ...) -> None: ...

class PoolChange(_message.Message):
    __slots__ = ("worker", "root", "is_gone", "removed_block_ids", "block_ids", "digests", "links", "have_parents", "token_ids")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    IS_GONE_FIELD_NUMBER: _ClassVar[int]
    REMOVED_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    HAVE_PARENTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    root: int
    is_gone: bool
    removed_block_ids: _containers.RepeatedScalarFieldContainer[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    digests: bytes
    links: bytes
    have_parents: bytes
    token_ids: bytes
    def __init__(self, worker: _Optional[str] = ..., root: _Optional[int] = ..., is_gone: _Optional[bool] = ..., removed_block_ids: _Optional[_Iterable[int]] = ..., block_ids: _Optional[_Iterable[int]] = ..., digests: _Optional[bytes] = ..., links: _Optional[bytes] = ..., have_parents: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("request_id", "subscriber", "reason", "message", "retry_after_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    subscriber: int
    reason: RejectReason
    message: str
    retry_after_ms: int
    def __init__(self, request_id: _Optional[bytes] = ..., subscriber: _Optional[int] = ..., reason: _Optional[_Union[RejectReason, str]] = ..., message: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class KnownAs(_message.Message):
    __slots__ = ("request_id", "subscriber", "known_request_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBER_FIELD_NUMBER: _ClassVar[int]
    KNOWN_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    subscriber: int
    known_request_id: bytes
    def __init__(self, request_id: _Optional[bytes] = ..., subscriber: _Optional[int] = ..., known_request_id: _Optional[bytes] = ...) -> None: ...

class TakenOver(_message.Message):
    __slots__ = ("request_id", "subscriber")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBER_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    subscriber: int
    def __init__(self, request_id: _Optional[bytes] = ..., subscriber: _Optional[int] = ...) -> None: ...

class AdminQuery(_message.Message):
    __slots__ = ("number", "get_stats", "list_requests", "abort_requests", "reset_prefix_cache", "pause_admission", "resume_admission", "drain_worker", "undrain_worker")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    GET_STATS_FIELD_NUMBER: _ClassVar[int]
    LIST_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ABORT_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RESET_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    PAUSE_ADMISSION_FIELD_NUMBER: _ClassVar[int]
    RESUME_ADMISSION_FIELD_NUMBER: _ClassVar[int]
    DRAIN_WORKER_FIELD_NUMBER: _ClassVar[int]
    UNDRAIN_WORKER_FIELD_NUMBER: _ClassVar[int]
    number: int
    get_stats: _admin_pb2.GetStatsRequest
    list_requests: _admin_pb2.ListRequestsRequest
    abort_requests: _admin_pb2.AbortRequestsRequest
    reset_prefix_cache: _admin_pb2.ResetPrefixCacheRequest
    pause_admission: _admin_pb2.PauseAdmissionRequest
    resume_admission: _admin_pb2.ResumeAdmissionRequest
    drain_worker: _admin_pb2.DrainWorkerRequest
    undrain_worker: _admin_pb2.UndrainWorkerRequest
    def __init__(self, number: _Optional[int] = ..., get_stats: _Optional[_Union[_admin_pb2.GetStatsRequest, _Mapping]] = ..., list_requests: _Optional[_Union[_admin_pb2.ListRequestsRequest, _Mapping]] = ..., abort_requests: _Optional[_Union[_admin_pb2.AbortRequestsRequest, _Mapping]] = ..., reset_prefix_cache: _Optional[_Union[_admin_pb2.ResetPrefixCacheRequest, _Mapping]] = ..., pause_admission: _Optional[_Union[_admin_pb2.PauseAdmissionRequest, _Mapping]] = ..., resume_admission: _Optional[_Union[_admin_pb2.ResumeAdmissionRequest, _Mapping]] = ..., drain_worker: _Optional[_Union[_admin_pb2.DrainWorkerRequest, _Mapping]] = ..., undrain_worker: _Optional[_Union[_admin_pb2.UndrainWorkerRequest, _Mapping]] = ...) -> None: ...

class AdminReply(_message.Message):
    __slots__ = ("number", "get_stats", "list_requests", "abort_requests", "reset_prefix_cache", "pause_admission", "resume_admission", "drain_worker", "undrain_worker", "no_such")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    GET_STATS_FIELD_NUMBER: _ClassVar[int]
    LIST_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ABORT_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RESET_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    PAUSE_ADMISSION_FIELD_NUMBER: _ClassVar[int]
    RESUME_ADMISSION_FIELD_NUMBER: _ClassVar[int]
    DRAIN_WORKER_FIELD_NUMBER: _ClassVar[int]
    UNDRAIN_WORKER_FIELD_NUMBER: _ClassVar[int]
    NO_SUCH_FIELD_NUMBER: _ClassVar[int]
    number: int
    get_stats: _admin_pb2.GetStatsResponse
    list_requests: _admin_pb2.ListRequestsResponse
    abort_requests: _admin_pb2.AbortRequestsResponse
    reset_prefix_cache: _admin_pb2.ResetPrefixCacheResponse
    pause_admission: _admin_pb2.PauseAdmissionResponse
    resume_admission: _admin_pb2.ResumeAdmissionResponse
    drain_worker: _admin_pb2.DrainWorkerResponse
    undrain_worker: _admin_pb2.UndrainWorkerResponse
    no_such: NoSuch
    def __init__(self, number: _Optional[int] = ..., get_stats: _Optional[_Union[_admin_pb2.GetStatsResponse, _Mapping]] = ..., list_requests: _Optional[_Union[_admin_pb2.ListRequestsResponse, _Mapping]] = ..., abort_requests: _Optional[_Union[_admin_pb2.AbortRequestsResponse, _Mapping]] = ..., reset_prefix_cache: _Optional[_Union[_admin_pb2.ResetPrefixCacheResponse, _Mapping]] = ..., pause_admission: _Optional[_Union[_admin_pb2.PauseAdmissionResponse, _Mapping]] = ..., resume_admission: _Optional[_Union[_admin_pb2.ResumeAdmissionResponse, _Mapping]] = ..., drain_worker: _Optional[_Union[_admin_pb2.DrainWorkerResponse, _Mapping]] = ..., undrain_worker: _Optional[_Union[_admin_pb2.UndrainWorkerResponse, _Mapping]] = ..., no_such: _Optional[_Union[NoSuch, _Mapping]] = ...) -> None: ...

class NoSuch(_message.Message):
    __slots__ = ("field", "message")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    field: str
    message: str
    def __init__(self, field: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...
