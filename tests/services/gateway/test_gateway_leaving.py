"""What a scheduler is told of clients that leave, and the bounds on those that come."""

import grpc
import pytest
from gateway_house import max_tokens, output, read_all, reason_and_fields, refused
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from services.gateway import live_requests
from tessera.v1 import inference_pb2 as pb
from tessera.values.session import Abort, Detach, StopFound, Submit


async def began(h, end, **generation):
    """A stream of which the client has the first token."""
    call = h.stream(**generation)
    submit = await end.hear(Submit)
    end.send(output(submit, 0, [504]))
    await call.read()
    return call, submit


def test_with_a_grace_a_client_that_leaves_is_detached(run_async, house):
    """An Abort that its client asks for is one all the same."""

    async def scenario():
        async with house(detach_grace_ms=7_000) as h:
            end = await h.session()
            call, submit = await began(h, end)
            call.cancel()
            assert await end.hear(Detach) == Detach(submit.submission.request_id, 0, 7_000)
            call, submit = await began(h, end, request_id="mine", resume=pb.Resume(number=4))
            await h.stub.Abort(pb.AbortRequest(request_id="mine"))
            assert await end.hear(Abort) == Abort(submit.submission.request_id, 4)
            call.cancel()
            end.send(output(submit, 1, [505], max_tokens(2)))
            call = h.stream()
            await end.hear(Submit)
            assert len(h.gateway.session.live) == 1, "of the others nothing more will come"
            call.cancel()

    run_async(scenario())


def test_a_detachment_waits_for_the_next_leader(run_async, house, tokenizer):
    """And is said to it also where it has to be told of the request itself."""

    async def scenario():
        ids = tokenizer.encode("one STOP", False)
        async with house(detach_grace_ms=7_000) as h:
            first = await h.session()
            known, submit_known = await began(h, first)
            unknown, submit = await began(h, first, stop=["STOP"])
            first.send(output(submit, 0, [504, *ids]))
            found = await first.hear(StopFound)
            await h.scheduler.stop()
            await h.wait_health(False)
            for call in (known, unknown):
                call.cancel()
            while any(stream.farewell is None for stream in h.gateway.session.live):
                await h.health()  # a turn of the loop on both sides
            await h.scheduler.start()
            second = await h.session(submit.submission.request_id, number=2)
            assert await second.hear(Detach) == Detach(submit_known.submission.request_id, 0, 7_000)
            assert (await second.hear(Submit)).received_token_ids == (504, *ids)
            assert await second.hear(StopFound) == found
            assert await second.hear(Detach) == Detach(submit.submission.request_id, 0, 7_000)
            assert len(h.gateway.session.live) == 0

    run_async(scenario())


def test_after_a_pause_of_the_gateway_who_leaves_is_detached(run_async, house, monkeypatch):
    """Its client had no answer for a while, and goes on elsewhere; the scheduler keeps the request as for a lost gateway."""

    async def scenario():
        now = [1_000.0]
        monkeypatch.setattr("services.gateway.session._now_s", lambda: now[0])
        async with house() as h:
            end = await h.session()
            call, submit = await began(h, end)
            now[0] += 20.5  # longer than a heartbeat
            call.cancel()
            assert await end.hear(Detach) == Detach(submit.submission.request_id, 0)
            call, submit = await began(h, end)
            now[0] += 1.0
            call.cancel()
            assert await end.hear(Abort) == Abort(submit.submission.request_id, 0)

    run_async(scenario())


def test_too_many_requests_are_refused_and_resumes_later(run_async, house):
    async def scenario():
        async with house(max_concurrent_requests=2) as h:
            end = await h.session()
            calls = [h.stream(), h.generate()]
            submits = [await end.hear(Submit) for _ in calls]
            for call in (h.stream(), h.generate()):
                error = await refused(call)
                assert (error.code(), reason_and_fields(error)[0]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
                assert "2 requests" in error.details()
                retry = error_details_pb2.RetryInfo()
                assert any(detail.Unpack(retry) for detail in rpc_status.from_call(error).details)
            for name in ("a", "b"):
                calls.append(h.stream(request_id=name, resume=pb.Resume(number=1)))
                submits.append(await end.hear(Submit))
            error = await refused(h.stream(request_id="c", resume=pb.Resume(number=1)))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            end.send(*(output(submit, 0, [504], max_tokens(1)) for submit in submits))
            assert list((await calls.pop(1)).token_ids) == [504]
            for call in calls:
                await read_all(call)
            call = h.generate()
            end.send(output(await end.hear(Submit), 0, [504], max_tokens(1)))
            await call

    run_async(scenario())


def test_requests_whose_clients_left_count_until_they_have_ended(run_async, house):
    async def scenario():
        async with house(max_concurrent_requests=1) as h:
            end = await h.session()
            call, submit = await began(h, end)
            call.cancel()
            await end.hear(Abort)
            assert (await refused(h.generate())).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            end.send(output(submit, 1, [505], max_tokens(2)))
            await h.wait_health(True)
            while len(h.gateway.session.live):
                await h.health()
            h.stream().cancel()

    run_async(scenario())


@pytest.mark.parametrize("bound", ["HELLO_REQUESTS_MAX", "HELLO_TOKENS_MAX"])
def test_what_a_hello_cannot_hold_is_submitted_after_it(run_async, house, monkeypatch, bound):
    async def scenario():
        monkeypatch.setattr(live_requests, bound, 2)
        async with house() as h:
            first = await h.session()
            calls = [await began(h, first) for _ in range(3)]
            first.break_off()
            second = await h.session(number=2)
            assert [live.request_id for live in second.hello.live] == [submit.submission.request_id for _, submit in calls[:2]]
            assert (await second.hear(Submit)).submission.request_id == calls[2][1].submission.request_id
            second.send(*(output(submit, 1, [505], max_tokens(2)) for _, submit in calls))
            for call, _ in calls:
                assert [i for piece in await read_all(call) for i in piece.token_ids] == [505]

    run_async(scenario())


@pytest.mark.parametrize("method", ["Generate", "StreamGenerate"])
def test_a_request_that_cannot_be_decoded_is_refused(run_async, house, method):
    async def scenario():
        async with house() as h:
            await h.session()
            path = f"/tessera.v1.InferenceService/{method}"
            make = h.channel.unary_unary if method == "Generate" else h.channel.unary_stream
            call = make(path, request_serializer=bytes, response_deserializer=bytes)(b"\xff\xff\xff")
            error = await refused(call)
            assert (error.code(), reason_and_fields(error)[0]) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE")

    run_async(scenario())
