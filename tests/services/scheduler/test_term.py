"""One term from its taken epoch to its end, with a worker and a gateway behind real gRPC and a store that can fail."""

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
from services.scheduler.clock import boot_us
from services.scheduler.config import SchedulerConfig
from services.scheduler.convert import request_to_proto, response_from_proto
from services.scheduler.core.journal_call import Applied, BeginRewrite, EndRewrite, FoldedRequest, Generation, RewriteChunk
from services.scheduler.core.record import Arrival, StoredRequest
from services.scheduler.core.sequence_status import SequenceStatus
from services.scheduler.sessions import SessionServicer
from services.scheduler.standby import EpochTake
from services.scheduler.store.memory import MemoryStore
from services.scheduler.term import Term
from services.scheduler.term_end import Deposed, GatewayAhead
from tessera.scheduler.v1 import session_pb2_grpc
from tessera.values.config import Config
from tessera.values.identity import NO_EPOCH, Epoch
from tessera.values.request import Submission
from tessera.values.sampling import SamplingParams
from tessera.values.session import Frame, Heartbeat, Hello, HelloAck, Invite, LiveRequest, SchedulerMessage, Submit

RunAsync = Callable[..., Any]

LATER = Epoch(9, b"l" * 16)
REQUEST = Submission(b"r" * 16, np.array([5, 6, 7], np.int32), SamplingParams(seed=1, max_tokens=8, ignore_eos=True))


def hello(highest_epoch: Epoch = NO_EPOCH, live: tuple[LiveRequest, ...] = ()) -> Hello:
    return Hello(highest_epoch, MODEL.tokenizer_digest, b"g" * 16, live)


class House:
    """A term that runs beside the test, and where gateways reach it. `is_serving`, `is_durable`: what health was told last."""

    def __init__(self, workers: tuple[str, ...], store: MemoryStore, hello_wait_ms: int, lease_ms: int) -> None:
        config = SchedulerConfig(
            workers=workers,
            redis_url="redis://unused",
            scheduling=Config(max_num_seqs=8, max_num_batched_tokens=64),
            hello_wait_ms=hello_wait_ms,
            lease_ms=lease_ms,
        )
        self.store = store
        store.epoch = Epoch(store.epoch.number + 1, b"t" * 16)
        self.is_serving = self.is_durable = False
        self.told = asyncio.Event()  # health was told something
        self.term = Term(config, store, EpochTake(store.epoch, boot_us(), frozenset(workers)), self)
        self.sessions = SessionServicer()
        self.sessions.invite(self.term)
        self.address = ""
        self.ended = asyncio.create_task(self.term.run())

    def serving(self, is_serving: bool) -> None:
        self.is_serving = is_serving
        self.told.set()

    def durable(self, is_durable: bool) -> None:
        self.is_durable = is_durable
        self.told.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until health was told so."""
        while not condition():
            self.told.clear()
            await self.told.wait()

    async def leads(self) -> None:
        await self.until(lambda: self.is_serving)

    @asynccontextmanager
    async def session(self) -> AsyncIterator["GatewayEnd"]:
        """A session that has been invited, and has said nothing."""
        async with open_channel(self.address) as channel:
            gateway = GatewayEnd(session_pb2_grpc.SchedulerServiceStub(channel).Session())
            assert await gateway.hear() == (self.term.epoch, Invite())
            yield gateway

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
    store: MemoryStore | None = None, hello_wait_ms: int = 60_000, lease_ms: int = 60_000, others: tuple[str, ...] = ()
) -> AsyncIterator[tuple[House, ScriptedWorker]]:
    """A term that begins now; its one worker executes whatever comes. `others` are addresses of further workers."""
    async with scripted_worker() as worker:
        made = House((worker.address, *others), store or MemoryStore(), hello_wait_ms, lease_ms)
        working = asyncio.create_task(worker.work())
        server = RpcServer(ServerConfig("127.0.0.1:0"))
        register = session_pb2_grpc.add_SchedulerServiceServicer_to_server
        server.add(register, made.sessions, "tessera.scheduler.v1.SchedulerService")
        made.address = await server.start()
        try:
            yield made, worker
        finally:
            made.sessions.stand_by()
            await server.stop(0)
            for task in (made.ended, working):
                task.cancel()
            await asyncio.wait((made.ended, working))


def test_a_request_is_served_and_journalled(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with house() as (it, _), it.session() as gateway:
            await it.leads()
            await gateway.say(hello())
            assert (await gateway.ack()).unknown_request_ids == ()
            await gateway.say(Submit(REQUEST))
            assert await gateway.answer() == reference_output(REQUEST, 1000)[0]
            assert list(it.store.stored().state.requests) == [REQUEST.request_id]

    run_async(scenario())


def test_a_store_that_goes_away_before_it_is_read_is_waited_for(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with house() as (it, worker):
            worker.answers.clear()
            async with it.session() as gateway:
                await _greet(gateway)
                it.store.failing = True
                worker.answers.set()
                assert await gateway.hear() == (it.term.epoch, Heartbeat())
                assert it.term.leader is None
                it.store.failing = False
                await gateway.ack()

    run_async(scenario())


def test_a_gateway_that_comes_during_a_takeover_is_told_to_wait(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with house() as (it, worker):
            worker.answers.clear()
            async with it.session() as gateway:
                await _greet(gateway)
                assert it.term.leader is None
                worker.answers.set()
                await gateway.ack()

    run_async(scenario())


async def _greet(gateway: GatewayEnd) -> None:
    """Say Hello to a scheduler that cannot lead yet, and hear that it is there."""
    await gateway.say(hello())
    _, message = await gateway.hear()
    assert message == Heartbeat()


def test_a_live_request_waits_for_the_gateway_that_knows_more(run_async: RunAsync) -> None:
    async def scenario() -> None:
        expected = reference_output(REQUEST, 1000)[0]
        async with house(_stored_waiting(REQUEST)) as (it, _), it.session() as gateway:
            await gateway.say(hello(live=(LiveRequest(REQUEST.request_id, 0, tuple(expected[:3])),)))
            assert (await gateway.ack()).unknown_request_ids == ()
            assert await gateway.answer(expected[:3]) == expected

    run_async(scenario())


@pytest.mark.parametrize("said", [{"token_ids": (5, 2**32 - 1)}, {"token_ids": (5,), "tokenizer_digest": "another"}])
def test_what_is_no_output_of_the_model_is_not_joined(run_async: RunAsync, said: dict[str, Any]) -> None:
    async def scenario() -> None:
        expected = reference_output(REQUEST, 1000)[0]
        wrong = LiveRequest(REQUEST.request_id, 0, said.pop("token_ids"))
        async with house(_stored_waiting(REQUEST)) as (it, _), it.session() as stranger, it.session() as gateway:
            await stranger.say(replace(hello(live=(wrong,)), **said))
            await it.leads()
            await gateway.say(hello(live=(LiveRequest(REQUEST.request_id, 0, ()),)))
            assert (await gateway.ack()).unknown_request_ids == ()
            assert await gateway.answer() == expected

    run_async(scenario())


def test_a_live_request_without_a_gateway_holds_a_takeover_up_for_a_moment_only(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with house(_stored_waiting(REQUEST), hello_wait_ms=50) as (it, _):
            await it.leads()

    run_async(scenario())


@pytest.mark.parametrize("is_leading", [True, False])
def test_a_gateway_that_knows_a_later_epoch_ends_the_term(run_async: RunAsync, is_leading: bool) -> None:
    async def scenario() -> None:
        async with house() as (it, _), it.session() as gateway:
            if is_leading:
                await it.leads()
            await gateway.say(hello(LATER))
            with pytest.raises(GatewayAhead) as ahead:
                await it.ended
            assert ahead.value.told == LATER.number
            with pytest.raises(grpc.aio.AioRpcError, match="a new term begins"):
                await gateway.ack()

    run_async(scenario())


def test_an_epoch_that_nobody_can_have_seen_is_refused(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with house() as (it, _), it.session() as liar, it.session() as gateway:
            await it.leads()
            await liar.say(hello(Epoch(2**64 - 1, b"x" * 16)))
            with pytest.raises(grpc.aio.AioRpcError, match="highest_epoch"):
                await liar.ack()
            await gateway.say(hello())
            await gateway.ack()

    run_async(scenario())


def test_a_store_that_knows_a_later_leader_ends_the_term(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with house() as (it, _), it.session() as gateway:
            await gateway.say(hello())
            await gateway.ack()
            it.store.epoch = LATER
            await gateway.say(Submit(REQUEST))
            assert (await it.deposed()).endswith("epoch 9 was taken")

    run_async(scenario())


def test_a_worker_that_knows_a_later_leader_ends_the_term(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with house() as (it, worker):
            worker.refuses = True
            assert await it.deposed() == "older epoch"
            assert not it.is_serving

    run_async(scenario())


def _stored_waiting(submission: Submission) -> MemoryStore:
    """A store in which an earlier leader has written that `submission` waits."""
    store, epoch, generation = MemoryStore(), Epoch(1, b"e" * 16), Generation(1, 1)
    waiting = FoldedRequest(1, StoredRequest(submission, Arrival(1, 1), SequenceStatus.WAITING))
    for call in (BeginRewrite(generation), RewriteChunk(generation, (waiting,), ()), EndRewrite(generation, 1)):
        assert isinstance(store.execute(epoch, call), Applied)
    return store
