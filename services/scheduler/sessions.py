"""The scheduler's end of the gateways' sessions: one bidirectional stream per gateway.

A session holds no frames: what a gateway has been sent is a cursor per request, kept by the desk. The writer asks for the next
frame when the last one is out, so a slow gateway costs time, not memory.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import structlog

from services.rpc.errors import FieldViolation, InvalidArgument, Unavailable
from services.scheduler import convert
from services.worker.convert import MalformedMessage
from tessera.scheduler.v1 import session_pb2, session_pb2_grpc
from tessera.values.identity import Epoch
from tessera.values.request import RequestOutput
from tessera.values.session import (
    Abort,
    Frame,
    GatewayMessage,
    Heartbeat,
    Hello,
    HelloAck,
    Rejected,
    SchedulerMessage,
    StopFound,
    Submit,
    TakenOver,
)

_log = structlog.get_logger()

HEARTBEAT_S = 0.5

SILENCE_S = 5.0
"""A gateway that says nothing for this long has lost its session; its requests wait for the grace."""


POSTED_MAX = 65_536
"""Answers that a gateway may leave unread; one that asks on and does not read has lost its session."""


class GatewaySession:
    """One open stream. `post` queues a control message, `wake` says frames may be due."""

    def __init__(self, gateway_id: bytes) -> None:
        self.gateway_id = gateway_id
        self.closing = False
        self._posted: list[Rejected | TakenOver] = []
        self._woken = asyncio.Event()

    def post(self, message: Rejected | TakenOver) -> None:
        """Send `message` soon; beyond POSTED_MAX of them the session ends, and the gateway says all again in the next."""
        if len(self._posted) == POSTED_MAX:
            self.close()
            return
        self._posted.append(message)
        self._woken.set()

    def wake(self) -> None:
        """Look for frames soon."""
        self._woken.set()

    def close(self) -> None:
        """End the stream: the leader's term is over, or it drains."""
        self.closing = True
        self._woken.set()

    async def woken(self) -> bool:
        """Wait until there is something to look for; False after HEARTBEAT_S without."""
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                await self._woken.wait()
        except TimeoutError:
            return False
        self._woken.clear()
        return True

    def take_posted(self) -> list[Rejected | TakenOver]:
        """Control messages not sent yet; they are the caller's now."""
        posted, self._posted = self._posted, []
        return posted


class SessionDesk(Protocol):
    """Who answers what gateways say."""

    @property
    def epoch(self) -> Epoch:
        """The leader's term."""

    def admit_session(self) -> None:
        """Raise Unavailable before there is an epoch to speak under."""

    async def opened(self, session: GatewaySession, hello: Hello) -> HelloAck:
        """A gateway came. Waits until this scheduler leads; raises a ServiceError where the two do not fit."""

    def heard(self, session: GatewaySession, message: Submit | Abort | StopFound) -> None:
        """One message, in order."""

    def take_frame(self, session: GatewaySession) -> list[RequestOutput]:
        """Everything due to this gateway; its cursors move."""

    def closed(self, session: GatewaySession) -> None:
        """The stream ended; the gateway may come back with another."""


class SessionServicer(session_pb2_grpc.SchedulerServiceServicer):
    """Serves `tessera.scheduler.v1.SchedulerService`. A session stays with the desk that `present_desk` names as it opens."""

    def __init__(self, present_desk: Callable[[], SessionDesk]) -> None:
        self._present_desk = present_desk

    async def Session(
        self, request_iterator: AsyncIterator[session_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[session_pb2.SessionResponse]:
        """Hello first, then whatever comes; ends when either side ends."""
        desk = self._present_desk()
        desk.admit_session()
        requests = aiter(request_iterator)
        hello = await _first(requests)
        session = GatewaySession(hello.gateway_id)
        opening = asyncio.create_task(desk.opened(session, hello))
        reader: asyncio.Task[None] | None = None
        try:
            while not (await asyncio.wait([opening], timeout=HEARTBEAT_S))[0]:
                yield _response(desk, Heartbeat())  # taking over: the gateway is to wait for the answer
            yield _response(desk, await opening)
            reader = asyncio.create_task(_read(desk, session, requests))
            while not session.closing:
                woken = await session.woken()
                for message in _due(desk, session, woken):
                    yield _response(desk, message)
            if reader.done():
                await reader
        finally:
            opening.cancel()
            if reader is not None:
                reader.cancel()
            desk.closed(session)


def _due(desk: SessionDesk, session: GatewaySession, woken: bool) -> list[SchedulerMessage]:
    due: list[SchedulerMessage] = [*session.take_posted()]
    if outputs := desk.take_frame(session):
        due.append(Frame(tuple(outputs)))
    return due if due or woken else [Heartbeat()]


def _response(desk: SessionDesk, message: SchedulerMessage) -> session_pb2.SessionResponse:
    return convert.response_to_proto(desk.epoch, message)


async def _read(desk: SessionDesk, session: GatewaySession, requests: AsyncIterator[session_pb2.SessionRequest]) -> None:
    try:
        while True:
            message = await _next(requests)
            match message:
                case Submit() | Abort() | StopFound():
                    desk.heard(session, message)
                case Hello():
                    raise MalformedMessage("message: a session has one hello")
                case Heartbeat():
                    pass
    except StopAsyncIteration:
        pass
    except TimeoutError:
        _log.warning("gateway silent", gateway=session.gateway_id.hex())
    except MalformedMessage as error:
        raise _malformed(error) from error
    finally:
        session.close()


async def _next(requests: AsyncIterator[session_pb2.SessionRequest]) -> GatewayMessage:
    """What the gateway says next. Raises StopAsyncIteration, TimeoutError after SILENCE_S, MalformedMessage."""
    async with asyncio.timeout(SILENCE_S):  # not wait_for: in Python 3.11 that can swallow a cancellation
        return convert.request_from_proto(await anext(requests))


async def _first(requests: AsyncIterator[session_pb2.SessionRequest]) -> Hello:
    try:
        message = await _next(requests)
    except (StopAsyncIteration, TimeoutError):
        raise Unavailable("no hello came", reason="NO_HELLO", retry_after_ms=0) from None
    except MalformedMessage as error:
        raise _malformed(error) from error
    if not isinstance(message, Hello):
        raise _malformed(MalformedMessage("message: a session begins with a hello"))
    return message


def _malformed(error: MalformedMessage) -> InvalidArgument:
    field, _, text = str(error).partition(": ")
    return InvalidArgument((FieldViolation(field, text),), reason="MALFORMED_MESSAGE")
