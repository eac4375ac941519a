"""Protobuf <-> values for the session between gateway and scheduler; one `x_to_proto` / `x_from_proto` pair per message.

`*_from_proto` checks shapes and domains that need no other state and raises MalformedMessage naming the field.
"""

from dataclasses import asdict

import numpy as np
import numpy.typing as npt

from services.scheduler.convert_admin import query_from_proto, query_to_proto, reply_from_proto, reply_to_proto
from services.scheduler.convert_frame import fill_frame, frame_from_proto
from services.scheduler.convert_kv_events import kv_events_from_proto, kv_events_to_proto
from services.scheduler.convert_load import load_from_proto, load_to_proto
from services.worker.convert import (
    MalformedMessage,
    epoch_from_proto,
    epoch_to_proto,
    model_info_from_proto,
    model_info_to_proto,
    sampling_from_proto,
    sampling_to_proto,
)
from tessera.scheduler.v1 import session_pb2
from tessera.values.admin import AdminQuery, AdminReply
from tessera.values.identity import INSTANCE_ID_BYTES, NO_EPOCH, REQUEST_ID_BYTES, Epoch
from tessera.values.kv_events import KvEvents, WatchKv
from tessera.values.load import GroupLoad
from tessera.values.request import DetokenizeOptions, Submission, TimeLimits
from tessera.values.session import (
    Abort,
    Detach,
    Frame,
    GatewayMessage,
    Heartbeat,
    Hello,
    HelloAck,
    Invite,
    KnownAs,
    LengthChanged,
    LiveRequest,
    Rejected,
    RejectReason,
    SchedulerMessage,
    Standby,
    StopFound,
    Submit,
    TakenOver,
)

_REJECT_TO_PROTO = {reason: f"REJECT_REASON_{reason.name}" for reason in RejectReason}
_REJECT_FROM_PROTO = {session_pb2.RejectReason.Value(name): reason for reason, name in _REJECT_TO_PROTO.items()}


def request_to_proto(message: GatewayMessage) -> session_pb2.SessionRequest:
    """What a gateway says."""
    match message:
        case Hello():
            return session_pb2.SessionRequest(hello=hello_to_proto(message))
        case Submit():
            return session_pb2.SessionRequest(submit=submit_to_proto(message))
        case Abort(request_id, subscriber):
            return session_pb2.SessionRequest(abort=session_pb2.Abort(request_id=request_id, subscriber=subscriber))
        case StopFound():
            return session_pb2.SessionRequest(stop_found=stop_found_to_proto(message))
        case Detach(request_id, subscriber, grace_ms):
            detach = session_pb2.Detach(request_id=request_id, subscriber=subscriber, grace_ms=grace_ms)
            return session_pb2.SessionRequest(detach=detach)
        case AdminQuery():
            return session_pb2.SessionRequest(admin_query=query_to_proto(message))
        case WatchKv(is_on):
            return session_pb2.SessionRequest(watch_kv=session_pb2.WatchKv(is_on=is_on))
        case Heartbeat():
            return session_pb2.SessionRequest(heartbeat=session_pb2.Heartbeat())


def request_from_proto(message: session_pb2.SessionRequest) -> GatewayMessage:
    """What a gateway said."""
    match message.WhichOneof("message"):
        case "hello":
            return hello_from_proto(message.hello)
        case "submit":
            return submit_from_proto(message.submit)
        case "abort":
            return Abort(_request_id(message.abort.request_id, "abort"), message.abort.subscriber)
        case "stop_found":
            return stop_found_from_proto(message.stop_found)
        case "detach":
            detach = message.detach
            grace_ms = detach.grace_ms if detach.HasField("grace_ms") else None
            return Detach(_request_id(detach.request_id, "detach"), detach.subscriber, grace_ms)
        case "admin_query":
            return query_from_proto(message.admin_query)
        case "watch_kv":
            return WatchKv(message.watch_kv.is_on)
        case "heartbeat":
            return Heartbeat()
        case kind:
            raise MalformedMessage(f"message: a session request holds {kind}")


def response_to_proto(epoch: Epoch, message: SchedulerMessage) -> session_pb2.SessionResponse:
    """What a scheduler says under its term `epoch`; NO_EPOCH for a Standby, and for nothing else."""
    assert (epoch == NO_EPOCH) == isinstance(message, Standby)
    response = session_pb2.SessionResponse(epoch=epoch_to_proto(epoch))
    match message:
        case Standby():
            response.standby.SetInParent()
        case Invite(protocol):
            response.invite.protocol = protocol
        case HelloAck():
            response.hello_ack.CopyFrom(hello_ack_to_proto(message))
        case Frame():
            fill_frame(response.frame, message.outputs)
        case KvEvents():
            response.kv_events.CopyFrom(kv_events_to_proto(message))
        case Rejected():
            response.rejected.CopyFrom(rejected_to_proto(message))
        case TakenOver(request_id, subscriber):
            response.taken_over.request_id, response.taken_over.subscriber = request_id, subscriber
        case KnownAs(request_id, subscriber, known_request_id):
            known = session_pb2.KnownAs(request_id=request_id, subscriber=subscriber, known_request_id=known_request_id)
            response.known_as.CopyFrom(known)
        case LengthChanged(max_request_len):
            response.length_changed.max_request_len = max_request_len
        case GroupLoad():
            response.load.CopyFrom(load_to_proto(message))
        case AdminReply():
            response.admin_reply.CopyFrom(reply_to_proto(message))
        case Heartbeat():
            response.heartbeat.SetInParent()
    return response


def response_from_proto(message: session_pb2.SessionResponse) -> tuple[Epoch, SchedulerMessage]:
    """The term under which a scheduler spoke (NO_EPOCH with a Standby), and what it said."""
    epoch = epoch_from_proto(message.epoch)
    kind = message.WhichOneof("message")
    if kind is not None and (epoch == NO_EPOCH) != (kind == "standby"):
        raise MalformedMessage(f"epoch: {epoch.number} with {kind}")
    match kind:
        case "standby":
            return epoch, Standby()
        case "invite":
            return epoch, Invite(message.invite.protocol)
        case "hello_ack":
            return epoch, hello_ack_from_proto(message.hello_ack)
        case "length_changed":
            return epoch, LengthChanged(message.length_changed.max_request_len)
        case "load":
            return epoch, load_from_proto(message.load)
        case "frame":
            return epoch, frame_from_proto(message.frame)
        case "kv_events":
            return epoch, kv_events_from_proto(message.kv_events)
        case "rejected":
            return epoch, rejected_from_proto(message.rejected)
        case "taken_over":
            taken = message.taken_over
            return epoch, TakenOver(_request_id(taken.request_id, "taken_over"), taken.subscriber)
        case "known_as":
            known = message.known_as
            known_id = _request_id(known.known_request_id, "known_as.known_request_id")
            return epoch, KnownAs(_request_id(known.request_id, "known_as"), known.subscriber, known_id)
        case "admin_reply":
            return epoch, reply_from_proto(message.admin_reply)
        case "heartbeat":
            return epoch, Heartbeat()
        case kind:
            raise MalformedMessage(f"message: a session response holds {kind}")


def hello_to_proto(hello: Hello) -> session_pb2.Hello:
    """Message of `hello`."""
    return session_pb2.Hello(
        highest_epoch=epoch_to_proto(hello.highest_epoch),
        tokenizer_digest=hello.tokenizer_digest,
        gateway_id=hello.gateway_id,
        live=[
            session_pb2.LiveRequest(request_id=live.request_id, subscriber=live.subscriber, token_ids=live.token_ids)
            for live in hello.live
        ],
        protocol=hello.protocol,
    )


def hello_from_proto(message: session_pb2.Hello) -> Hello:
    """The opening of a session."""
    if len(message.gateway_id) != INSTANCE_ID_BYTES:
        raise MalformedMessage(f"hello.gateway_id: {len(message.gateway_id)} bytes instead of {INSTANCE_ID_BYTES}")
    return Hello(
        highest_epoch=epoch_from_proto(message.highest_epoch),
        tokenizer_digest=message.tokenizer_digest,
        gateway_id=message.gateway_id,
        live=tuple(
            LiveRequest(_request_id(live.request_id, "hello.live"), live.subscriber, tuple(live.token_ids))
            for live in message.live
        ),
        protocol=message.protocol,
    )


def hello_ack_to_proto(ack: HelloAck) -> session_pb2.HelloAck:
    """Message of `ack`."""
    return session_pb2.HelloAck(
        unknown_request_ids=ack.unknown_request_ids,
        model=model_info_to_proto(ack.model),
        max_request_len=ack.max_request_len,
    )


def hello_ack_from_proto(message: session_pb2.HelloAck) -> HelloAck:
    """The answer to a Hello."""
    unknown = tuple(_request_id(request_id, "hello_ack.unknown_request_ids") for request_id in message.unknown_request_ids)
    return HelloAck(unknown, model_info_from_proto(message.model), message.max_request_len)


def submit_to_proto(submit: Submit) -> session_pb2.Submit:
    """Message of `submit`."""
    return session_pb2.Submit(
        submission=submission_to_proto(submit.submission),
        subscriber=submit.subscriber,
        received_token_ids=submit.received_token_ids,
    )


def submit_from_proto(message: session_pb2.Submit) -> Submit:
    """A request to admit or to go on with."""
    return Submit(submission_from_proto(message.submission), message.subscriber, tuple(message.received_token_ids))


def submission_to_proto(submission: Submission, with_prompt: bool = True) -> session_pb2.Submission:
    """Message of `submission`, as the session sends it; the journal keeps the prompt beside it."""
    return session_pb2.Submission(
        request_id=submission.request_id,
        prompt_token_ids=submission.prompt_token_ids.tolist() if with_prompt else (),
        sampling=sampling_to_proto(submission.sampling),
        detokenize=session_pb2.DetokenizeOptions(
            stop_strings=submission.detokenize.stop_strings,
            include_stop_in_output=submission.detokenize.include_stop_in_output,
            skip_special_tokens=submission.detokenize.skip_special_tokens,
        ),
        client_request_id=submission.client_request_id,
        principal=submission.principal,
        priority=submission.priority,
        cache_salt=submission.cache_salt,
        max_model_length=submission.max_model_length,
        fork_of=submission.fork_of,
        is_seed_given=submission.is_seed_given,
        limits=session_pb2.TimeLimits(**asdict(submission.limits)) if submission.limits is not None else None,
        trace_context=submission.trace_context,
    )


def submission_from_proto(message: session_pb2.Submission) -> Submission:
    """What was asked; a prompt without tokens, or with an id above int32, is malformed."""
    if not message.prompt_token_ids:
        raise MalformedMessage("submission.prompt_token_ids: empty")
    prompt = np.array(message.prompt_token_ids, np.uint32).view(np.int32)
    if prompt.min() < 0:
        raise MalformedMessage("submission.prompt_token_ids: an id is above 2^31 - 1")
    return submission_with_prompt(message, prompt)


def submission_with_prompt(message: session_pb2.Submission, prompt: npt.NDArray[np.int32]) -> Submission:
    """What was asked, where the prompt is kept beside the message."""
    return Submission(
        request_id=_request_id(message.request_id, "submission"),
        prompt_token_ids=prompt,
        sampling=sampling_from_proto(message.sampling),
        detokenize=DetokenizeOptions(
            stop_strings=tuple(message.detokenize.stop_strings),
            include_stop_in_output=message.detokenize.include_stop_in_output,
            skip_special_tokens=message.detokenize.skip_special_tokens,
        ),
        client_request_id=message.client_request_id,
        principal=message.principal,
        priority=message.priority,
        cache_salt=message.cache_salt,
        max_model_length=message.max_model_length,
        fork_of=_request_id(message.fork_of, "submission.fork_of") if message.fork_of else b"",
        is_seed_given=message.is_seed_given,
        limits=_limits_from_proto(message.limits) if message.HasField("limits") else None,
        trace_context=message.trace_context,
    )


def _limits_from_proto(message: session_pb2.TimeLimits) -> TimeLimits:
    return TimeLimits(message.max_queue_ms, message.max_first_token_ms, message.max_total_ms, message.deadline_ms)


def stop_found_to_proto(found: StopFound) -> session_pb2.StopFound:
    """Message of `found`."""
    return session_pb2.StopFound(
        request_id=found.request_id,
        subscriber=found.subscriber,
        output_len=found.output_len,
        stop_string=found.stop_string,
    )


def stop_found_from_proto(message: session_pb2.StopFound) -> StopFound:
    """A stop string some gateway found."""
    request_id = _request_id(message.request_id, "stop_found")
    return StopFound(request_id, message.subscriber, message.output_len, message.stop_string)


def rejected_to_proto(rejected: Rejected) -> session_pb2.Rejected:
    """Message of `rejected`."""
    return session_pb2.Rejected(
        request_id=rejected.request_id,
        subscriber=rejected.subscriber,
        reason=_REJECT_TO_PROTO[rejected.reason],
        message=rejected.message,
        retry_after_ms=rejected.retry_after_ms,
    )


def rejected_from_proto(message: session_pb2.Rejected) -> Rejected:
    """Why a Submit was not admitted; an unknown reason is malformed."""
    reason = _REJECT_FROM_PROTO.get(message.reason)
    if reason is None:
        raise MalformedMessage(f"rejected.reason: unknown value {message.reason}")
    request_id = _request_id(message.request_id, "rejected")
    return Rejected(request_id, message.subscriber, reason, message.message, message.retry_after_ms)


def _request_id(value: bytes, field: str) -> bytes:
    if len(value) != REQUEST_ID_BYTES:
        raise MalformedMessage(f"{field}: a request id of {len(value)} bytes instead of {REQUEST_ID_BYTES}")
    return value
