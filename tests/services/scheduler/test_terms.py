"""Term after term of one scheduler process, beside another leader that the test plays by its lease."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from scripted_worker import ScriptedWorker, scripted_worker
from structlog.testing import CapturingLogger
from term_house import LATER, GatewayEnd, hello

from services.rpc.channel import open_channel
from services.rpc.errors import FailedPrecondition
from services.rpc.health import HealthServicer
from services.rpc.server import RpcServer, ServerConfig
from services.scheduler import terms
from services.scheduler.config import SchedulerConfig
from services.scheduler.core.journal_call import BeginRewrite, EndRewrite, Failed, Generation
from services.scheduler.sessions import SessionServicer
from services.scheduler.store.memory import MemoryStore
from services.scheduler.store.port import LeaseView, LookReply
from services.scheduler.term_end import Deposed
from services.scheduler.terms import DURABLE, READY, SERVICE_NAME, Terms
from tessera.scheduler.v1 import session_pb2_grpc
from tessera.values.config import Config
from tessera.values.identity import NO_EPOCH, Epoch
from tessera.values.session import Invite, Standby

RunAsync = Callable[..., Any]

LEASE_MS = 400
OTHERS = Epoch(3, b"o" * 16)


class Process:
    """Everything of a scheduler but its command line."""

    def __init__(self, worker: ScriptedWorker, store: MemoryStore) -> None:
        config = SchedulerConfig(
            workers=(worker.address,),
            redis_url="redis://unused",
            scheduling=Config(max_num_seqs=8, max_num_batched_tokens=64),
            lease_ms=LEASE_MS,
            worker_silence_ms=60_000,
        )
        self.worker, self.store = worker, store
        self.health = HealthServicer()
        self.sessions = SessionServicer()
        self.address = ""
        self.terms = Terms(config, store, self.sessions, self.health)

    def is_serving(self, name: str = SERVICE_NAME) -> bool:
        return self.health.status(name) == health_pb2.HealthCheckResponse.SERVING

    @asynccontextmanager
    async def session(self) -> AsyncIterator[GatewayEnd]:
        async with open_channel(self.address) as channel:
            yield GatewayEnd(session_pb2_grpc.SchedulerServiceStub(channel).Session())


@asynccontextmanager
async def process(store: MemoryStore) -> AsyncIterator[Process]:
    async with scripted_worker() as worker:
        working = asyncio.create_task(worker.work())
        made = Process(worker, store)
        server = RpcServer(ServerConfig("127.0.0.1:0"))
        server.add(session_pb2_grpc.add_SchedulerServiceServicer_to_server, made.sessions, SERVICE_NAME)
        made.address = await server.start()
        try:
            yield made
        finally:
            await made.terms.end()
            await server.stop(0)
            working.cancel()
            await asyncio.wait((working,))


@pytest.fixture
def store() -> MemoryStore:
    """Somebody has led under OTHERS, and does no more."""
    made = MemoryStore()
    for call in (BeginRewrite(Generation(OTHERS.number, 1)), EndRewrite(Generation(OTHERS.number, 1), 1)):
        made.execute(OTHERS, call)
    return made


async def invited(gateway: GatewayEnd) -> Epoch:
    """The epoch that invites it; until then it is told to wait."""
    while True:
        epoch, message = await gateway.hear()
        if message == Invite():
            return epoch
        assert message == Standby()


def test_a_standby_leads_when_the_leader_is_gone(run_async: RunAsync, store: MemoryStore) -> None:
    async def scenario() -> None:
        await store.renew(OTHERS, 60_000)
        async with process(store) as it, it.session() as gateway:
            for _ in range(2):
                assert await gateway.hear() == (NO_EPOCH, Standby())
            assert not it.is_serving() and not it.is_serving(DURABLE)
            await store.release(OTHERS)
            assert (await invited(gateway)).number == OTHERS.number + 1
            await gateway.say(hello())
            await gateway.ack()
            assert it.is_serving()

    run_async(scenario())


def test_it_is_ready_while_it_leads_and_while_it_could(
    run_async: RunAsync, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = asyncio.Event()
    look = store.look

    async def watched() -> LookReply:
        looked.set()
        return Failed("connection refused") if fails else await look()

    async def another_look() -> None:
        for _ in range(2):  # the first may have been under way
            looked.clear()
            await looked.wait()

    async def scenario() -> None:
        nonlocal fails
        await store.renew(OTHERS, 60_000)
        async with process(store) as it, it.session() as gateway:
            await another_look()
            assert not it.is_serving(READY), "no store answers"
            fails = False
            await another_look()
            assert it.is_serving(READY) and not it.is_serving(), "it stands by"
            await store.release(OTHERS)
            await invited(gateway)
            await gateway.say(hello())
            await gateway.ack()
            fails = True
            assert it.is_serving(READY) and it.is_serving(), "it leads"

    fails = True
    monkeypatch.setattr(store, "look", watched)
    run_async(scenario())


def test_a_leader_that_was_replaced_stands_by_and_leads_again(run_async: RunAsync, store: MemoryStore) -> None:
    async def scenario() -> None:
        async with process(store) as it:
            async with it.session() as gateway:
                mine = await invited(gateway)
                await gateway.say(hello())
                await gateway.ack()
                assert await store.take_epoch(mine, LATER, 60_000)
                await gateway.ended()
            async with it.session() as gateway:
                assert await gateway.hear() == (NO_EPOCH, Standby())
                assert not it.is_serving()
                await store.release(LATER)
                assert (await invited(gateway)).number == LATER.number + 1

    run_async(scenario())


def test_a_gateway_that_knows_a_later_epoch_is_led_above_it_at_once(run_async: RunAsync, store: MemoryStore) -> None:
    async def scenario() -> None:
        async with process(store) as it:
            async with it.session() as gateway:
                await invited(gateway)
                await gateway.say(hello(LATER))
                with pytest.raises(grpc.aio.AioRpcError, match="a new term begins"):
                    await gateway.ack()
            async with it.session() as gateway:
                assert (await invited(gateway)).number == LATER.number + 1
                await gateway.say(hello(LATER))
                await gateway.ack()

    run_async(scenario())


def test_a_process_that_ends_gives_its_lease_back(run_async: RunAsync, store: MemoryStore) -> None:
    async def scenario() -> None:
        async with process(store) as it, it.session() as gateway:
            mine = await invited(gateway)
            await gateway.say(hello())
            await gateway.ack()
            await it.terms.end()
            assert await store.look() == LeaseView(mine, is_held=False, is_empty=False)
            assert not it.is_serving()

    run_async(scenario())


def test_a_process_that_ends_while_the_store_is_away_ends_all_the_same(run_async: RunAsync, store: MemoryStore) -> None:
    async def scenario() -> None:
        async with process(store) as it, it.session() as gateway:
            await invited(gateway)
            store.failing = True
            await it.terms.end()

    run_async(scenario())


@pytest.mark.parametrize("is_ours", [False, True])
def test_two_groups_that_share_a_worker_are_told_so_once(
    is_ours: bool, run_async: RunAsync, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where the worker follows the next leader of this group, which the store knows."""

    async def scenario() -> None:
        async with process(store) as it:
            while not it.is_serving() or it.worker._working is None:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)
            it.worker.refusal = FailedPrecondition(
                "older epoch", reason="OLDER_EPOCH", metadata={"epoch_number": "7", "epoch_instance": "78"}
            )
            it.worker.asked.clear()
            it.worker.break_off()
            await it.worker.asked.wait()
            mine = store.epoch
            if is_ours:
                store.epoch = Epoch(7, b"x" * 16)
            while not log.calls:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await it.terms._note_stranger(Deposed("again", 7, it.worker.address), mine)
        said = [call for call in log.calls if call.args[0] != "standing by again"]
        assert [call.args[0] for call in said] == ["a worker follows a scheduler that is not of this group"] * (not is_ours)
        for call in said:
            assert call.method_name == "warning"
            assert (call.kwargs["worker"], call.kwargs["group"]) == (it.worker.address, "default")

    log = CapturingLogger()
    monkeypatch.setattr(terms, "_log", log)
    run_async(scenario())
