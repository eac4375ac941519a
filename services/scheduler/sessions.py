"""The scheduler's end of the gateways' sessions: one bidirectional stream per gateway.

The scheduler speaks first: Standby until it has an epoch, then Invite. The gateway answers that with its Hello, the scheduler, once it
leads, that with a HelloAck. A session belongs to the term that invited it, and ends with it.

A session holds no frames: what a gateway has been sent is a cursor per request, kept by the desk. The writer asks for the next
frame when the last one is out, so a slow gateway costs time, not memory.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol, TypeAlias

import structlog

from services.rpc.errors import FailedPrecondition, InvalidArgument
from services.scheduler import convert
from services.worker.convert import MalformedMessage
from tessera.scheduler.v1 import session_pb2, session_pb2_grpc
from tessera.values.admin import AdminQuery, AdminReply
from tessera.values.identity import NO_EPOCH, Epoch
from tessera.values.kv_events import KvEvents, WatchKv
from tessera.values.load import GroupLoad
from tessera.values.protocol import PROTOCOL_VERSION, VERSION_SKEW
from tessera.values.request import RequestOutput
from tessera.values.session import (
    Abort,
    Detach,
    Frame,
    GatewayMessage,
    Heartbeat,
    Hello,
    HelloAck,
    Invite,
    KnownAs,
    LengthChanged,
    Rejected,
    SchedulerMessage,
    Standby,
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

Control: TypeAlias = Rejected | TakenOver | KnownAs | LengthChanged | GroupLoad | AdminReply
"""What is said of one request beside its frames, of all, and to operators."""

Said: TypeAlias = Submit | Abort | Detach | StopFound | AdminQuery | WatchKv
"""What a gateway says of one request, asks for an operator, or wants to hear of beside."""


class KvEventSource(Protocol):
    """What a gateway has still to be told of prefix caches."""

    def take(self) -> KvEvents | None:
        """The next message, if there is one."""


class GatewaySession:
    """One open stream. `post` queues a control message, `wake` says there may be something to say. Belongs to one event loop."""

    def __init__(self, gateway_id: bytes = b"") -> None:
        self.gateway_id = gateway_id  # known from its Hello on
        self.closing = False
        self.kv_events: KvEventSource | None = None  # while the gateway wants to be told of prefix caches
        self._posted: list[Control] = []
        self._woken = asyncio.Event()

    def post(self, message: Control) -> None:
        """Send `message` soon; beyond POSTED_MAX of them the session ends, and the gateway says all again in the next. Of loads only the last
        is kept."""
        if isinstance(message, GroupLoad):
            self._posted = [earlier for earlier in self._posted if not isinstance(earlier, GroupLoad)]
        if len(self._posted) == POSTED_MAX:
            self.close()
            return
        self._posted.append(message)
        self._woken.set()

    def wake(self) -> None:
        """Look soon for something to say."""
        self._woken.set()

    def close(self) -> None:
        """End the stream: the term is over, or the gateway is gone."""
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

    def take_posted(self) -> list[Control]:
        """Control messages not sent yet; they are the caller's now."""
        posted, self._posted = self._posted, []
        return posted


class SessionDesk(Protocol):
    """One term: who answers what gateways say to its invitation."""

    @property
    def epoch(self) -> Epoch:
        """The term's epoch, which has been taken."""

    @property
    def may_speak(self) -> bool:
        """Whether anything but heartbeats may be said now: the term goes on, and this process is not just back from a pause in which it may
        have been replaced."""

    async def opened(self, session: GatewaySession, hello: Hello) -> HelloAck:
        """A gateway came. Waits until this scheduler leads; raises a ServiceError where the two do not fit."""

    def heard(self, session: GatewaySession, message: Said) -> None:
        """One message, in order; only after `opened` has returned."""

    def take_frame(self, session: GatewaySession) -> Sequence[RequestOutput]:
        """Everything due to this gateway; its cursors move."""

    def closed(self, session: GatewaySession) -> None:
        """The stream ended; the gateway may come back with another."""


class SessionServicer(session_pb2_grpc.SchedulerServiceServicer):
    """Serves `tessera.scheduler.v1.SchedulerService`: stands by at first, and whenever no term is on."""

    def __init__(self) -> None:
        self._desk: SessionDesk | None = None
        self._sessions: set[GatewaySession] = set()

    def invite(self, desk: SessionDesk) -> None:
        """A term begins: invite every gateway that is there or comes."""
        self._desk = desk
        for session in self._sessions:
            session.wake()

    def stand_by(self) -> None:
        """No term is on any more: end every session. Whoever comes back is told to wait."""
        self._desk = None
        for session in self._sessions:
            session.close()

    async def Session(
        self, request_iterator: AsyncIterator[session_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[session_pb2.SessionResponse]:
        """Standby, Invite, HelloAck, then whatever is due; ends when either side ends."""
        session = GatewaySession()
        conversation = _Conversation(session)
        self._sessions.add(session)
        reading = asyncio.create_task(conversation.read(aiter(request_iterator)))
        try:
            while (desk := self._desk) is None and not session.closing:
                yield convert.response_to_proto(NO_EPOCH, Standby())
                await session.woken()
            if desk is not None and not session.closing:
                opening = conversation.begin(desk)
                yield convert.response_to_proto(desk.epoch, Invite())
                while not opening.done() and not session.closing:
                    if not await session.woken():
                        yield convert.response_to_proto(desk.epoch, Heartbeat())  # taking over: the gateway is to wait
                is_open = opening.done()
                if is_open:
                    yield convert.response_to_proto(desk.epoch, opening.result())
                while is_open:
                    is_open = not session.closing  # what is due at its end is said still
                    woken = not is_open or await session.woken()
                    for message in _due(desk, session, woken):
                        yield convert.response_to_proto(desk.epoch, message)
            if reading.done():
                reading.result()  # raises what the gateway did wrong
        finally:
            reading.cancel()
            self._sessions.discard(session)
            conversation.end()


class _Conversation:
    """What a gateway may say when: a Hello once it is invited, and the rest once that is answered."""

    def __init__(self, session: GatewaySession) -> None:
        self._session = session
        self._desk: SessionDesk | None = None
        self._hello: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self._opening: asyncio.Task[HelloAck] | None = None

    def begin(self, desk: SessionDesk) -> asyncio.Task[HelloAck]:
        """The gateway is being invited to `desk`; what comes of it. The session is woken when that is known."""
        self._desk = desk
        self._opening = asyncio.create_task(self._open(desk))
        self._opening.add_done_callback(lambda _: self._session.wake())
        return self._opening

    def end(self) -> None:
        """The stream is over."""
        self._hello.cancel()
        if self._opening is not None:
            self._opening.cancel()
        if self._desk is not None:
            self._desk.closed(self._session)

    async def read(self, requests: AsyncIterator[session_pb2.SessionRequest]) -> None:
        """Hear the gateway to its end, and close the session then. Raises a ServiceError for what no gateway of ours says."""
        try:
            while True:
                self._hear(await _next(requests))
        except StopAsyncIteration:
            pass
        except TimeoutError:
            _log.warning("gateway silent", gateway=self._session.gateway_id.hex())
        except MalformedMessage as error:
            raise InvalidArgument.of(error, reason="MALFORMED_MESSAGE") from error
        finally:
            self._session.close()

    async def _open(self, desk: SessionDesk) -> HelloAck:
        return await desk.opened(self._session, await self._hello)

    def _hear(self, message: GatewayMessage) -> None:
        match message:
            case Hello():
                _check_protocol(message)
                if self._desk is None or self._hello.done():
                    raise MalformedMessage("message: a hello answers an invitation, once")
                self._session.gateway_id = message.gateway_id
                self._hello.set_result(message)
            case Submit() | Abort() | Detach() | StopFound() | AdminQuery() | WatchKv():
                if self._desk is None or self._opening is None or not self._opening.done():
                    raise MalformedMessage(f"message: {type(message).__name__} before the hello was answered")
                self._desk.heard(self._session, message)
            case Heartbeat():
                pass


def _check_protocol(hello: Hello) -> None:
    if hello.protocol != PROTOCOL_VERSION:
        raise FailedPrecondition(
            f"the gateway speaks version {hello.protocol} of the session protocol, this scheduler {PROTOCOL_VERSION}: "
            f"run gateways and schedulers of one release",
            reason=VERSION_SKEW,
            metadata={"gateway": str(hello.protocol), "scheduler": str(PROTOCOL_VERSION)},
        )


def _due(desk: SessionDesk, session: GatewaySession, woken: bool) -> list[SchedulerMessage]:
    due: list[SchedulerMessage] = []
    if desk.may_speak:
        due.extend(session.take_posted())
        if outputs := desk.take_frame(session):
            due.append(Frame(outputs))
        if session.kv_events is not None and (events := session.kv_events.take()) is not None:
            due.append(events)
    return due if due or woken else [Heartbeat()]


async def _next(requests: AsyncIterator[session_pb2.SessionRequest]) -> GatewayMessage:
    """What the gateway says next. Raises StopAsyncIteration, TimeoutError after SILENCE_S, MalformedMessage."""
    async with asyncio.timeout(SILENCE_S):  # not wait_for: in Python 3.11 that can swallow a cancellation
        return convert.request_from_proto(await anext(requests))
