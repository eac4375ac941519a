"""Who is sent what: one subscriber per request, a cursor into its committed tokens, and how far these may be seen.

Nothing is queued here: a frame is made of the tokens between cursor and visible length when its session asks for it, so a slow
gateway costs no memory. Tokens become visible when their record is acknowledged, or at once while the store is not keeping up.
"""

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Generic, TypeAlias, TypeVar

from services.scheduler.core.record import Record, RequestDelta
from tessera.values.config import Config
from tessera.values.finish import Finish
from tessera.values.request import RequestOutput, RequestTimings
from tessera.values.session import TakenOver

S = TypeVar("S", bound=Hashable)
"""A session: one stream to one gateway. A gateway that comes back has another."""

ReadOutput: TypeAlias = Callable[[bytes, int], tuple[int, ...]]
"""(request id, offset) -> its committed output tokens from the offset on."""


@dataclass(frozen=True, slots=True)
class Subscription(Generic[S]):
    """A claim on a request's output: by which session, under which of the client's resume numbers."""

    session: S
    subscriber: int


@dataclass(frozen=True, slots=True)
class Claimed(Generic[S]):
    """The session gets the output now. `replaced` is the claim of another session that it ends, which is to be told."""

    replaced: Subscription[S] | None


DEADLINES_SLACK = 64
"""So many deadlines are kept, beyond two a request, before those that hold no longer are swept out."""


@dataclass(slots=True)
class _Stream(Generic[S]):
    """One request. `told_len` and `told_finish` are as of the last record, acknowledged or not; `visible_len` and `finish` may be seen.

    Records up to `void_until` speak of an output that has been replaced since. `alias` is the id under which the present subscriber
    submitted it, where that is another one. `expires_us` is set while nobody has claimed it and it lives.
    """

    subscriber: int = 0
    session: S | None = None
    alias: bytes | None = None
    expires_us: int | None = None
    cursor: int = 0
    visible_len: int = 0
    told_len: int = 0
    told_finish: Finish | None = None
    finish: Finish | None = None
    is_end_sent: bool = False
    void_until: int = 0
    num_cached_tokens: int = 0
    timings: RequestTimings = RequestTimings()

    def is_due(self) -> bool:
        return self.cursor < self.visible_len or (self.finish is not None and not self.is_end_sent)


class Streams(Generic[S]):
    """The streams of one leader. Times are microseconds on the caller's clock."""

    def __init__(self, config: Config, read_output: ReadOutput) -> None:
        self._grace_us = config.gateway_grace_ms * 1000
        self._read_output = read_output
        self._streams: dict[bytes, _Stream[S]] = {}
        self._aliases: dict[bytes, bytes] = {}
        self._due: dict[S, dict[bytes, None]] = {}
        self._deadlines: list[tuple[int, bytes]] = []  # a heap; one that is not its stream's `expires_us` holds no longer
        self._hidden: deque[Record] = deque()

    def claim(
        self, session: S, request_id: bytes, subscriber: int, received_len: int, alias: bytes | None = None
    ) -> Claimed[S] | TakenOver:
        """`session` wants the output of a request, of which it holds `received_len` tokens. The highest number wins, an
        equal one the later claim; a claim that loses is answered what its gateway is to be told. A request may be claimed
        before its first record. `alias` is the id under which it was submitted now: what is said of that is said of the request."""
        stream = self._streams.setdefault(request_id, _Stream())
        if subscriber < stream.subscriber:
            return TakenOver(alias or request_id, subscriber)
        replaced = None
        if stream.session is not None and stream.session != session:
            replaced = Subscription(stream.session, stream.subscriber)
        self._leave(request_id, stream)
        stream.session, stream.subscriber, stream.alias = session, subscriber, alias
        stream.cursor, stream.is_end_sent, stream.expires_us = received_len, False, None
        if alias is not None:
            self._aliases[alias] = request_id
        self._due.setdefault(session, {})
        self._note_due(request_id, stream)
        return Claimed(replaced)

    def claimed_by(self, session: S, request_id: bytes, subscriber: int) -> bytes | None:
        """The request of which `session` says something as this subscriber, by its id or alias; None where that does not count: nobody
        knows the request, a higher number has come, or the same number in another session."""
        if request_id not in self._streams:
            request_id = self._aliases.get(request_id, request_id)
        stream = self._streams.get(request_id)
        if stream is None or subscriber < stream.subscriber:
            return None
        if subscriber == stream.subscriber and stream.session is not None and stream.session != session:
            return None
        return request_id

    def holder(self, request_id: bytes) -> Subscription[S] | None:
        """Who gets a request's output now."""
        stream = self._streams.get(request_id)
        return None if stream is None or stream.session is None else Subscription(stream.session, stream.subscriber)

    def is_owed(self, request_id: bytes) -> bool:
        """Whether a session has claimed a request and not been sent its end yet."""
        stream = self._streams.get(request_id)
        return stream is not None and stream.session is not None and not stream.is_end_sent

    def close(self, session: S, now_us: int) -> None:
        """A session is gone: its requests are detached, and expire after the grace unless someone claims them."""
        for request_id, stream in self._streams.items():
            if stream.session == session:
                self.detach(request_id, now_us)
        self._due.pop(session, None)

    def detach(self, request_id: bytes, now_us: int, grace_us: int | None = None) -> None:
        """Nobody reads a request any more; if it lives it expires after `grace_us`, None: the grace of a lost session."""
        stream = self._streams[request_id]
        self._leave(request_id, stream)
        if stream.told_finish is not None:
            return
        stream.expires_us = now_us + (self._grace_us if grace_us is None else grace_us)
        heappush(self._deadlines, (stream.expires_us, request_id))
        if len(self._deadlines) > 2 * len(self._streams) + DEADLINES_SLACK:
            self._deadlines = [(live.expires_us, key) for key, live in self._streams.items() if live.expires_us is not None]
            heapify(self._deadlines)

    def expired(self, now_us: int) -> list[bytes]:
        """Live requests that nobody has claimed in time: the caller aborts them. Each is named once."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now_us:
            expires_us, request_id = heappop(self._deadlines)
            stream = self._streams.get(request_id)
            if stream is not None and stream.expires_us == expires_us:
                stream.expires_us = None
                expired.append(request_id)
        return expired

    def add(self, record: Record, now_us: int) -> None:
        """Take the next record; what it tells stays hidden until `release`."""
        for delta in record.requests:
            stream = self._streams.get(delta.request_id)
            if stream is None:
                stream = self._streams[delta.request_id] = _Stream()
                self.detach(delta.request_id, now_us)
            self._tell(stream, delta, record.number)
            if delta.finish is not None:
                stream.expires_us = None
        if record.decoded is not None:
            for request_id, offset in zip(record.decoded.request_ids, record.decoded.token_offsets.tolist(), strict=True):
                self._streams[request_id].told_len = offset + 1
        for request_id in record.forgotten:
            self._forget(request_id)
        self._hidden.append(record)

    def release(self, acked: int, is_durable: bool) -> None:
        """Show what records up to `acked` told, or, while not durable, all of them."""
        while self._hidden and (self._hidden[0].number <= acked or not is_durable):
            self._show(self._hidden.popleft())

    @property
    def due_sessions(self) -> list[S]:
        """Sessions that `take_frame` has something for."""
        return [session for session, requests in self._due.items() if requests]

    def take_frame(self, session: S) -> list[RequestOutput]:
        """Everything that is due to a session; its cursors move, so it is the caller's duty to send it or close the session."""
        due = self._due.get(session)
        if not due:
            return []
        streams = [(request_id, self._streams[request_id]) for request_id in due]
        due.clear()
        return [self._take(request_id, stream) for request_id, stream in streams if stream.is_due()]

    def _tell(self, stream: _Stream[S], delta: RequestDelta, number: int) -> None:
        if delta.token_offset < stream.told_len:  # cut, or replaced by what a gateway had seen
            stream.visible_len = min(stream.visible_len, delta.token_offset)
            stream.finish = None  # that of the output before; this record's may be seen with its tokens
            stream.void_until = number - 1
        stream.told_len = delta.token_offset + len(delta.token_ids)
        stream.told_finish = delta.finish
        stream.subscriber = max(stream.subscriber, delta.subscriber)

    def _show(self, record: Record) -> None:
        for delta in record.requests:
            stream = self._streams.get(delta.request_id)
            if stream is not None and record.number > stream.void_until:
                stream.finish = delta.finish
                stream.num_cached_tokens, stream.timings = delta.num_cached_tokens, delta.timings
                stream.visible_len = delta.token_offset + len(delta.token_ids)
                self._note_due(delta.request_id, stream)
        if record.decoded is None:
            return
        streams, due = self._streams, self._due
        for request_id, offset in zip(record.decoded.request_ids, record.decoded.token_offsets.tolist(), strict=True):
            stream = streams.get(request_id)
            if stream is not None and record.number > stream.void_until:
                stream.visible_len = offset + 1
                if stream.session is not None and stream.cursor <= offset:
                    due[stream.session][request_id] = None

    def _take(self, request_id: bytes, stream: _Stream[S]) -> RequestOutput:
        count = stream.visible_len - stream.cursor
        token_ids = self._read_output(request_id, stream.cursor)[:count] if count > 0 else ()
        is_end = stream.finish is not None
        offset = min(stream.cursor, stream.visible_len) if is_end else stream.cursor
        stream.cursor = offset + len(token_ids)
        stream.is_end_sent = is_end
        return RequestOutput(
            request_id=request_id,
            subscriber=stream.subscriber,
            token_offset=offset,
            token_ids=token_ids,
            num_cached_tokens=stream.num_cached_tokens,
            finish=stream.finish,
            timings=stream.timings if is_end else None,
        )

    def _note_due(self, request_id: bytes, stream: _Stream[S]) -> None:
        if stream.session is not None and stream.is_due():
            self._due[stream.session][request_id] = None

    def _leave(self, request_id: bytes, stream: _Stream[S]) -> None:
        """Take the request from whoever has it."""
        if stream.session is not None:
            self._due[stream.session].pop(request_id, None)
        if stream.alias is not None:
            self._aliases.pop(stream.alias, None)
        stream.session = stream.alias = None

    def _forget(self, request_id: bytes) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            self._leave(request_id, stream)
            del self._streams[request_id]
