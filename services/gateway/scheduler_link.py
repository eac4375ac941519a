"""One scheduler as a gateway reaches it: a channel to its address, and one stream that is opened again whenever it breaks."""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import grpc
import structlog

from services.rpc.channel import channel_stamp, is_connected, open_channel
from services.rpc.status import reason_of
from services.rpc.watched_files import Stamp
from services.scheduler.convert import request_to_proto, response_from_proto
from services.worker.convert import MalformedMessage
from tessera.scheduler.v1 import session_pb2, session_pb2_grpc
from tessera.values.identity import Epoch
from tessera.values.session import GatewayMessage, Heartbeat, HelloAck, Invite, SchedulerMessage, Standby

_log = structlog.get_logger()

SILENT_HEARTBEATS_MAX = 3
"""A stream without a message for this many heartbeats is given up."""

TURNS_PER_SILENCE = 8
"""Silence is counted in turns of the event loop: while this process has no time to listen, nobody is silent."""

RETRY_S_MIN, RETRY_S_MAX = 0.05, 1.0
"""Pause after a broken stream; doubles up to the maximum while streams break before they were of any use."""


class SessionBroken(Exception):
    """This stream cannot go on; a new one may."""


class SessionSilent(SessionBroken):
    """Nothing was heard for too long."""


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """Why a stream is over: for people, and the `reason` that the scheduler gave with its status, or an empty one."""

    text: str
    reason: str = ""
    was_silent: bool = False


class LinkOwner(Protocol):
    """Who acts on what schedulers say. All of it is synchronous; SessionBroken, raised from the first three, ends the stream."""

    def invited(self, link: "SchedulerLink", epoch: Epoch, protocol: int) -> None:
        """The scheduler has taken `epoch`."""

    def stands_by(self, link: "SchedulerLink") -> None:
        """The scheduler lives and does not lead."""

    def heard(self, link: "SchedulerLink", epoch: Epoch, message: SchedulerMessage) -> None:
        """Anything else that the scheduler says under `epoch`."""

    def ended(self, link: "SchedulerLink", end: StreamEnd) -> None:
        """The stream is over; there will be another."""


class SchedulerLink:
    """Keeps one stream to `address` open for ever. Belongs to one event loop."""

    def __init__(self, address: str, heartbeat_s: float, owner: LinkOwner) -> None:
        self.address = address
        self._heartbeat_s = heartbeat_s
        self._owner = owner
        self._stream: asyncio.Task[None] | None = None
        self._was_of_use = False
        self._retry_s = RETRY_S_MIN
        self._finishing = False
        self._silent_s = 0.0
        self._outbox: deque[session_pb2.SessionRequest] = deque()
        self._outbox_changed = asyncio.Event()

    async def run(self) -> None:
        """Open streams for ever; ends by cancellation only."""
        while True:
            stamp = channel_stamp()
            async with open_channel(self.address) as channel:
                await self._open_streams(channel, stamp)

    async def _open_streams(self, channel: grpc.aio.Channel, stamp: Stamp) -> None:
        """One stream after the other, until one was silent, or there are other certificates than those of `stamp`: then a new connection may
        come through where this one does not."""
        stub = session_pb2_grpc.SchedulerServiceStub(channel)
        while await is_connected(channel, stamp):
            self._outbox.clear()
            self._was_of_use = False
            self._stream = asyncio.create_task(self._converse(stub))
            try:
                await asyncio.wait([self._stream])
            finally:
                self._stream.cancel()
            end, self._stream = _end_of(self._stream), None
            self._owner.ended(self, end)
            self._retry_s = RETRY_S_MIN if self._was_of_use else min(2 * self._retry_s, RETRY_S_MAX)
            await asyncio.sleep(self._retry_s)
            if end.was_silent:
                return

    def say(self, message: GatewayMessage) -> None:
        """Send `message` on the stream that is open now; lost if it breaks before."""
        self._outbox.append(request_to_proto(message))
        self._outbox_changed.set()

    def reopen(self) -> None:
        """Give up the stream that is open now, with what was not sent on it."""
        if self._stream is not None:
            self._stream.cancel()

    async def finish(self) -> None:
        """Send all that was said, and nothing more; returns when the scheduler has heard it: it ends the stream then."""
        self._finishing = True
        self._outbox_changed.set()
        if self._stream is not None:
            await asyncio.wait([self._stream])

    async def _converse(self, stub: session_pb2_grpc.SchedulerServiceStub) -> None:
        """One stream to its end, which is always an exception."""
        call, this = stub.Session(), asyncio.current_task()
        assert this is not None
        writer, watch = asyncio.create_task(self._write(call)), asyncio.create_task(self._watch())
        watch.add_done_callback(lambda ended: None if ended.cancelled() else this.cancel())
        try:
            while True:
                epoch, message = await _read(call)
                self._silent_s = 0.0
                match message:
                    case Invite(protocol):
                        self._owner.invited(self, epoch, protocol)
                    case Standby():
                        self._owner.stands_by(self)
                    case _:
                        self._owner.heard(self, epoch, message)
                self._was_of_use = self._was_of_use or isinstance(message, Standby | HelloAck)
        except asyncio.CancelledError:
            if not watch.done() or this.uncancel():
                raise
            raise SessionSilent(f"nothing heard for {self._silent_s:.1f} s") from None
        finally:
            watch.cancel()
            writer.cancel()
            call.cancel()

    async def _watch(self) -> None:
        """Ends once nothing has been heard for too long."""
        silence_s = SILENT_HEARTBEATS_MAX * self._heartbeat_s
        loop, turn_s = asyncio.get_running_loop(), silence_s / TURNS_PER_SILENCE
        self._silent_s = 0.0
        while self._silent_s < silence_s:
            before = loop.time()
            await asyncio.sleep(turn_s)
            self._silent_s += min(loop.time() - before, 2 * turn_s)

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:
        heartbeat = request_to_proto(Heartbeat())
        try:
            while True:
                try:
                    async with asyncio.timeout(self._heartbeat_s):
                        await self._outbox_changed.wait()
                except TimeoutError:
                    await call.write(heartbeat)
                    continue
                self._outbox_changed.clear()
                while self._outbox:
                    await call.write(self._outbox.popleft())
                if self._finishing:
                    await call.done_writing()
                    return
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the stream has ended: the reader says why


async def _read(call: grpc.aio.StreamStreamCall) -> tuple[Epoch, SchedulerMessage]:
    response = await call.read()
    if response is grpc.aio.EOF:
        raise SessionBroken("the scheduler closed the stream")
    if response is None:  # which is how grpc.aio says it
        raise SessionBroken("a message cannot be decoded")
    return response_from_proto(response)


def _end_of(stream: asyncio.Task[None]) -> StreamEnd:
    """What ended `stream`; a bug of ours is raised."""
    if stream.cancelled():
        return StreamEnd("given up here")
    match stream.exception():
        case grpc.aio.AioRpcError() as error:
            reason = reason_of(error)
            return StreamEnd(error.details() or "" if reason else f"{error.code().name}: {error.details()}", reason)
        case SessionBroken() | MalformedMessage() as error:
            return StreamEnd(str(error), was_silent=isinstance(error, SessionSilent))
        case error:
            assert error is not None, "a stream ends by an exception"
            raise error
