"""One term with a worker and a gateway behind real gRPC, and a store that can fail: what the tests of terms share."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from core.fake_worker import MODEL
from scripted_worker import ScriptedWorker, scripted_worker

from services.rpc.channel import open_channel
from services.rpc.server import RpcServer, ServerConfig
from services.scheduler import lease_keeper, term
from services.scheduler.clock import boot_us
from services.scheduler.config import SchedulerConfig
from services.scheduler.convert import request_to_proto, response_from_proto
from services.scheduler.core.journal_call import (
    EndRewrite,
    Failed,
    JournalCall,
    JournalReply,
)
from services.scheduler.sessions import SessionServicer
from services.scheduler.standby import EpochTake
from services.scheduler.store.memory import MemoryStore
from services.scheduler.store.port import RenewReply
from services.scheduler.term import Term
from services.scheduler.term_end import Deposed
from tessera.scheduler.v1 import session_pb2_grpc
from tessera.values.config import Config
from tessera.values.identity import NO_EPOCH, Epoch
from tessera.values.request import Submission
from tessera.values.sampling import SamplingParams
from tessera.values.session import Frame, Heartbeat, Hello, HelloAck, Invite, LiveRequest, SchedulerMessage

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
            worker_silence_ms=60_000,
        )
        self.store, self.workers = store, workers
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

    async def ended(self) -> None:
        """Wait for the end of the stream."""
        while await self._call.read() is not grpc.aio.EOF:
            pass

    async def ack(self) -> HelloAck:
        message: SchedulerMessage = Heartbeat()
        while isinstance(message, Heartbeat):
            _, message = await self.hear()
        assert isinstance(message, HelloAck)
        return message

    async def output(self) -> None:
        """Wait for some tokens."""
        while not isinstance((await self.hear())[1], Frame):
            pass

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


class StoppedClock:
    """The clock of the lease: it stands, unless the test lets time pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.us = boot_us()
        for module in (term, lease_keeper):
            monkeypatch.setattr(module, "boot_us", lambda: self.us)

    async def pass_s(self, seconds: int) -> None:
        """Let time pass while this process runs: it looks at the clock at least every ten seconds."""
        for _ in range(0, seconds, 10):
            self.us += 10_000_000
            await asyncio.sleep(2 * term.TICK_S)

    def stop_s(self, seconds: int) -> None:
        """Let time pass while this process is stopped."""
        self.us += seconds * 1_000_000


class CountingStore(MemoryStore):
    """A store that counts what is asked of it, and can fail in renewing alone."""

    def __init__(self) -> None:
        super().__init__()
        self.num_renewals = self.num_calls = 0
        self.renewed, self.rewritten = asyncio.Event(), asyncio.Event()
        self.cannot_renew = False

    def empty(self) -> None:
        """What a server restarted without its file holds."""
        self.epoch, self._held_until_ms, self._complete, self._begun = NO_EPOCH, 0.0, None, None

    async def renew(self, epoch: Epoch, lease_ms: int) -> RenewReply:
        self.num_renewals += 1
        self.renewed.set()
        return Failed("told not to renew") if self.cannot_renew else await super().renew(epoch, lease_ms)

    async def call(self, epoch: Epoch, call: JournalCall) -> JournalReply:
        self.num_calls += 1
        reply = await super().call(epoch, call)
        if isinstance(call, EndRewrite):
            self.rewritten.set()
        return reply
