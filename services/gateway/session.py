"""The gateway's end of the session: one long-lived stream to the scheduler, opened again whenever it breaks.

Order of one round: the scheduler's Invite, our Hello with every live request, its HelloAck once it leads, then Submit for what that Hello did not list or the leader
does not know, and again every Abort and StopFound without an answer. So a broken stream loses nothing: what is owed to the scheduler is
a function of the live requests, and what a scheduler owes is a function of the Hello.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import structlog

from gateway.errors import TokenizerMismatch
from gateway.served_model import ServedModel
from gateway.tokenizer import Tokenizer
from services.gateway.live_requests import LiveRequests
from services.gateway.refusals import rejection_of, taken_over
from services.gateway.request_stream import RequestStream
from services.rpc.channel import open_channel
from services.rpc.errors import TOKENIZER_MISMATCH, FailedPrecondition, ServiceError, Unavailable
from services.rpc.status import reason_of
from services.scheduler.convert import request_to_proto, response_from_proto
from services.worker.convert import MalformedMessage
from tessera.scheduler.v1 import session_pb2, session_pb2_grpc
from tessera.values.identity import NO_EPOCH, Epoch, new_instance_id
from tessera.values.request import RequestOutput
from tessera.values.session import (
    Frame,
    GatewayMessage,
    Heartbeat,
    Hello,
    HelloAck,
    Invite,
    Rejected,
    SchedulerMessage,
    Standby,
    TakenOver,
)

_log = structlog.get_logger()

SILENT_HEARTBEATS_MAX = 3
"""A stream without a message for this many heartbeats is given up."""

RETRY_S_MIN, RETRY_S_MAX = 0.05, 1.0
"""Pause after a broken stream; doubles up to the maximum while there is no answer to a Hello."""

FLUSH_S_MAX = 1.0
"""How long a closing session may take to say what it still has to."""


class SessionBroken(Exception):
    """This stream cannot go on; a new one may."""


@dataclass(frozen=True, slots=True)
class Served:
    """What the leader serves. `max_request_len`: prompt plus output, tokens, that can ever be scheduled."""

    model: ServedModel
    max_request_len: int


class SchedulerSession:
    """Keeps one session up for ever. Everything but `run` and `close` is synchronous and belongs to the same event loop.

    `standing(True)` is called when a leader has answered, `standing(False)` when its stream ends.
    """

    def __init__(self, address: str, tokenizer: Tokenizer, heartbeat_s: float, standing: Callable[[bool], None]) -> None:
        self.live = LiveRequests()
        self._address = address
        self._tokenizer = tokenizer
        self._heartbeat_s = heartbeat_s
        self._standing = standing
        self._gateway_id = new_instance_id()
        self._highest_epoch: Epoch = NO_EPOCH
        self._served: Served | None = None
        self._mismatch: FailedPrecondition | None = None
        self._connected = False
        self._decided = asyncio.Event()  # set while connected, or while the tokenizers are known to differ
        self._outbox: deque[session_pb2.SessionRequest] = deque()
        self._outbox_changed = asyncio.Event()
        self._flushed = asyncio.Event()

    async def run(self) -> None:
        """Open sessions for ever; ends by cancellation only."""
        async with open_channel(self._address) as channel:
            stub = session_pb2_grpc.SchedulerServiceStub(channel)
            retry_s = RETRY_S_MIN
            while True:
                await channel.channel_ready()
                error = await self._session(stub)
                answered = self._connected
                self._disconnect()
                _log.warning("session ended", scheduler=self._address, error=error, live=len(self.live))
                retry_s = RETRY_S_MIN if answered else min(2 * retry_s, RETRY_S_MAX)
                await asyncio.sleep(retry_s)

    async def close(self) -> None:
        """Wait (bounded) until everything said so far is sent, the aborts of the last calls included."""
        if self._connected and self._outbox:
            self._flushed.clear()
            try:
                async with asyncio.timeout(FLUSH_S_MAX):
                    await self._flushed.wait()
            except TimeoutError:
                _log.warning("session closed with messages unsent", count=len(self._outbox))

    async def served(self, wait_s: float) -> Served:
        """What was served last; waits for the first leader. Raises Unavailable or FailedPrecondition."""
        return self._served or await self.connected(wait_s)

    async def connected(self, wait_s: float) -> Served:
        """What the present leader serves; waits for one. Raises Unavailable, or FailedPrecondition where the tokenizers differ."""
        try:
            async with asyncio.timeout(wait_s):
                await self._decided.wait()
        except TimeoutError:
            text = f"no scheduler has answered for {wait_s:g} s"
            raise Unavailable(text, reason="NO_SCHEDULER", retry_after_ms=int(RETRY_S_MAX * 1000)) from None
        if self._mismatch is not None:
            raise self._mismatch
        assert self._served is not None
        return self._served

    def submit(self, stream: RequestStream) -> None:
        """Make `stream` live and hand it to the scheduler, now or with the next Hello. Raises AlreadyExists."""
        self.live.add(stream)
        self._send(stream.submit())

    def abort(self, stream: RequestStream) -> None:
        """The client is gone or asked to stop. The request stays live until the scheduler has ended it."""
        if stream.ended or stream.abort_asked:
            return
        stream.abort_asked = True
        self.live.release_client_id(stream)
        self._send(stream.abort())

    def _send(self, message: GatewayMessage) -> None:
        """Without a leader nothing is queued: `_catch_up` says it all again."""
        if self._connected:
            self._queue(message)

    def _queue(self, message: GatewayMessage) -> None:
        self._outbox.append(request_to_proto(message))
        self._outbox_changed.set()

    async def _session(self, stub: session_pb2_grpc.SchedulerServiceStub) -> str:
        """One stream to its end; returns why it ended."""
        call = stub.Session()
        writer = asyncio.create_task(self._write(call))
        try:
            await self._read_invite(call)
            hello = self._hello()
            self._queue(hello)
            await self._read_ack(call, hello)
            while True:
                self._take(await self._read(call))
        except (SessionBroken, MalformedMessage, TokenizerMismatch) as error:
            return str(error)
        except grpc.aio.AioRpcError as error:
            if reason_of(error) == TOKENIZER_MISMATCH:
                self._refuse_all(error.details() or "")
            return f"{error.code().name}: {error.details()}"
        finally:
            writer.cancel()
            call.cancel()

    def _hello(self) -> Hello:
        live = tuple(stream.live() for stream in self.live)
        return Hello(self._highest_epoch, self._tokenizer.digest, self._gateway_id, live)

    async def _read_invite(self, call: grpc.aio.StreamStreamCall) -> None:
        """A scheduler that does not lead keeps the stream open with Standby."""
        message = await self._read(call)
        while isinstance(message, Standby):
            message = await self._read(call)
        if not isinstance(message, Invite):
            raise SessionBroken(f"a {type(message).__name__} came before the Invite")

    async def _read_ack(self, call: grpc.aio.StreamStreamCall, hello: Hello) -> None:
        """A scheduler that is taking over sends heartbeats until it can answer."""
        message = await self._read(call)
        while isinstance(message, Heartbeat):
            message = await self._read(call)
        if not isinstance(message, HelloAck):
            raise SessionBroken(f"a {type(message).__name__} came before the HelloAck")
        self._mismatch = None
        try:
            self._served = Served(ServedModel(message.model, self._tokenizer), message.max_request_len)
        except TokenizerMismatch as error:
            self._refuse_all(str(error))
            raise
        self._connected = True
        self._decided.set()
        self._catch_up(hello, message)
        self._standing(True)
        _log.info("session opened", scheduler=self._address, epoch=self._highest_epoch.number, live=len(self.live))

    def _refuse_all(self, why: str) -> None:
        """The tokenizers differ: until that changes, no request can be served here."""
        self._mismatch = FailedPrecondition(why, reason=TOKENIZER_MISMATCH)
        self._decided.set()

    def _disconnect(self) -> None:
        self._outbox.clear()
        if self._mismatch is None:
            self._decided.clear()
        if self._connected:
            self._connected = False
            self._standing(False)

    def _catch_up(self, hello: Hello, ack: HelloAck) -> None:
        """Say what the leader does not know: it holds what the Hello listed, less what it calls unknown."""
        known = {entry.request_id for entry in hello.live} - set(ack.unknown_request_ids)
        for stream in self.live:
            if stream.request_id not in known:
                if stream.abort_asked:
                    stream.end_aborted()
                    self.live.remove(stream)
                    continue
                self._send(stream.submit())
            if stream.abort_asked:
                self._send(stream.abort())
            elif stream.stop_found is not None:
                self._send(stream.stop_found)

    async def _read(self, call: grpc.aio.StreamStreamCall) -> SchedulerMessage:
        """The next message of a leader not older than any seen. Raises SessionBroken."""
        silence_s = SILENT_HEARTBEATS_MAX * self._heartbeat_s
        try:
            async with asyncio.timeout(silence_s):
                response = await call.read()
        except TimeoutError:
            raise SessionBroken(f"nothing heard for {silence_s:g} s") from None
        if response is grpc.aio.EOF:
            raise SessionBroken("the scheduler closed the stream")
        epoch, message = response_from_proto(response)
        if isinstance(message, Standby):
            return message
        if not epoch.supersedes(self._highest_epoch):
            raise SessionBroken(f"the scheduler leads epoch {epoch.number}, another leads {self._highest_epoch.number}")
        self._highest_epoch = epoch
        return message

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
                self._flushed.set()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the stream has ended: the reader says why

    def _take(self, message: SchedulerMessage) -> None:
        match message:
            case Frame(outputs):
                for output in outputs:
                    self._take_output(output)
            case Rejected(request_id, subscriber):
                self._close(request_id, subscriber, message)
            case TakenOver(request_id, subscriber):
                self._close(request_id, subscriber, message)
            case HelloAck() | Invite() | Standby():
                raise SessionBroken(f"a {type(message).__name__} came in the middle of a session")
            case Heartbeat():
                pass

    def _take_output(self, output: RequestOutput) -> None:
        stream = self.live.get(output.request_id)
        if stream is None:
            return
        found = stream.feed(output)
        if stream.ended:
            self.live.remove(stream)
        elif found is not None:
            self._send(found)
        elif stream.failed:
            self.abort(stream)

    def _close(self, request_id: bytes, subscriber: int, why: Rejected | TakenOver) -> None:
        stream = self.live.get(request_id)
        if stream is None or subscriber != stream.subscriber:
            return
        error: ServiceError = taken_over()
        if isinstance(why, Rejected):
            error = rejection_of(why, stream.prompt_field)
        stream.close(error)
        self.live.remove(stream)
