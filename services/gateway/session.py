"""The gateway's end of the session: one stream to every scheduler there is, of which the one with the highest epoch leads.

Order of one round: the scheduler's Invite, our Hello with every live request, its HelloAck once it leads, then Submit for what that
Hello did not list or the leader does not know, and again every Abort, Detach and StopFound without an answer. So a broken stream loses
nothing: what is owed to the scheduler is a function of the live requests, and what a scheduler owes is a function of the Hello.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from gateway.errors import TokenizerMismatch
from gateway.leadership import Answer, Leadership
from gateway.pause_watch import PauseWatch
from gateway.served_model import ServedModel
from gateway.tokenizer import Tokenizer
from services.gateway.admin_queries import AdminQueries
from services.gateway.cache_feed import CacheFeed
from services.gateway.config import GatewayConfig
from services.gateway.live_requests import LiveRequests
from services.gateway.refusals import draining, tokenizer_mismatch, version_skew
from services.gateway.request_stream import RequestStream
from services.gateway.scheduler_link import RETRY_S_MAX, SchedulerLink, SessionBroken, StreamEnd
from services.rpc.addresses import addresses
from services.rpc.errors import TOKENIZER_MISMATCH, ServiceError, Unavailable
from tessera.values.admin import AdminAnswer, AdminCommand, AdminReply
from tessera.values.identity import Epoch, new_instance_id
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
    KnownAs,
    LengthChanged,
    Rejected,
    SchedulerMessage,
    TakenOver,
)

_log = structlog.get_logger()

FLUSH_S_MAX = 1.0
"""How long a closing session may take to say what it still has to."""

SETTLE_S = 1.0
"""How long after a pause of this process the ends of streams may still be of that time."""


@dataclass(frozen=True, slots=True)
class Served:
    """What the leader serves. `max_request_len`: prompt plus output, tokens, that can be scheduled at present."""

    model: ServedModel
    max_request_len: int


class SchedulerSession:
    """Keeps a stream to every scheduler for ever. Everything but `run` and `close` is synchronous and belongs to the same event loop.

    `standing(True)` is called when a leader has answered, `standing(False)` when it is gone.
    """

    def __init__(self, config: GatewayConfig, tokenizer: Tokenizer, standing: Callable[[bool], None]) -> None:
        self.live = LiveRequests()
        self._admin = AdminQueries(self._send)
        self.cache_feed = CacheFeed(lambda is_on: self._send(WatchKv(is_on)))
        self._config = config
        self._heartbeat_s = config.heartbeat_ms / 1000
        self._tokenizer = tokenizer
        self._standing = standing
        self._gateway_id = new_instance_id()
        self._links: dict[str, tuple[SchedulerLink, asyncio.Task[None]]] = {}
        self._present: frozenset[str] = frozenset()
        self._leadership: Leadership[SchedulerLink] = Leadership()
        self._hello: Hello | None = None  # what the leader was told
        self._served: Served | None = None
        self._refusal: ServiceError | None = None  # why no request can be served here
        self._connected = False  # the leader has answered
        self._draining = False
        self._closing = False
        self._decided = asyncio.Event()  # set while connected, or while there is a refusal
        self._pauses = PauseWatch(self._heartbeat_s, SETTLE_S, _now_s())

    # -- for the process

    async def run(self) -> None:
        """Find schedulers and listen to them for ever; ends by cancellation only."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_for_pauses())
            async for present in addresses(self._config.scheduler):
                self._set_links(present, group)

    @property
    def is_connected(self) -> bool:
        """Whether a leader has answered."""
        return self._connected

    def drain(self) -> None:
        """Take no new request from now on; those that run go on."""
        self._draining = True
        self._refuse(draining())
        self.cache_feed.end()

    def end_some(self, count: int) -> int:
        """The grace is over: `count` of the streams end, and their clients are to go on with them at another gateway; returns how many are
        left."""
        running = [stream for stream in self.live if stream.farewell is None]
        for stream in running[:count]:
            stream.fail(draining())
            self._part(stream, Detach(stream.request_id, stream.subscriber))
        return max(0, len(running) - count)

    async def close(self) -> None:
        """Wait (bounded) until the scheduler has heard everything said so far, the aborts of the last calls included."""
        leader, self._closing = self._leadership.leader, True
        if self._connected and leader is not None:
            try:
                async with asyncio.timeout(FLUSH_S_MAX):
                    await leader.finish()
            except TimeoutError:
                _log.warning("session closed with messages unsent")

    # -- for calls

    async def served(self, wait_s: float) -> Served:
        """What was served last; waits for the first leader. Raises a ServiceError as `connected` does."""
        return self._served if self._served is not None and not self._draining else await self.connected(wait_s)

    async def connected(self, wait_s: float) -> Served:
        """What the present leader serves; waits for one. Raises Unavailable, or FailedPrecondition where the tokenizers differ."""
        try:
            async with asyncio.timeout(wait_s):
                await self._decided.wait()
        except TimeoutError:
            text = f"no scheduler has answered for {wait_s:g} s"
            raise Unavailable(text, reason="NO_SCHEDULER", retry_after_ms=int(RETRY_S_MAX * 1000)) from None
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        assert self._served is not None
        return self._served

    async def administer(self, command: AdminCommand, wait_s: float) -> AdminAnswer:
        """What the present leader answers to an operator's command. Raises as `connected` and `AdminQueries.ask` do."""
        await self.connected(wait_s)
        return await self._admin.ask(command)

    def submit(self, stream: RequestStream) -> None:
        """Make `stream` live and hand it to the scheduler, now or with the next Hello."""
        self.live.add(stream)
        self._send(stream.submit())

    def abort(self, stream: RequestStream) -> None:
        """Its client asked to stop. The request stays live until the scheduler has ended it."""
        self._part(stream, Abort(stream.request_id, stream.subscriber))

    def leave(self, stream: RequestStream) -> None:
        """Its call is over; a no-op once the request has ended. If this process was paused, or is about to end, the client most likely goes
        on elsewhere."""
        if self._was_paused() or self._draining:
            self._part(stream, Detach(stream.request_id, stream.subscriber))
        elif self._config.detach_grace_ms:
            self._part(stream, Detach(stream.request_id, stream.subscriber, self._config.detach_grace_ms))
        else:
            self.abort(stream)

    # -- for links

    def invited(self, link: SchedulerLink, epoch: Epoch, protocol: int) -> None:
        """Follow the highest epoch; tell a lower one of it."""
        before = self._leadership.leader
        answer = self._leadership.invited(link, epoch)
        if answer is Answer.REFUSE:
            _log.warning(
                "older leader refused", scheduler=link.address, epoch=epoch.number, known=self._leadership.highest.number
            )
            if link is before:
                raise SessionBroken("a leader has invited under an epoch older than its own")
            link.say(Hello(self._leadership.highest, self._tokenizer.digest, self._gateway_id))
        elif answer is Answer.FOLLOW:
            self._disconnect()
            if before is not None and before is not link:
                before.reopen()
            if protocol != PROTOCOL_VERSION:
                text = f"this gateway speaks version {PROTOCOL_VERSION} of the session's protocol, the scheduler {protocol}"
                self._skewed(f"{text}: run the same release of both")
                raise SessionBroken(text)
            self._follow(link)

    def stands_by(self, link: SchedulerLink) -> None:
        """See `_lost`; most often it was no leader."""
        self._lost(link, "the scheduler stands by")

    def heard(self, link: SchedulerLink, epoch: Epoch, message: SchedulerMessage) -> None:
        """Take what the leader says under its epoch. Anybody else is not listened to."""
        if not self._leadership.counts(link, epoch):
            return
        if isinstance(message, HelloAck):
            self._answered(link, message)
        elif self._connected:
            self._take(message)
        elif not isinstance(message, Heartbeat):  # which say that it is still taking over
            raise SessionBroken(f"a {type(message).__name__} came before the HelloAck")

    def ended(self, link: SchedulerLink, end: StreamEnd) -> None:
        """The stream of `link` is over."""
        if link is self._leadership.leader:
            if end.reason == VERSION_SKEW:
                self._skewed(end.text)
            elif end.reason == TOKENIZER_MISMATCH:
                self._refuse(tokenizer_mismatch(end.text))
        else:
            _log.debug("stream ended", scheduler=link.address, why=end.text)
        self._lost(link, end.text)
        if link.address not in self._present:
            self._drop(link)

    # -- inside

    def _set_links(self, present: frozenset[str], group: asyncio.TaskGroup) -> None:
        """One link per address. That of a leader whose address is gone stays as long as its stream does: it may be draining."""
        self._present = present
        for link, _ in list(self._links.values()):
            if link.address not in present and link is not self._leadership.leader:
                self._drop(link)
        for address in sorted(present - self._links.keys()):
            link = SchedulerLink(address, self._heartbeat_s, self)
            self._links[address] = link, group.create_task(link.run())

    def _drop(self, link: SchedulerLink) -> None:
        self._leadership.gone(link)
        _, task = self._links.pop(link.address)
        task.cancel()

    def _follow(self, link: SchedulerLink) -> None:
        epoch = self._leadership.highest
        if self._hello is None or self._hello.highest_epoch != epoch:
            _log.info("leader changed", scheduler=link.address, epoch=epoch.number, live=len(self.live))
        self._hello = Hello(epoch, self._tokenizer.digest, self._gateway_id, self.live.for_hello())
        link.say(self._hello)
        if not self._draining:  # what another one refused, this one may take
            self._refusal = None
            self._decided.clear()

    def _lost(self, link: SchedulerLink, why: str) -> None:
        """`link` does not lead any more, if it did."""
        was_leader = link is self._leadership.leader
        successor = self._leadership.gone(link)
        if was_leader:
            log = _log.debug if self._closing else _log.warning
            log("leader lost", scheduler=link.address, why=why, live=len(self.live))
            self._disconnect()
        if successor is not None:
            self._follow(successor)

    def _answered(self, link: SchedulerLink, ack: HelloAck) -> None:
        if self._connected:
            raise SessionBroken("a second HelloAck")
        try:
            self._served = Served(ServedModel(ack.model, self._tokenizer), ack.max_request_len)
        except TokenizerMismatch as error:
            self._refuse(tokenizer_mismatch(str(error)))
            raise SessionBroken(str(error)) from error
        self._connected = True
        self._decided.set()
        self._catch_up(ack)
        self.cache_feed.connected()
        self._standing(True)
        _log.info("session opened", scheduler=link.address, epoch=self._leadership.highest.number, live=len(self.live))

    def _catch_up(self, ack: HelloAck) -> None:
        """Say what the leader does not know: it holds what the Hello listed, less what it calls unknown."""
        assert self._hello is not None, "the answer to a Hello"
        known = {entry.request_id for entry in self._hello.live} - set(ack.unknown_request_ids)
        for stream in self.live:
            if stream.request_id not in known:
                if isinstance(stream.farewell, Abort):
                    stream.end_aborted()
                    self.live.remove(stream)
                    continue
                self._send(stream.submit())
            if stream.stop_found is not None and not isinstance(stream.farewell, Abort):
                self._send(stream.stop_found)
            if stream.farewell is not None:
                self._say_farewell(stream)

    def _disconnect(self) -> None:
        if self._refusal is None:
            self._decided.clear()
        if self._connected:
            self._connected = False
            self._admin.lost()
            self.cache_feed.disconnected()
            self._standing(False)

    def _refuse(self, why: ServiceError) -> None:
        """Until that changes, no request can be served here."""
        self._refusal = why
        self._decided.set()

    def _skewed(self, text: str) -> None:
        """The leader is of another release: what runs here can go on at a gateway of that release only."""
        if self._refusal is None or self._refusal.message != text:
            _log.error("version skew", why=text)
        if not self._draining:
            self._refuse(version_skew(text))
        for stream in self.live:
            stream.close(version_skew(text))
            self.live.remove(stream)

    def _send(self, message: GatewayMessage) -> None:
        """Without a leader nothing is queued: `_catch_up` says it all again."""
        if self._connected and self._leadership.leader is not None:
            self._leadership.leader.say(message)

    def _part(self, stream: RequestStream, farewell: Abort | Detach) -> None:
        """The client of `stream` has left; the first word about it counts."""
        if stream.ended or stream.farewell is not None:
            return
        stream.farewell = farewell
        self.live.release_client_id(stream)
        if self._connected or farewell == Detach(stream.request_id, stream.subscriber):
            self._say_farewell(stream)

    def _say_farewell(self, stream: RequestStream) -> None:
        """An Abort is answered with the request's end; a Detach is not, and while it cannot be said the lost session says the same."""
        assert stream.farewell is not None
        self._send(stream.farewell)
        if isinstance(stream.farewell, Detach):
            stream.ended = True
            self.live.remove(stream)

    def _take(self, message: SchedulerMessage) -> None:
        match message:
            case Frame(outputs):
                for output in outputs:
                    self._take_output(output)
            case KvEvents():
                self.cache_feed.take(message)
            case KnownAs(request_id, subscriber, known_request_id):
                self.live.known_as(request_id, subscriber, known_request_id)
            case Rejected(request_id, subscriber) | TakenOver(request_id, subscriber):
                self.live.close(request_id, subscriber, message)
            case LengthChanged(max_request_len):
                assert self._served is not None, "a leader has answered"
                self._served = replace(self._served, max_request_len=max_request_len)
            case GroupLoad():
                self.cache_feed.tell_load(message)
            case AdminReply():
                self._admin.answered(message)
            case _:
                assert isinstance(message, Heartbeat), message

    def _take_output(self, output: RequestOutput) -> None:
        stream = self.live.get(output.request_id)
        if stream is None:
            return
        found = stream.feed(output)
        if stream.ended:
            self.live.remove(stream)
        elif found is not None:
            self._send(found)
        elif stream.refused:
            self._part(stream, Detach(stream.request_id, stream.subscriber))  # the request itself is sound
        elif stream.failed:
            self.abort(stream)

    async def _watch_for_pauses(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s / 4)
            self._was_paused()

    def _was_paused(self) -> bool:
        return self._pauses.look(_now_s())


def _now_s() -> float:
    """Goes on while this process or its machine does not."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
