"""Session messages survive the wire, and what no correct peer sends is refused."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler import convert
from services.scheduler.convert_admin import command_from_proto
from services.scheduler.convert_kv_events import kv_events_from_proto
from services.worker.convert import MalformedMessage
from tessera.scheduler.v1 import session_pb2
from tessera.v1 import admin_pb2
from tessera.values.admin import (
    AbortRequests,
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
from tessera.values.finish import Finish, FinishReason
from tessera.values.identity import NO_EPOCH, Epoch
from tessera.values.kv_events import WatchKv
from tessera.values.load import GroupLoad, WorkerLoad, WorkerState
from tessera.values.logprobs import Logprobs
from tessera.values.model import ModelInfo
from tessera.values.request import DetokenizeOptions, RequestOutput, RequestTimings, Submission, TimeLimits
from tessera.values.sampling import SEED_MAX, SamplingParams
from tessera.values.session import (
    Abort,
    Detach,
    Frame,
    Heartbeat,
    Hello,
    HelloAck,
    Invite,
    KnownAs,
    LengthChanged,
    LiveRequest,
    Rejected,
    RejectReason,
    Standby,
    StopFound,
    Submit,
    TakenOver,
)
from tessera.worker.v1 import types_pb2

ID, OTHER_ID = bytes(range(16)), bytes(range(16, 32))
EPOCH = Epoch(7, b"i" * 16)
MODEL = ModelInfo("SmolLM2", "LlamaForCausalLM", 49152, 8192, (2, 0), 1, "ab" * 32, "cd" * 32)
SUBMISSION = Submission(
    request_id=ID,
    prompt_token_ids=np.array([0, 5, 2**31 - 1], np.int32),
    sampling=SamplingParams(SEED_MAX, 0.0, 0.5, -1, 0.1, 9, 2, True, (3, 4), ((5,), (6, 7))),
    detokenize=DetokenizeOptions(("\n", "é"), True, False),
    client_request_id="mine",
    principal="me",
    priority=-3,
    cache_salt="tenant é",
    max_model_length=2**32 - 1,
    fork_of=OTHER_ID,
    is_seed_given=True,
    limits=TimeLimits(1, 2, 3, 2**31 - 1),
    trace_context="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
)
WORKERS = tuple(WorkerLoad(f"w{number}", state, number, 2, 3, 2**40) for number, state in enumerate(WorkerState))
LOAD = GroupLoad(1, 2, 3, 4, 2**40, 0.25, 12.5, 7, 8, WORKERS)
COMMANDS = [
    GetStats(),
    ListRequests(1000, PageMark(2**64 - 1, 3)),
    ListRequests(1),
    AbortRequests(request_id=ID),
    AbortRequests(principal=""),
    AbortRequests(principal="me é"),
    ResetPrefixCache(),
    SetAdmission(True),
    SetAdmission(False),
    SetDrain("w1:1", True),
    SetDrain("w1:1", False),
]
VIEW = RequestView(ID, "mine", "me", "SWAPPED", 1, 2, 3, 4, "w1:1", -5)
ANSWERS = [
    GroupStats("SmolLM2", 7, 1, True, False, 2, 3, 4, 5, 6, 7, 8, LOAD),
    RequestPage((VIEW, replace(VIEW, request_id=OTHER_ID, status="WAITING", worker="")), PageMark(7, 8)),
    RequestPage(()),
    RequestsAborted(3),
    PrefixCacheReset(2**40, 3),
    AdmissionSet(True),
    AdmissionSet(False),
    WorkerDrained(2),
    WorkerUndrained(),
    NoSuch("address", "no worker 'é'"),
]
PLAIN = Submission(bytes(16), np.array([1], np.int32), SamplingParams(0))


def over_the_wire(message):
    return type(message).FromString(message.SerializeToString())


@pytest.mark.parametrize(
    "message",
    [
        Hello(NO_EPOCH, "ab" * 32, b"g" * 16),
        Hello(EPOCH, "", b"g" * 16, (LiveRequest(ID, 0, (1, 2)), LiveRequest(OTHER_ID, 3, ()))),
        Abort(ID, 2),
        StopFound(ID, 0, 17, "stop"),
        Detach(ID, 3),
        Detach(ID, 3, 0),
        *(AdminQuery(2**64 - 1, command) for command in COMMANDS),
        WatchKv(True),
        WatchKv(False),
        Heartbeat(),
    ],
)
def test_gateway_messages_round_trip(message):
    assert convert.request_from_proto(over_the_wire(convert.request_to_proto(message))) == message


def test_a_submission_round_trips():
    submit = Submit(SUBMISSION, subscriber=4, received_token_ids=(8, 9))
    back = convert.request_from_proto(over_the_wire(convert.request_to_proto(submit)))
    assert isinstance(back, Submit)
    assert (back.subscriber, back.received_token_ids) == (4, (8, 9))
    assert back.submission.prompt_token_ids.dtype == np.int32
    assert back.submission.prompt_token_ids.tolist() == [0, 5, 2**31 - 1]
    for name in {field.name for field in fields(Submission)} - {"prompt_token_ids"}:
        assert getattr(back.submission, name) == getattr(SUBMISSION, name) != getattr(PLAIN, name)


def test_what_a_submission_does_not_say_stays_unsaid():
    back = convert.request_from_proto(over_the_wire(convert.request_to_proto(Submit(PLAIN))))
    assert isinstance(back, Submit)
    for name in {field.name for field in fields(Submission)} - {"prompt_token_ids"}:
        assert getattr(back.submission, name) == getattr(PLAIN, name)


def test_a_fork_of_something_that_is_no_request_id_is_malformed():
    message = convert.request_to_proto(Submit(replace(PLAIN, fork_of=b"short")))
    with pytest.raises(MalformedMessage, match="fork_of"):
        convert.request_from_proto(message)


@pytest.mark.parametrize(
    "message",
    [
        HelloAck((ID, OTHER_ID), MODEL, 8000),
        HelloAck((), MODEL, 1),
        Frame(()),
        *(Rejected(ID, 1, reason, "17 > 16", 250) for reason in RejectReason),
        TakenOver(ID, 5),
        KnownAs(ID, 5, OTHER_ID),
        LengthChanged(17),
        GroupLoad(),
        LOAD,
        *(AdminReply(3, answer) for answer in ANSWERS),
        Invite(),
        Heartbeat(),
    ],
)
def test_scheduler_messages_round_trip(message):
    assert convert.response_from_proto(over_the_wire(convert.response_to_proto(EPOCH, message))) == (EPOCH, message)


def test_a_standby_speaks_under_no_epoch():
    message = over_the_wire(convert.response_to_proto(NO_EPOCH, Standby()))
    assert convert.response_from_proto(message) == (NO_EPOCH, Standby())


def test_only_a_standby_speaks_under_no_epoch():
    with pytest.raises(MalformedMessage, match="epoch"):
        convert.response_from_proto(session_pb2.SessionResponse(heartbeat=session_pb2.Heartbeat()))


NUMBERS = st.integers(0, 2**32 - 1)
ENDS = st.builds(
    Finish,
    st.sampled_from(FinishReason),
    NUMBERS,
    st.none() | NUMBERS,
    st.none() | st.text(max_size=3),
    st.text(max_size=3),
)
OUTPUTS = st.builds(
    RequestOutput, st.binary(min_size=16, max_size=16), NUMBERS, NUMBERS, st.lists(NUMBERS, max_size=4).map(tuple)
)
ENDED = st.builds(
    lambda output, finish, cached, timings: RequestOutput(
        output.request_id, output.subscriber, output.token_offset, output.token_ids, cached, finish, timings
    ),
    OUTPUTS,
    ENDS,
    NUMBERS,
    st.builds(RequestTimings, NUMBERS, NUMBERS, NUMBERS, NUMBERS),
)


def logprobs_of(counts: list[int]) -> Logprobs:
    """Some for so many tokens; none at all is as good as none."""
    column = np.array(counts, np.int32)
    ids = np.arange(column.sum(), dtype=np.int32)
    return Logprobs(column, ids, (-ids / 8).astype(np.float32), column + 1)


@st.composite
def with_logprobs(draw, outputs):
    """An output whose tokens have some, and whose prompt may have some."""
    output = draw(outputs)
    counts = [draw(st.integers(0, 3)) for _ in output.token_ids]
    prompt = draw(st.none() | st.lists(st.integers(0, 2), max_size=3).map(logprobs_of))
    return replace(output, logprobs=logprobs_of(counts) if any(counts) else None, prompt_logprobs=prompt)


@given(st.lists(OUTPUTS | ENDED | with_logprobs(OUTPUTS) | with_logprobs(ENDED), max_size=6))
def test_any_frame_round_trips(outputs):
    frame = Frame(tuple(outputs))
    assert convert.response_from_proto(over_the_wire(convert.response_to_proto(EPOCH, frame))) == (EPOCH, frame)


def request(**field):
    return session_pb2.SessionRequest(**field)


@pytest.mark.parametrize(
    ("message", "names"),
    [
        (request(), "message"),
        (request(abort=session_pb2.Abort(request_id=b"short")), "abort"),
        (request(hello=session_pb2.Hello(gateway_id=b"short")), "gateway_id"),
        (request(submit=session_pb2.Submit()), "prompt_token_ids"),
        (
            request(submit=session_pb2.Submit(submission=session_pb2.Submission(request_id=ID, prompt_token_ids=[2**31]))),
            "prompt_token_ids",
        ),
    ],
)
def test_a_malformed_request_is_refused(message, names):
    with pytest.raises(MalformedMessage, match=names):
        convert.request_from_proto(message)


@pytest.mark.parametrize(
    ("frame", "names"),
    [
        (session_pb2.Frame(request_ids=ID, token_counts=[1]), "columns"),
        (
            session_pb2.Frame(request_ids=ID, subscribers=[0], token_offsets=[0], token_counts=[2], token_ids=[1]),
            "1 tokens for 2",
        ),
        (session_pb2.Frame(request_ids=ID[:8]), "columns"),
        (session_pb2.Frame(ends=[session_pb2.RequestEnd(index=0)]), "ends"),
        (session_pb2.Frame(prompt_logprobs=[session_pb2.PromptLogprobs(index=0)]), "prompt_logprobs"),
        (session_pb2.Frame(logprobs=types_pb2.Logprobs(counts=bytes(4), ranks=bytes(4))), "logprobs.counts: 1 values for 0"),
    ],
)
def test_a_malformed_frame_is_refused(frame, names):
    with pytest.raises(MalformedMessage, match=names):
        convert.frame_from_proto(frame)


def test_a_response_without_content_or_with_an_unknown_reason_is_refused():
    with pytest.raises(MalformedMessage, match="message"):
        convert.response_from_proto(session_pb2.SessionResponse())
    with pytest.raises(MalformedMessage, match="reason"):
        convert.rejected_from_proto(session_pb2.Rejected(request_id=ID))


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (admin_pb2.ListRequestsRequest(page_size=1001), "page_size"),
        (admin_pb2.ListRequestsRequest(page_token="7"), "page_token"),
        (admin_pb2.ListRequestsRequest(page_token=f"1.{2**64}"), "page_token"),
        (admin_pb2.ListRequestsRequest(page_token="9" * 10_000), "page_token"),
        (admin_pb2.AbortRequestsRequest(), "id"),
        (admin_pb2.AbortRequestsRequest(id="zz" * 16), "id"),
        (admin_pb2.AbortRequestsRequest(id="00 " * 10 + "00"), "id"),
        (admin_pb2.DrainWorkerRequest(), "address"),
        (admin_pb2.UndrainWorkerRequest(), "address"),
    ],
)
def test_an_operators_request_that_is_wrong_names_the_field(request_, field):
    with pytest.raises(MalformedMessage, match=f"^{field}: "):
        command_from_proto(request_)


def test_queries_and_replies_of_another_release_are_malformed():
    with pytest.raises(MalformedMessage, match="admin_query"):
        convert.request_from_proto(session_pb2.SessionRequest(admin_query=session_pb2.AdminQuery(number=1)))
    empty = session_pb2.SessionResponse(
        admin_reply=session_pb2.AdminReply(number=1), epoch={"number": 1, "instance": b"i" * 16}
    )
    with pytest.raises(MalformedMessage, match="admin_reply"):
        convert.response_from_proto(empty)


SOUND = {
    "block_ids": [1, 2],
    "digests": bytes(16),
    "links": bytes(16),
    "have_parents": bytes(2),
    "token_ids": bytes(2 * 16 * 4),
}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"digests": bytes(8)}, "columns of"),
        ({"links": bytes(24)}, "columns of"),
        ({"have_parents": b""}, "columns of"),
        ({"digests": bytes(15)}, "digests: 15 bytes"),
        ({"token_ids": bytes(12)}, "token_ids: 3 ids of 2 blocks"),
        ({"token_ids": bytes(13)}, "token_ids: 13 bytes"),
        ({"block_ids": []}, "token_ids: 32 ids of 0 blocks"),
    ],
)
def test_changes_of_prefix_caches_have_columns_of_one_length(changes, field):
    assert [len(change.block_ids) for change in kv_events_from_proto(kv_events()).changes] == [2]
    with pytest.raises(MalformedMessage, match=field):
        kv_events_from_proto(kv_events(**changes))


def kv_events(**changes):
    return session_pb2.KvEvents(changes=[session_pb2.PoolChange(**(SOUND | changes))])
