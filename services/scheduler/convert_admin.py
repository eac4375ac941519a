"""Protobuf <-> values of administration. Between gateway and scheduler the messages of the public API travel as they are, so one pair of
functions serves both.

`*_from_proto` raises MalformedMessage naming the field.
"""

import string
from typing import TypeAlias, assert_never

from google.protobuf.message import Message

from services.scheduler.convert_load import load_from_proto, load_to_proto
from services.worker.convert import MalformedMessage
from tessera.scheduler.v1 import session_pb2
from tessera.v1 import admin_pb2 as pb
from tessera.values.admin import (
    PAGE_SIZE_DEFAULT,
    PAGE_SIZE_MAX,
    AbortRequests,
    AdminAnswer,
    AdminCommand,
    AdminQuery,
    AdminReply,
    AdmissionSet,
    GetStats,
    GroupStats,
    ListRequests,
    NoSuch,
    PageMark,
    PrefixCacheReset,
    RequestPage,
    RequestsAborted,
    RequestView,
    ResetPrefixCache,
    SetAdmission,
    SetDrain,
    WorkerDrained,
    WorkerUndrained,
)
from tessera.values.identity import REQUEST_ID_BYTES

Request: TypeAlias = Message
Response: TypeAlias = Message


def _fields_by_type(container: type[Message]) -> dict[str, str]:
    """In which field of its oneof a message of which name goes."""
    fields = container.DESCRIPTOR.oneofs[0].fields
    return {field.message_type.name: field.name for field in fields if field.message_type is not None}


_QUERY_FIELDS = _fields_by_type(session_pb2.AdminQuery)
_REPLY_FIELDS = _fields_by_type(session_pb2.AdminReply)
_NUMBER_MAX = 2**64 - 1
_HEXADECIMAL = frozenset(string.hexdigits)


def query_to_proto(query: AdminQuery) -> session_pb2.AdminQuery:
    """Message of `query`."""
    request = command_to_proto(query.command)
    message = session_pb2.AdminQuery(number=query.number)
    getattr(message, _QUERY_FIELDS[request.DESCRIPTOR.name]).CopyFrom(request)
    return message


def query_from_proto(message: session_pb2.AdminQuery) -> AdminQuery:
    """What a gateway asks for an operator."""
    kind = message.WhichOneof("query")
    if kind is None:
        raise MalformedMessage("admin_query.query: none of those that are known here")
    return AdminQuery(message.number, command_from_proto(getattr(message, kind)))


def reply_to_proto(reply: AdminReply) -> session_pb2.AdminReply:
    """Message of `reply`."""
    message = session_pb2.AdminReply(number=reply.number)
    if isinstance(reply.answer, NoSuch):
        message.no_such.field, message.no_such.message = reply.answer.field, reply.answer.text
        return message
    response = answer_to_proto(reply.answer)
    getattr(message, _REPLY_FIELDS[response.DESCRIPTOR.name]).CopyFrom(response)
    return message


def reply_from_proto(message: session_pb2.AdminReply) -> AdminReply:
    """What a leader answers."""
    kind = message.WhichOneof("reply")
    if kind is None:
        raise MalformedMessage("admin_reply.reply: none of those that are known here")
    if kind == "no_such":
        return AdminReply(message.number, NoSuch(message.no_such.field, message.no_such.message))
    return AdminReply(message.number, _answer_from_proto(getattr(message, kind)))


def command_to_proto(command: AdminCommand) -> Request:
    """The request that asks for it."""
    match command:
        case GetStats():
            return pb.GetStatsRequest()
        case ListRequests(page_size, after):
            return pb.ListRequestsRequest(page_size=page_size, page_token=_page_token(after))
        case AbortRequests(request_id=bytes(request_id)):
            return pb.AbortRequestsRequest(id=request_id.hex())
        case AbortRequests(principal=principal):
            return pb.AbortRequestsRequest(principal=principal)
        case ResetPrefixCache():
            return pb.ResetPrefixCacheRequest()
        case SetAdmission(is_paused):
            return pb.PauseAdmissionRequest() if is_paused else pb.ResumeAdmissionRequest()
        case SetDrain(worker, is_drained):
            return pb.DrainWorkerRequest(address=worker) if is_drained else pb.UndrainWorkerRequest(address=worker)
        case _:
            assert_never(command)


def command_from_proto(request: Request) -> AdminCommand:
    """What a request asks for."""
    match request:
        case pb.GetStatsRequest():
            return GetStats()
        case pb.ListRequestsRequest():
            if request.page_size > PAGE_SIZE_MAX:
                raise MalformedMessage(f"page_size: is {request.page_size}; at most {PAGE_SIZE_MAX} fit a page")
            return ListRequests(request.page_size or PAGE_SIZE_DEFAULT, _page_mark(request.page_token))
        case pb.AbortRequestsRequest():
            return _abort_from_proto(request)
        case pb.ResetPrefixCacheRequest():
            return ResetPrefixCache()
        case pb.PauseAdmissionRequest():
            return SetAdmission(True)
        case pb.ResumeAdmissionRequest():
            return SetAdmission(False)
        case pb.DrainWorkerRequest():
            return SetDrain(_address(request.address), True)
        case pb.UndrainWorkerRequest():
            return SetDrain(_address(request.address), False)
        case _:
            raise AssertionError(f"no request of administration: {request.DESCRIPTOR.name}")


def answer_to_proto(answer: AdminAnswer) -> Response:
    """The response that says it; NoSuch has none, but is a status."""
    match answer:
        case GroupStats():
            return _stats_to_proto(answer)
        case RequestPage(requests, mark):
            return pb.ListRequestsResponse(requests=map(_view_to_proto, requests), next_page_token=_page_token(mark))
        case RequestsAborted(count):
            return pb.AbortRequestsResponse(num_aborted=count)
        case PrefixCacheReset(num_forgotten, num_held):
            return pb.ResetPrefixCacheResponse(num_forgotten_blocks=num_forgotten, num_held_blocks=num_held)
        case AdmissionSet(is_paused):
            return pb.PauseAdmissionResponse() if is_paused else pb.ResumeAdmissionResponse()
        case WorkerDrained(num_requests):
            return pb.DrainWorkerResponse(num_requests=num_requests)
        case WorkerUndrained():
            return pb.UndrainWorkerResponse()
        case NoSuch():
            raise AssertionError("has no message of its own")
        case _:
            assert_never(answer)


def _answer_from_proto(response: Response) -> AdminAnswer:
    match response:
        case pb.GetStatsResponse():
            return _stats_from_proto(response)
        case pb.ListRequestsResponse():
            return RequestPage(tuple(map(_view_from_proto, response.requests)), _page_mark(response.next_page_token))
        case pb.AbortRequestsResponse():
            return RequestsAborted(response.num_aborted)
        case pb.ResetPrefixCacheResponse():
            return PrefixCacheReset(response.num_forgotten_blocks, response.num_held_blocks)
        case pb.PauseAdmissionResponse():
            return AdmissionSet(True)
        case pb.ResumeAdmissionResponse():
            return AdmissionSet(False)
        case pb.DrainWorkerResponse():
            return WorkerDrained(response.num_requests)
        case pb.UndrainWorkerResponse():
            return WorkerUndrained()
        case _:
            raise AssertionError(f"no response of administration: {response.DESCRIPTOR.name}")


def _abort_from_proto(request: pb.AbortRequestsRequest) -> AbortRequests:
    match request.WhichOneof("target"):
        case "id":
            return AbortRequests(request_id=_request_id(request.id))
        case "principal":
            return AbortRequests(principal=request.principal)
        case _:
            raise MalformedMessage("id: is missing; give an id, or a principal")


def _request_id(text: str) -> bytes:
    if len(text) != 2 * REQUEST_ID_BYTES or not _HEXADECIMAL.issuperset(text):
        raise MalformedMessage(f"id: is {text[:100]!r}, and not {2 * REQUEST_ID_BYTES} hexadecimal digits")
    return bytes.fromhex(text)


def _address(text: str) -> str:
    if not text:
        raise MalformedMessage("address: is missing; GetStats lists the workers")
    return text


def _page_token(mark: PageMark | None) -> str:
    return f"{mark.epoch_number}.{mark.counter}" if mark is not None else ""


def _page_mark(token: str) -> PageMark | None:
    if not token:
        return None
    first, _, second = token[:100].partition(".")
    if not (first.isdecimal() and second.isdecimal() and max(int(first), int(second)) <= _NUMBER_MAX):
        raise MalformedMessage("page_token: is not one that was answered with a page")
    return PageMark(int(first), int(second))


def _view_to_proto(view: RequestView) -> pb.RequestInfo:
    return pb.RequestInfo(
        id=view.request_id.hex(),
        client_request_id=view.client_request_id,
        principal=view.principal,
        state=f"REQUEST_STATE_{view.status}",
        prompt_tokens=view.prompt_len,
        output_tokens=view.output_len,
        cached_tokens=view.num_cached_tokens,
        age_ms=view.age_ms,
        worker=view.worker,
        priority=view.priority,
    )


def _view_from_proto(message: pb.RequestInfo) -> RequestView:
    if message.state not in pb.RequestState.values():
        raise MalformedMessage(f"requests: unknown state {message.state}")
    return RequestView(
        request_id=_request_id(message.id),
        client_request_id=message.client_request_id,
        principal=message.principal,
        status=pb.RequestState.Name(message.state).removeprefix("REQUEST_STATE_"),
        prompt_len=message.prompt_tokens,
        output_len=message.output_tokens,
        num_cached_tokens=message.cached_tokens,
        age_ms=message.age_ms,
        worker=message.worker,
        priority=message.priority,
    )


def _stats_to_proto(stats: GroupStats) -> pb.GetStatsResponse:
    return pb.GetStatsResponse(
        model=stats.model,
        epoch=stats.epoch,
        uptime_ms=stats.uptime_ms,
        admission_paused=stats.is_admission_paused,
        durable=stats.is_durable,
        journal_lag_records=stats.journal_lag_records,
        journal_lag_ms=stats.journal_lag_ms,
        num_submitted=stats.num_submitted,
        num_ended=stats.num_ended,
        num_sampled_tokens=stats.num_sampled_tokens,
        num_preemptions=stats.num_preemptions,
        num_readable=stats.num_readable,
        load=load_to_proto(stats.load),
    )


def _stats_from_proto(message: pb.GetStatsResponse) -> GroupStats:
    return GroupStats(
        model=message.model,
        epoch=message.epoch,
        uptime_ms=message.uptime_ms,
        is_admission_paused=message.admission_paused,
        is_durable=message.durable,
        journal_lag_records=message.journal_lag_records,
        journal_lag_ms=message.journal_lag_ms,
        num_submitted=message.num_submitted,
        num_ended=message.num_ended,
        num_sampled_tokens=message.num_sampled_tokens,
        num_preemptions=message.num_preemptions,
        num_readable=message.num_readable,
        load=load_from_proto(message.load),
    )
