"""AdminService at a gateway: every call becomes a query on the session, and the leader's reply its answer."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
from gateway_house import House, SchedulerEnd, reason_and_fields, refused
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.gateway import admin_queries
from services.gateway.admin_servicer import SERVICE_NAME
from services.rpc.access_config import AccessConfig
from tessera.v1 import admin_pb2 as pb
from tessera.v1 import admin_pb2_grpc
from tessera.values.admin import (
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
from tessera.values.load import GroupLoad, WorkerLoad, WorkerState
from tessera.values.session import Rejected, RejectReason, Submit

ID = bytes(range(16))
USER, OPERATOR = "u" * 16, "o" * 16
WORKER = WorkerLoad("w1:1", WorkerState.DRAINED, 0, 0, 0, 64)
STATS = GroupStats("SmolLM2", 7, 5000, True, False, 2, 3, 4, 5, 6, 7, 8, GroupLoad(1, 2, 3, 4, 64, 0.5, workers=(WORKER,)))
VIEW = RequestView(ID, "mine", "me", "RUNNING", 10, 2, 8, 1234, "w1:1", -5)


def stub_of(house: House) -> Any:
    return admin_pb2_grpc.AdminServiceStub(house.channel)


async def exchange(call: Any, end: SchedulerEnd, expected: AdminCommand, answer: AdminAnswer) -> Any:
    """One call, what the scheduler is asked by it, and what it answers."""
    pending = asyncio.ensure_future(call)
    query = await end.hear(AdminQuery)
    assert query.command == expected
    end.say(AdminReply(query.number, answer))
    return await pending


def test_every_call_is_asked_of_the_leader_and_answered(run_async, house):
    async def scenario():
        async with house() as h:
            end, stub = await h.session(), stub_of(h)
            stats = await exchange(stub.GetStats(pb.GetStatsRequest()), end, GetStats(), STATS)
            assert (stats.model, stats.epoch, stats.admission_paused, stats.durable) == ("SmolLM2", 7, True, False)
            (worker,) = stats.load.workers
            assert (worker.address, worker.state) == ("w1:1", pb.WORKER_STATE_DRAINED)

            asked = pb.ListRequestsRequest(page_size=1, page_token="7.3")
            answer = RequestPage((VIEW,), PageMark(7, 9))
            page = await exchange(stub.ListRequests(asked), end, ListRequests(1, PageMark(7, 3)), answer)
            (info,) = page.requests
            assert (info.id, info.state, info.prompt_tokens, page.next_page_token) == (
                ID.hex(),
                pb.REQUEST_STATE_RUNNING,
                10,
                "7.9",
            )

            asked = pb.AbortRequestsRequest(id=ID.hex())
            assert (await exchange(stub.AbortRequests(asked), end, AbortRequests(ID), RequestsAborted(1))).num_aborted == 1
            asked = pb.AbortRequestsRequest(principal="")
            command = AbortRequests(principal="")
            assert (await exchange(stub.AbortRequests(asked), end, command, RequestsAborted(3))).num_aborted == 3

            call = stub.ResetPrefixCache(pb.ResetPrefixCacheRequest())
            reset = await exchange(call, end, ResetPrefixCache(), PrefixCacheReset(5, 2))
            assert (reset.num_forgotten_blocks, reset.num_held_blocks) == (5, 2)

            await exchange(stub.PauseAdmission(pb.PauseAdmissionRequest()), end, SetAdmission(True), AdmissionSet(True))
            await exchange(stub.ResumeAdmission(pb.ResumeAdmissionRequest()), end, SetAdmission(False), AdmissionSet(False))
            call = stub.DrainWorker(pb.DrainWorkerRequest(address="w1:1"))
            assert (await exchange(call, end, SetDrain("w1:1", True), WorkerDrained(4))).num_requests == 4
            call = stub.UndrainWorker(pb.UndrainWorkerRequest(address="w1:1"))
            await exchange(call, end, SetDrain("w1:1", False), WorkerUndrained())

    run_async(scenario())


def test_answers_find_their_calls_in_any_order(run_async, house):
    async def scenario():
        async with house() as h:
            end, stub = await h.session(), stub_of(h)
            calls = [asyncio.ensure_future(stub.AbortRequests(pb.AbortRequestsRequest(principal=name))) for name in "ab"]
            queries = {(query := await end.hear(AdminQuery)).command.principal: query.number for _ in calls}
            end.say(AdminReply(10**6, RequestsAborted(9)))
            for count, name in enumerate("ba", 1):
                end.say(AdminReply(queries[name], RequestsAborted(count)))
            assert [(await call).num_aborted for call in calls] == [2, 1]

    run_async(scenario())


def test_what_is_not_there_is_not_found_and_bad_input_names_its_field(run_async, house):
    async def scenario():
        async with house() as h:
            end, stub = await h.session(), stub_of(h)
            pending = asyncio.ensure_future(stub.DrainWorker(pb.DrainWorkerRequest(address="w9:9")))
            query = await end.hear(AdminQuery)
            end.say(AdminReply(query.number, NoSuch("address", "no worker 'w9:9' is here")))
            error = await refused(pending)
            assert (error.code(), "w9:9" in error.details()) == (grpc.StatusCode.NOT_FOUND, True)
            error = await refused(stub.AbortRequests(pb.AbortRequestsRequest(id="no")))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and reason_and_fields(error) == ("INVALID_FIELD", ["id"])

    run_async(scenario())


def test_a_leader_that_is_lost_before_it_answers_is_unavailable(run_async, house):
    async def scenario():
        async with house(scheduler_wait_ms=0) as h:
            end, stub = await h.session(), stub_of(h)
            pending = asyncio.ensure_future(stub.GetStats(pb.GetStatsRequest()))
            await end.hear(AdminQuery)
            end.break_off()
            error = await refused(pending)
            assert error.code() is grpc.StatusCode.UNAVAILABLE and reason_and_fields(error)[0] == "LEADER_LOST"
            assert ("grpc-retry-pushback-ms", str(admin_queries.RETRY_MS)) in tuple(error.trailing_metadata())
            error = await refused(stub.GetStats(pb.GetStatsRequest()))
            assert error.code() is grpc.StatusCode.UNAVAILABLE and reason_and_fields(error)[0] == "NO_SCHEDULER"
            end = await h.session(number=2)
            await exchange(stub.GetStats(pb.GetStatsRequest()), end, GetStats(), STATS)

    run_async(scenario())


def test_a_leader_that_does_not_answer_is_given_up(run_async, house, monkeypatch):
    monkeypatch.setattr(admin_queries, "ANSWER_S_MAX", 0.05)

    async def scenario():
        async with house() as h:
            await h.session()
            error = await refused(stub_of(h).ResetPrefixCache(pb.ResetPrefixCacheRequest()))
            assert error.code() is grpc.StatusCode.UNAVAILABLE and reason_and_fields(error)[0] == "NO_ANSWER"

    run_async(scenario())


def test_a_paused_admission_is_unavailable_and_says_when_to_come_again(run_async, house):
    async def scenario():
        async with house() as h:
            end = await h.session()
            call = h.generate()
            submit = await end.hear(Submit)
            end.say(Rejected(submit.submission.request_id, 0, RejectReason.PAUSED, "an operator has paused it", 1000))
            error = await refused(call)
            assert error.code() is grpc.StatusCode.UNAVAILABLE and reason_and_fields(error)[0] == "ADMISSION_PAUSED"
            assert ("grpc-retry-pushback-ms", "1000") in tuple(error.trailing_metadata())

    run_async(scenario())


def test_only_administrators_are_let_in_where_callers_are_known(run_async, house, tmp_path: Path):
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{USER} anna public\n{OPERATOR} ops admin\n")

    async def scenario():
        async with house(access=AccessConfig(tokens=tokens)) as h:
            end, stub = await h.session(), stub_of(h)
            for token, code in ((USER, grpc.StatusCode.PERMISSION_DENIED), ("", grpc.StatusCode.UNAUTHENTICATED)):
                metadata = (("authorization", f"Bearer {token}"),) if token else ()
                assert (await refused(stub.GetStats(pb.GetStatsRequest(), metadata=metadata))).code() is code
            metadata = (("authorization", f"Bearer {OPERATOR}"),)
            await exchange(stub.GetStats(pb.GetStatsRequest(), metadata=metadata), end, GetStats(), STATS)

    run_async(scenario())


def test_health_of_the_service_follows_the_leader(run_async, house):
    async def scenario():
        async with house() as h:
            watch = health_pb2_grpc.HealthStub(h.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            await h.session()
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING

    run_async(scenario())
