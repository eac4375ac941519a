"""The scheduler's end of a session, against a gateway whose every word the test says and a desk that only takes notes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from core.fake_worker import MODEL

from services.rpc.channel import open_channel
from services.rpc.errors import FailedPrecondition
from services.rpc.server import RpcServer, ServerConfig
from services.rpc.status import reason_of
from services.scheduler import sessions
from services.scheduler.convert import request_to_proto, response_from_proto
from services.scheduler.sessions import GatewaySession, SessionServicer
from tessera.scheduler.v1 import session_pb2, session_pb2_grpc
from tessera.values.identity import NO_EPOCH, Epoch
from tessera.values.protocol import PROTOCOL_VERSION, VERSION_SKEW
from tessera.values.request import RequestOutput
from tessera.values.session import (
    Abort,
    Detach,
    Frame,
    Heartbeat,
    Hello,
    HelloAck,
    Invite,
    SchedulerMessage,
    Standby,
    TakenOver,
)

RunAsync = Callable[..., Any]

EPOCH = Epoch(4, b"s" * 16)
REQUEST = b"r" * 16
HELLO = Hello(NO_EPOCH, MODEL.tokenizer_digest, b"g" * 16)
ACK = HelloAck((), MODEL, 64)


class Desk:
    """Answers every Hello once `leads` is set, and notes the rest."""

    def __init__(self) -> None:
        self.epoch = EPOCH
        self.leads = asyncio.Event()
        self.leads.set()
        self.may_speak = True
        self.refuses = False
        self.sessions: list[GatewaySession] = []
        self.heard_messages: asyncio.Queue[Any] = asyncio.Queue()
        self.due: list[RequestOutput] = []
        self.closings: asyncio.Queue[GatewaySession] = asyncio.Queue()

    async def opened(self, session: GatewaySession, hello: Hello) -> HelloAck:
        await self.leads.wait()
        if self.refuses:
            raise FailedPrecondition("another tokenizer", reason="TOKENIZER_MISMATCH")
        self.sessions.append(session)
        return ACK

    def heard(self, session: GatewaySession, message: Any) -> None:
        self.heard_messages.put_nowait(message)

    def take_frame(self, session: GatewaySession) -> list[RequestOutput]:
        due, self.due = self.due, []
        return due

    def closed(self, session: GatewaySession) -> None:
        self.closings.put_nowait(session)


class GatewayEnd:
    """One session as a gateway sees it."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def say(self, message: Any) -> None:
        await self.call.write(request_to_proto(message))

    async def hear(self) -> SchedulerMessage:
        epoch, message = response_from_proto(await self.call.read())
        assert epoch == (NO_EPOCH if isinstance(message, Standby) else EPOCH)
        return message

    async def ending(self) -> grpc.StatusCode:
        while await self.call.read() is not grpc.aio.EOF:
            pass
        return await self.call.code()

    async def refusal(self) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await self.call.read() is not grpc.aio.EOF:
                pass
        return caught.value


class House:
    """The servicer, and sessions with it that have said nothing yet."""

    def __init__(self, address: str, servicer: SessionServicer) -> None:
        self.servicer = servicer
        self._address = address

    @asynccontextmanager
    async def session(self) -> AsyncIterator[GatewayEnd]:
        async with open_channel(self._address) as channel:
            yield GatewayEnd(session_pb2_grpc.SchedulerServiceStub(channel).Session())


@asynccontextmanager
async def house() -> AsyncIterator[House]:
    """A scheduler that stands by."""
    servicer = SessionServicer()
    server = RpcServer(ServerConfig("127.0.0.1:0"))
    register = session_pb2_grpc.add_SchedulerServiceServicer_to_server
    server.add(register, servicer, "tessera.scheduler.v1.SchedulerService")
    address = await server.start()
    try:
        yield House(address, servicer)
    finally:
        servicer.stand_by()
        await server.stop(0)


@asynccontextmanager
async def session_with(desk: Desk) -> AsyncIterator[GatewayEnd]:
    """A session that has been invited, and has said nothing yet."""
    async with house() as it, it.session() as gateway:
        it.servicer.invite(desk)
        assert await gateway.hear() == Invite()
        yield gateway


@asynccontextmanager
async def opened_with(desk: Desk) -> AsyncIterator[GatewayEnd]:
    """A session whose Hello has been answered."""
    async with session_with(desk) as gateway:
        await gateway.say(HELLO)
        assert await gateway.hear() == ACK
        yield gateway


def test_a_gateway_is_told_to_wait_during_a_takeover(run_async: RunAsync) -> None:
    async def scenario() -> None:
        desk = Desk()
        desk.leads.clear()
        async with session_with(desk) as gateway:
            assert await gateway.hear() == Heartbeat()
            await gateway.say(HELLO)
            assert await gateway.hear() == Heartbeat()
            desk.leads.set()
            assert await gateway.hear() == ACK

    run_async(scenario())


def test_a_standby_says_so_until_it_has_an_epoch(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with house() as it, it.session() as gateway:
            for _ in range(3):
                assert await gateway.hear() == Standby()
                await gateway.say(Heartbeat())
            it.servicer.invite(Desk())
            assert await gateway.hear() == Invite()
            await gateway.say(HELLO)
            assert await gateway.hear() == ACK

    run_async(scenario())


def test_the_end_of_a_term_ends_its_sessions_and_whoever_comes_back_waits(run_async: RunAsync) -> None:
    async def scenario() -> None:
        desk = Desk()
        async with house() as it:
            it.servicer.invite(desk)
            async with it.session() as invited, it.session() as opened:
                assert await invited.hear() == Invite()
                assert await opened.hear() == Invite()
                await opened.say(HELLO)
                assert await opened.hear() == ACK
                it.servicer.stand_by()
                assert await invited.ending() is await opened.ending() is grpc.StatusCode.OK
            assert {await desk.closings.get(), await desk.closings.get()} >= set(desk.sessions)
            async with it.session() as gateway:
                assert await gateway.hear() == Standby()

    run_async(scenario())


@pytest.mark.parametrize("is_invited", [True, False])
def test_a_gateway_of_another_version_is_told_so(is_invited: bool, run_async: RunAsync) -> None:
    async def scenario() -> None:
        desk = Desk()
        async with house() as it, it.session() as gateway:
            if is_invited:
                it.servicer.invite(desk)
            await gateway.hear()
            await gateway.say(replace(HELLO, protocol=0))
            error = await gateway.refusal()
            assert (error.code(), reason_of(error)) == (grpc.StatusCode.FAILED_PRECONDITION, VERSION_SKEW)
            assert f"version 0 of the session protocol, this scheduler {PROTOCOL_VERSION}:" in (error.details() or "")
            assert not desk.sessions

    run_async(scenario())


def test_nothing_but_heartbeats_is_said_while_it_may_not_speak(run_async: RunAsync) -> None:
    async def scenario() -> None:
        desk = Desk()
        async with opened_with(desk) as gateway:
            (session,) = desk.sessions
            desk.may_speak = False
            desk.due = [RequestOutput(REQUEST, 1, 0, (7, 8))]
            session.post(TakenOver(REQUEST, 0))
            assert await gateway.hear() == Heartbeat()
            desk.may_speak = True
            session.wake()
            assert await gateway.hear() == TakenOver(REQUEST, 0)
            assert await gateway.hear() == Frame((RequestOutput(REQUEST, 1, 0, (7, 8)),))

    run_async(scenario())


@pytest.mark.parametrize(
    ("first", "field"),
    [
        (request_to_proto(Abort(REQUEST, 0)), "message"),
        (session_pb2.SessionRequest(), "message"),
        (session_pb2.SessionRequest(hello=session_pb2.Hello(gateway_id=b"short")), "hello.gateway_id"),
    ],
)
def test_a_session_begins_with_a_whole_hello(first: session_pb2.SessionRequest, field: str, run_async: RunAsync) -> None:
    async def scenario() -> None:
        desk = Desk()
        async with session_with(desk) as gateway:
            await gateway.call.write(first)
            error = await gateway.refusal()
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and (error.details() or "").startswith(f"{field}: ")
            assert not desk.sessions

    run_async(scenario())


def test_a_hello_before_the_invitation_is_malformed(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with house() as it, it.session() as gateway:
            await gateway.hear()
            await gateway.say(HELLO)
            assert (await gateway.refusal()).code() is grpc.StatusCode.INVALID_ARGUMENT

    run_async(scenario())


def test_a_refused_hello_ends_the_session(run_async: RunAsync) -> None:
    async def scenario() -> None:
        desk = Desk()
        desk.refuses = True
        async with session_with(desk) as gateway:
            await gateway.say(HELLO)
            error = await gateway.refusal()
            assert (error.code(), reason_of(error)) == (grpc.StatusCode.FAILED_PRECONDITION, "TOKENIZER_MISMATCH")
            await desk.closings.get()

    run_async(scenario())


def test_messages_pass_in_both_directions(run_async: RunAsync) -> None:
    async def scenario() -> None:
        desk = Desk()
        async with opened_with(desk) as gateway:
            for said in (Abort(REQUEST, 0), Detach(REQUEST, 0, 50)):
                await gateway.say(said)
                assert await desk.heard_messages.get() == said
            (session,) = desk.sessions
            session.post(TakenOver(REQUEST, 0))
            desk.due = [RequestOutput(REQUEST, 1, 0, (7, 8))]
            session.wake()
            assert await gateway.hear() == TakenOver(REQUEST, 0)
            assert await gateway.hear() == Frame((RequestOutput(REQUEST, 1, 0, (7, 8)),))
            assert await gateway.hear() == Heartbeat()  # and then nothing is due

    run_async(scenario())


@pytest.mark.parametrize(
    "say",
    [
        session_pb2.SessionRequest(),
        session_pb2.SessionRequest(abort=session_pb2.Abort(request_id=b"x")),
        request_to_proto(HELLO),
    ],
    ids=["empty", "short id", "second hello"],
)
def test_a_malformed_message_ends_its_session_only(say: session_pb2.SessionRequest, run_async: RunAsync) -> None:
    async def scenario() -> None:
        desk = Desk()
        async with opened_with(desk) as gateway:
            await gateway.call.write(say)
            assert (await gateway.refusal()).code() is grpc.StatusCode.INVALID_ARGUMENT
            assert await desk.closings.get() is desk.sessions[0]
            assert desk.heard_messages.empty() and desk.closings.empty()

    run_async(scenario())


def test_a_silent_gateway_loses_its_session(run_async: RunAsync, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        desk = Desk()
        async with opened_with(desk) as gateway:
            assert await gateway.ending() is grpc.StatusCode.OK
            assert await desk.closings.get() is desk.sessions[0]

    monkeypatch.setattr(sessions, "SILENCE_S", 0.2)
    run_async(scenario())


@pytest.mark.parametrize("leads", [True, False])
def test_a_gateway_that_goes_is_noted_once(leads: bool, run_async: RunAsync) -> None:
    async def scenario() -> None:
        desk = Desk()
        if not leads:
            desk.leads.clear()
        async with session_with(desk) as gateway:
            await gateway.say(HELLO)
            await gateway.hear()
            gateway.call.cancel()
            await desk.closings.get()
            desk.leads.set()
            await asyncio.sleep(0.05)
            assert desk.closings.empty() and len(desk.sessions) == leads, "a gone gateway is answered"

    run_async(scenario())


def test_a_closed_session_says_what_is_due_and_ends(run_async: RunAsync) -> None:
    async def scenario() -> None:
        desk = Desk()
        async with opened_with(desk) as gateway:
            (session,) = desk.sessions
            session.post(TakenOver(REQUEST, 0))
            session.close()
            assert await gateway.hear() == TakenOver(REQUEST, 0)
            assert await gateway.ending() is grpc.StatusCode.OK

    run_async(scenario())


def test_a_gateway_that_reads_no_answers_loses_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "POSTED_MAX", 2)
    session = GatewaySession(b"g" * 16)
    for _ in range(3):
        assert not session.closing
        session.post(TakenOver(REQUEST, 0))
    assert session.closing and len(session.take_posted()) == 2


@pytest.mark.parametrize("turns", range(3))
def test_a_waiting_session_ends_when_cancelled_just_as_it_is_woken(turns: int, run_async: RunAsync) -> None:
    async def scenario() -> None:
        session = GatewaySession(b"g" * 16)
        waiting = asyncio.create_task(session.woken())
        await asyncio.sleep(0.01)
        session.wake()
        for _ in range(turns):
            await asyncio.sleep(0)
        was_waiting = waiting.cancel()
        await asyncio.wait((waiting,))
        assert waiting.cancelled() == was_waiting, "the cancellation was lost"

    run_async(scenario())
