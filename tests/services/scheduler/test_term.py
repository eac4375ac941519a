"""One term from the first question to its end, with a worker and a gateway behind real gRPC and a store that can fail."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
from core.fake_worker import MODEL, reference_output
from scripted_worker import ScriptedWorker, scripted_worker

from services.rpc.channel import open_channel
from services.rpc.server import RpcServer, ServerConfig
from services.scheduler.config import SchedulerConfig
from services.scheduler.convert import request_to_proto, response_from_proto
from services.scheduler.core.journal_call import Applied, BeginRewrite, EndRewrite, FoldedRequest, Generation, RewriteChunk
from services.scheduler.core.record import Arrival, StoredRequest
from services.scheduler.core.sequence_status import SequenceStatus
from services.scheduler.sessions import SessionServicer
from services.scheduler.store.memory import MemoryStore
from services.scheduler.term import Deposed, GatewayAhead, Term
from tessera.scheduler.v1 import session_pb2_grpc
from tessera.values.config import Config
from tessera.values.identity import NO_EPOCH, Epoch
from tessera.values.request import Submission
from tessera.values.sampling import SamplingParams
from tessera.values.session import Frame, Heartbeat, Hello, HelloAck, LiveRequest, SchedulerMessage, Submit

RunAsync = Callable[..., Any]

LATER = Epoch(9, b"l" * 16)
REQUEST = Submission(b"r" * 16, np.array([5, 6, 7], np.int32), SamplingParams(seed=1, max_tokens=8, ignore_eos=True))


def hello(highest_epoch: Epoch = NO_EPOCH, live: tuple[LiveRequest, ...] = ()) -> Hello:
    return Hello(highest_epoch, MODEL.tokenizer_digest, b"g" * 16, live)


class House:
    """A term that runs beside the test, and where gateways reach it."""

    def __init__(self, worker: ScriptedWorker, store: MemoryStore, hello_wait_ms: int, told: int) -> None:
        config = SchedulerConfig(
            workers=(worker.address,),
            redis_url="redis://unused",
            scheduling=Config(max_num_seqs=8, max_num_batched_tokens=64),
            hello_wait_ms=hello_wait_ms,
        )
        self.worker, self.store = worker, store
        self.term = Term(config, store, told)
        self.serving = asyncio.Event()
        self.address = ""
        self.ended = asyncio.create_task(self.term.run(lambda ready: self.serving.set() if ready else None))

    @asynccontextmanager
    async def session(self, is_early: bool = False) -> AsyncIterator["GatewayEnd"]:
        """A session that has said nothing, of a gateway that comes once the epoch is taken, or at once."""
        if not is_early:
            await self.worker.asked.wait()
        async with open_channel(self.address) as channel:
            yield GatewayEnd(session_pb2_grpc.SchedulerServiceStub(channel).Session())

    async def deposed(self) -> str:
        """Why the term ended; by nothing but Deposed."""
        with pytest.raises(Deposed) as caught:
            await self.ended
        return str(caught.value)


class GatewayEnd:
    """One session as a gateway sees it."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def say(self, message: Any) -> None:
        await self._call.write(request_to_proto(message))

    async def hear(self) -> tuple[Epoch, SchedulerMessage]:
        return response_from_proto(await self._call.read())

    async def ack(self) -> HelloAck:
        message: SchedulerMessage = Heartbeat()
        while isinstance(message, Heartbeat):
            _, message = await self.hear()
        assert isinstance(message, HelloAck)
        return message

    async def answer(self, received: Sequence[int] = ()) -> list[int]:
        """The whole output of the one request of this session, which had `received` before."""
        tokens = list(received)
        while True:
            _, message = await self.hear()
            for output in message.outputs if isinstance(message, Frame) else ():
                assert output.token_offset == len(tokens)
                tokens.extend(output.token_ids)
                if output.finish is not None:
                    return tokens


@asynccontextmanager
async def house(
    store: MemoryStore | None = None, hello_wait_ms: int = 60_000, worker_epoch: Epoch = NO_EPOCH, told: int = 0
) -> AsyncIterator[House]:
    """A term that begins now; its worker executes whatever comes."""
    async with scripted_worker() as worker:
        worker.fake.epoch = worker_epoch
        made = House(worker, store or MemoryStore(), hello_wait_ms, told)
        working = asyncio.create_task(worker.work())
        server = RpcServer(ServerConfig("127.0.0.1:0"))
        register = session_pb2_grpc.add_SchedulerServiceServicer_to_server
        server.add(register, SessionServicer(lambda: made.term), "tessera.scheduler.v1.SchedulerService")
        made.address = await server.start()
        try:
            yield made
        finally:
            await server.stop(0)
            for task in (made.ended, working):
                task.cancel()
            await asyncio.wait((made.ended, working))


def test_a_request_is_served_and_journalled(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with house() as it, it.session() as gateway:
            await it.serving.wait()
            await gateway.say(hello())
            assert (await gateway.ack()).unknown_request_ids == ()
            await gateway.say(Submit(REQUEST))
            assert await gateway.answer() == reference_output(REQUEST, 1000)[0]
            assert list(it.store.stored().state.requests) == [REQUEST.request_id]

    run_async(scenario())


def test_a_store_that_is_away_at_the_start_is_waited_for(run_async: RunAsync) -> None:
    async def scenario() -> None:
        store = MemoryStore()
        store.failing = True
        async with house(store) as it:
            async with it.session(is_early=True) as gateway:
                with pytest.raises(grpc.aio.AioRpcError, match="waiting for worker and redis"):
                    await gateway.hear()
            assert not it.serving.is_set() and it.worker.fake.epoch == NO_EPOCH, "attached before the epoch was taken"
            store.failing = False
            await it.serving.wait()
            assert it.worker.fake.epoch == store.epoch == it.term.epoch

    run_async(scenario())


def test_a_store_that_goes_away_before_it_is_read_is_waited_for(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with house() as it:
            it.worker.answers.clear()
            async with it.session() as gateway:
                await _greet(gateway)
                it.store.failing = True
                it.worker.answers.set()
                assert await gateway.hear() == (it.term.epoch, Heartbeat())
                assert it.term.leader is None
                it.store.failing = False
                await gateway.ack()

    run_async(scenario())


def test_a_gateway_that_comes_during_a_takeover_is_told_to_wait(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with house() as it:
            it.worker.answers.clear()
            async with it.session() as gateway:
                await _greet(gateway)
                assert it.term.leader is None
                it.worker.answers.set()
                await gateway.ack()

    run_async(scenario())


async def _greet(gateway: GatewayEnd) -> None:
    """Say Hello to a scheduler that cannot lead yet, and hear that it is there."""
    await gateway.say(hello())
    _, message = await gateway.hear()
    assert message == Heartbeat()


def test_a_term_goes_above_what_worker_and_store_hold(run_async: RunAsync) -> None:
    async def scenario() -> None:
        store = MemoryStore()
        store.epoch = Epoch(4, b"e" * 16)
        async with house(store, worker_epoch=Epoch(7, b"e" * 16)) as it:
            await it.serving.wait()
            assert it.term.epoch.number == 8 and store.epoch == it.worker.fake.epoch == it.term.epoch

    run_async(scenario())


def test_a_live_request_waits_for_the_gateway_that_knows_more(run_async: RunAsync) -> None:
    async def scenario() -> None:
        expected = reference_output(REQUEST, 1000)[0]
        async with house(_stored_waiting(REQUEST)) as it, it.session() as gateway:
            await gateway.say(hello(live=(LiveRequest(REQUEST.request_id, 0, tuple(expected[:3])),)))
            assert (await gateway.ack()).unknown_request_ids == ()
            assert await gateway.answer(expected[:3]) == expected

    run_async(scenario())


@pytest.mark.parametrize("said", [{"token_ids": (5, 2**32 - 1)}, {"token_ids": (5,), "tokenizer_digest": "another"}])
def test_what_is_no_output_of_the_model_is_not_joined(run_async: RunAsync, said: dict[str, Any]) -> None:
    async def scenario() -> None:
        expected = reference_output(REQUEST, 1000)[0]
        wrong = LiveRequest(REQUEST.request_id, 0, said.pop("token_ids"))
        async with house(_stored_waiting(REQUEST)) as it, it.session() as stranger, it.session() as gateway:
            await stranger.say(replace(hello(live=(wrong,)), **said))
            await it.serving.wait()
            await gateway.say(hello(live=(LiveRequest(REQUEST.request_id, 0, ()),)))
            assert (await gateway.ack()).unknown_request_ids == ()
            assert await gateway.answer() == expected

    run_async(scenario())


def test_a_live_request_without_a_gateway_holds_a_takeover_up_for_a_moment_only(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with house(_stored_waiting(REQUEST), hello_wait_ms=50) as it:
            await it.serving.wait()

    run_async(scenario())


@pytest.mark.parametrize("is_leading", [True, False])
def test_a_gateway_that_knows_a_later_epoch_ends_the_term(run_async: RunAsync, is_leading: bool) -> None:
    async def scenario() -> None:
        async with house() as it, it.session() as gateway:
            if is_leading:
                await it.serving.wait()
            await gateway.say(hello(LATER))
            with pytest.raises(GatewayAhead) as ahead:
                await it.ended
            assert ahead.value.number == LATER.number
            with pytest.raises(grpc.aio.AioRpcError, match="a new term begins"):
                await gateway.ack()

    run_async(scenario())


def test_an_epoch_that_nobody_can_have_seen_is_refused(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with house() as it, it.session() as liar, it.session() as gateway:
            await it.serving.wait()
            await liar.say(hello(Epoch(2**64 - 1, b"x" * 16)))
            with pytest.raises(grpc.aio.AioRpcError, match="highest_epoch"):
                await liar.ack()
            await gateway.say(hello())
            await gateway.ack()

    run_async(scenario())


def test_a_term_goes_above_what_it_was_told(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with house(told=LATER.number) as it, it.session() as gateway:
            await gateway.say(hello(LATER))
            await gateway.ack()
            assert it.term.epoch.number == LATER.number + 1

    run_async(scenario())


def test_a_store_that_knows_a_later_leader_ends_the_term(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with house() as it, it.session() as gateway:
            await gateway.say(hello())
            await gateway.ack()
            it.store.epoch = LATER
            await gateway.say(Submit(REQUEST))
            assert (await it.deposed()).endswith("epoch 9 was taken")

    run_async(scenario())


def test_a_worker_that_knows_a_later_leader_ends_the_term(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with house() as it:
            it.worker.refuses = True
            assert await it.deposed() == "older epoch"
            assert not it.serving.is_set()

    run_async(scenario())


def test_gateways_are_told_of_the_model_that_was_attached(run_async: RunAsync) -> None:
    async def scenario() -> None:
        store = MemoryStore()
        store.failing = True
        async with house(store) as it:
            await it.worker.described.wait()
            other = replace(MODEL, name="other")
            it.worker.fake.model = other
            it.worker.fake.restart()
            store.failing = False
            async with it.session() as gateway:
                await gateway.say(hello())
                assert (await gateway.ack()).model == other

    run_async(scenario())


def _stored_waiting(submission: Submission) -> MemoryStore:
    """A store in which an earlier leader has written that `submission` waits."""
    store, epoch, generation = MemoryStore(), Epoch(1, b"e" * 16), Generation(1, 1)
    waiting = FoldedRequest(1, StoredRequest(submission, Arrival(1, 1), SequenceStatus.WAITING))
    for call in (BeginRewrite(generation), RewriteChunk(generation, (waiting,), ()), EndRewrite(generation, 1)):
        assert isinstance(store.execute(epoch, call), Applied)
    return store
