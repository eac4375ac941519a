"""What a gateway and a scheduler say to each other on their session."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tessera.values.admin import AdminQuery, AdminReply
from tessera.values.identity import Epoch
from tessera.values.kv_events import KvEvents, WatchKv
from tessera.values.load import GroupLoad
from tessera.values.model import ModelInfo
from tessera.values.protocol import PROTOCOL_VERSION
from tessera.values.request import RequestOutput, Submission


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A request a gateway still streams to a client. `token_ids` are the output ids received so far, from offset 0."""

    request_id: bytes
    subscriber: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hello:
    """Answers an Invite. `gateway_id` is random per gateway process; `highest_epoch` the highest this gateway has seen."""

    highest_epoch: Epoch
    tokenizer_digest: str
    gateway_id: bytes
    live: tuple[LiveRequest, ...] = ()
    protocol: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Submit:
    """A new request, or one the scheduler may not know any more. Idempotent on the request id; the highest `subscriber` wins."""

    submission: Submission
    subscriber: int = 0
    received_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Abort:
    """The client asked to stop, or is gone for good. The scheduler answers with the request's end, whatever it is; for an id it does not know, nothing."""

    request_id: bytes
    subscriber: int


@dataclass(frozen=True, slots=True)
class Detach:
    """The client is gone and may come back, here or elsewhere. The request goes on, and is aborted where nobody has claimed it after
    `grace_ms`; None: after `gateway_grace_ms`."""

    request_id: bytes
    subscriber: int
    grace_ms: int | None = None


@dataclass(frozen=True, slots=True)
class StopFound:
    """The gateway found a stop string, completed by output token `output_len - 1`."""

    request_id: bytes
    subscriber: int
    output_len: int
    stop_string: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The sender lives."""


@dataclass(frozen=True, slots=True)
class Standby:
    """This scheduler lives and does not lead. The only message that carries no epoch."""


@dataclass(frozen=True, slots=True)
class Invite:
    """This scheduler has taken an epoch: the gateway is to say Hello, and to listen to no lower epoch any more."""

    protocol: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class HelloAck:
    """The leader's answer to a Hello. Live ids it does not know are to be submitted again, with the tokens received.

    `max_request_len` is the longest request (prompt plus output, tokens) that can be scheduled at present: model and largest pool considered.
    """

    unknown_request_ids: tuple[bytes, ...]
    model: ModelInfo
    max_request_len: int


@dataclass(frozen=True, slots=True)
class LengthChanged:
    """Workers have come or gone: `max_request_len` of the HelloAck is another from now on."""

    max_request_len: int


@dataclass(frozen=True, slots=True)
class Frame:
    """What one step changed for all requests of one gateway. `timings` and `num_cached_tokens` travel with an end only."""

    outputs: Sequence[RequestOutput]


class RejectReason(Enum):
    """Why a Submit was not admitted."""

    TOO_LONG = "too_long"  # can never run here
    OVERLOADED = "overloaded"  # the queue is full
    ALREADY_EXISTS = "already_exists"  # the client's id lives with another body or principal
    PAUSED = "paused"  # an operator has paused admission
    INVALID = "invalid"  # the request itself is wrong, for example a token id outside the vocabulary


@dataclass(frozen=True, slots=True)
class Rejected:
    """A Submit that was not admitted; nothing was journalled. `message` names the numbers; `retry_after_ms` 0: trying again never helps."""

    request_id: bytes
    subscriber: int
    reason: RejectReason
    message: str
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True)
class TakenOver:
    """Another subscriber owns the request now, of a higher number, or of the same and later; the stream of `subscriber` ends."""

    request_id: bytes
    subscriber: int


@dataclass(frozen=True, slots=True)
class KnownAs:
    """What was submitted as `request_id` lives, or can still be read, as `known_request_id`: principal and client id are the same.
    The gateway goes on under that id, whose frames follow."""

    request_id: bytes
    subscriber: int
    known_request_id: bytes


GatewayMessage = Hello | Submit | Abort | Detach | StopFound | AdminQuery | WatchKv | Heartbeat
SchedulerMessage = (
    Standby
    | Invite
    | HelloAck
    | LengthChanged
    | GroupLoad
    | Frame
    | KvEvents
    | Rejected
    | TakenOver
    | KnownAs
    | AdminReply
    | Heartbeat
)
