"""Clients that do not read: they cost what they leave unread, for a while, and nobody else anything."""

import asyncio
import gc
import weakref
from types import SimpleNamespace

import grpc
import pytest
from gateway_house import max_tokens, output, read_all, reason_and_fields
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from services.gateway.slow_readers import LOOKS_MIN, SlowReaders
from services.rpc.errors import Overloaded
from tessera.v1 import inference_pb2 as pb
from tessera.v1 import inference_pb2_grpc
from tessera.values.session import Abort, Detach, Submit

SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1))
"""What a server may send ahead of a reader: gRPC's own is some megabytes, of the client's memory."""

FRAMES, FRAME_LEN = 200, 10
"""Many times what fits that window."""


class Context:
    """One whose messages are read only when the test says so."""

    def __init__(self):
        self.room = asyncio.Event()

    async def send_initial_metadata(self, metadata):
        pass

    async def write(self, response):
        await self.room.wait()


def feeding(unread_tokens):
    return SimpleNamespace(unread_tokens=unread_tokens)


async def write_once(readers, stream, context):
    async with readers.watching((stream,)) as call:
        await call.write(context, "message")
        return call


async def began(*tasks):
    """Let them come to their writes."""
    for _ in tasks:
        await asyncio.sleep(0)
    await asyncio.sleep(0)


def test_a_write_that_waits_too_long_ends_its_call_and_no_other(run_async):
    async def scenario():
        readers = SlowReaders(limit_s=1.0, tokens_max=100, resume_ms=0)
        slow, quick = Context(), Context()
        tasks = [asyncio.create_task(write_once(readers, feeding(7), context)) for context in (slow, quick)]
        await began(*tasks)
        for _ in range(LOOKS_MIN):
            readers._look()
        await began(*tasks)
        assert not any(task.done() for task in tasks), "the time is not over"
        quick.room.set()
        await tasks[1]
        readers._look()
        with pytest.raises(Overloaded, match=r"7 tokens wait .* aborted") as refused:
            await tasks[0]
        assert (refused.value.reason, refused.value.retry_after_ms) == ("SLOW_READER", 0)
        assert refused.value.metadata == {"unread_tokens": "7"}
        assert readers.num_ended == 1
        assert not readers._calls

    run_async(scenario())


def test_who_reads_slowly_but_reads_goes_on(run_async):
    async def scenario():
        readers = SlowReaders(limit_s=1.0, tokens_max=100, resume_ms=0)

        async def answer():
            async with readers.watching((feeding(100),)) as call:
                for _ in range(10):
                    context.room.clear()
                    await call.write(context, "message")
                context.room.clear()
                await context.room.wait()  # for something to write: that is nobody's fault

        context = Context()
        task = asyncio.create_task(answer())
        for _ in range(11):
            await began(task)
            for _ in range(LOOKS_MIN):
                readers._look()
            context.room.set()
        await task

    run_async(scenario())


def test_too_many_tokens_behind_a_write_end_its_call(run_async):
    async def scenario():
        readers = SlowReaders(limit_s=0, tokens_max=100, resume_ms=5_000)
        stream, other = feeding(100), feeding(100)
        tasks = [asyncio.create_task(write_once(readers, one, Context())) for one in (stream, other)]
        await began(*tasks)
        for _ in range(1000):
            readers._look()
        await began(*tasks)
        assert not any(task.done() for task in tasks), "without a limit of time they may wait"
        stream.unread_tokens = 101
        readers._look()
        with pytest.raises(Overloaded, match=r"101 tokens .* resumed within 5000 ms") as refused:
            await tasks[0]
        assert refused.value.retry_after_ms > 0
        tasks[1].cancel()

    run_async(scenario())


def test_an_error_in_a_watched_call_is_its_own(run_async):
    async def scenario():
        readers = SlowReaders(limit_s=1.0, tokens_max=100, resume_ms=0)
        with pytest.raises(TimeoutError, match="of something else"):
            async with readers.watching((feeding(0),)):
                raise TimeoutError("of something else")
        assert not readers._calls and readers.num_ended == 0

    run_async(scenario())


def slow_client(h):
    channel = grpc.aio.insecure_channel(h.gateway.address, options=SMALL_WINDOW)
    return channel, inference_pb2_grpc.InferenceServiceStub(channel)


async def stall(stub, end, **generation):
    """A stream of which the client reads one message, and that goes on beyond what the window holds."""
    call = stub.StreamGenerate(pb.StreamGenerateRequest(generation=pb.Generation(text="Hello", **generation)))
    submit = await end.hear(Submit)
    end.send(output(submit, 0, [504] * FRAME_LEN))
    first = await call.read()
    for number in range(1, FRAMES):
        end.send(output(submit, number * FRAME_LEN, [504] * FRAME_LEN))
    return call, submit, first


async def end_of(call):
    """The pieces that still come, and the error that ends them."""
    pieces = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            pieces.append(await call.read())
    return pieces, caught.value


def retry_after(error):
    retry = error_details_pb2.RetryInfo()
    is_told = any(detail.Unpack(retry) for detail in rpc_status.from_call(error).details)
    return retry.retry_delay.ToMilliseconds() if is_told else None


def test_a_client_that_does_not_read_frees_its_seat(run_async, house):
    """While it still does not read: nothing of its call is kept but what gRPC was handed."""

    async def scenario():
        async with house(slow_reader_ms=200, max_concurrent_requests=1) as h:
            end = await h.session()
            channel, stub = slow_client(h)
            call, submit, first = await stall(stub, end)
            stream = weakref.ref(h.gateway.session.live.get(submit.submission.request_id))
            assert await end.hear(Abort) == Abort(submit.submission.request_id, 0)
            end.send(output(submit, FRAMES * FRAME_LEN, [505], max_tokens(FRAMES * FRAME_LEN + 1)))
            while len(h.gateway.session.live):
                await h.health()
            gc.collect()
            assert stream() is None, "the answer is kept for nobody"

            other = h.stream()
            submit = await end.hear(Submit)
            end.send(output(submit, 0, [504], max_tokens(1)))
            assert len(await read_all(other)) == 1

            pieces, error = await end_of(call)
            assert (error.code(), reason_and_fields(error)[0]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER")
            assert retry_after(error) is None
            ends = [piece.token_offset + len(piece.token_ids) for piece in (first, *pieces)]
            assert [piece.token_offset for piece in pieces] == ends[:-1], "what was sent is whole"
            await channel.close()

    run_async(scenario())


def test_a_client_that_does_not_take_its_first_message_is_told_too(run_async, house):
    """It reads nothing until its seat is free; then what was sent, and the status."""

    async def scenario():
        async with house(slow_reader_ms=200) as h:
            end = await h.session()
            channel, stub = slow_client(h)
            call = stub.StreamGenerate(pb.StreamGenerateRequest(generation=pb.Generation(text="Hello")))
            submit = await end.hear(Submit)
            count = FRAMES * FRAME_LEN
            end.send(output(submit, 0, [504] * count))
            assert await end.hear(Abort) == Abort(submit.submission.request_id, 0)
            pieces, error = await end_of(call)
            assert (error.code(), reason_and_fields(error)[0]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER")
            assert sum(len(piece.token_ids) for piece in pieces) in (0, count), "what was sent is whole"
            await channel.close()

    run_async(scenario())


def test_with_a_grace_a_slow_reader_can_resume(run_async, house):
    async def scenario():
        async with house(slow_reader_ms=200, detach_grace_ms=60_000) as h:
            end = await h.session()
            channel, stub = slow_client(h)
            asked = {"request_id": "mine", "sampling": pb.Sampling(max_tokens=FRAMES * FRAME_LEN)}
            call, submit, first = await stall(stub, end, **asked)
            assert await end.hear(Detach) == Detach(submit.submission.request_id, 0, 60_000)
            pieces, error = await end_of(call)
            assert (error.code(), reason_and_fields(error)[0]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER")
            assert retry_after(error) > 0
            had = [first, *pieces]
            tokens = sum(len(piece.token_ids) for piece in had)
            size = sum(len(piece.text.encode()) for piece in had)
            again = h.stream(**asked, resume=pb.Resume(number=1, token_offset=tokens, text_offset=size))
            resumed = await end.hear(Submit)
            end.send(output(resumed, 0, [504] * (FRAMES * FRAME_LEN), max_tokens(FRAMES * FRAME_LEN)))
            rest = await read_all(again)
            assert rest[0].token_offset == tokens
            assert tokens + sum(len(piece.token_ids) for piece in rest) == FRAMES * FRAME_LEN
            await channel.close()

    run_async(scenario())
