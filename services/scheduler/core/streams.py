"""Who is sent what: one subscriber per request, a cursor into its committed tokens, and how far these may be seen.

Nothing is queued here: a frame is made of the tokens between cursor and visible length when its session asks for it, so a slow
gateway costs no memory. Tokens become visible when their record is acknowledged, or at once while the store is not keeping up.

A step's columns are taken as a whole: as long as the same requests decode for the same sessions, nothing is done for each of them.
"""

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import compress
from typing import Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from services.scheduler.core.committed_output import NO_OUTPUT, CommittedOutput
from services.scheduler.core.record import DecodeColumns, Record, RequestDelta
from services.scheduler.core.row_index import as_slice
from services.scheduler.core.stream_columns import StreamColumns, are_equal
from tessera.values.config import Config
from tessera.values.finish import Finish
from tessera.values.logprobs import joined_columns
from tessera.values.output_columns import NO_OUTPUTS, OutputColumns
from tessera.values.request import RequestOutput, RequestTimings
from tessera.values.session import TakenOver

S = TypeVar("S", bound=Hashable)
"""A session: one stream to one gateway. A gateway that comes back has another."""

ReadOutput: TypeAlias = Callable[[bytes, int, int], CommittedOutput]
"""(request id, first, end) -> its committed output tokens `[first, end)`."""


@dataclass(frozen=True, slots=True)
class Subscription(Generic[S]):
    """A claim on a request's output: by which session, under which of the client's resume numbers."""

    session: S
    subscriber: int


@dataclass(frozen=True, slots=True)
class Claimed(Generic[S]):
    """The session gets the output now. `replaced` is the claim of another session that it ends, which is to be told."""

    replaced: Subscription[S] | None


SHOWN_MAX = 16
"""So many steps' columns are kept for a session that has not asked for its frame yet."""

DEADLINES_SLACK = 64
"""So many deadlines are kept, beyond two a request, before those that hold no longer are swept out."""


@dataclass(slots=True)
class _Stream(Generic[S]):
    """One request, beside what its `row` of the columns says. `told_finish` is as of the last record, acknowledged or not; `finish` may be
    seen. `alias` is the id under which the present subscriber submitted it, where that is another one. `expires_us` is set while nobody has
    claimed it and it lives.
    """

    row: int
    subscriber: int = 0
    session: S | None = None
    alias: bytes | None = None
    expires_us: int | None = None
    told_finish: Finish | None = None
    finish: Finish | None = None
    is_end_sent: bool = False
    num_cached_tokens: int = 0
    timings: RequestTimings = RequestTimings()


_Rows: TypeAlias = slice | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Share(Generic[S]):
    """Of the requests that some columns name, those that one session has: `where` in the columns, and their `rows` among the streams."""

    session: S
    where: _Rows
    rows: _Rows
    request_ids: tuple[bytes, ...]
    subscribers: npt.NDArray[np.uint64]
    ones: npt.NDArray[np.int32]  # one for each

    def only(self, chosen: npt.NDArray[np.bool_]) -> "_Share[S]":
        """Those of its requests that are chosen."""
        where, rows = (
            np.arange(part.start, part.stop) if isinstance(part, slice) else part for part in (self.where, self.rows)
        )
        request_ids = tuple(compress(self.request_ids, chosen.tolist()))
        return _Share(self.session, where[chosen], rows[chosen], request_ids, self.subscribers[chosen], self.ones[chosen])


@dataclass(frozen=True, slots=True)
class _Lookup(Generic[S]):
    """The streams of the requests that some columns name, and each session's share, until anybody claims, leaves or is forgotten. `rows`
    is None where some of the streams are gone."""

    request_ids: tuple[bytes, ...]
    rows: _Rows | None
    shares: tuple[_Share[S], ...]


class Streams(Generic[S]):
    """The streams of one leader. Times are microseconds on the caller's clock."""

    def __init__(self, config: Config, read_output: ReadOutput) -> None:
        self._grace_us = config.gateway_grace_ms * 1000
        self._read_output = read_output
        self._streams: dict[bytes, _Stream[S]] = {}
        self._aliases: dict[bytes, bytes] = {}
        self._columns = StreamColumns()
        self._void_until = 0  # the highest of any stream
        self._lookup: _Lookup[S] | None = None
        self._due: dict[S, dict[bytes, None]] = {}  # to be looked at one by one
        self._shown: dict[S, list[DecodeColumns]] = {}  # columns shown since the session's last frame
        self._deadlines: list[tuple[int, bytes]] = []  # a heap; one that is not its stream's `expires_us` holds no longer
        self._hidden: deque[Record] = deque()

    def claim(
        self, session: S, request_id: bytes, subscriber: int, received_len: int, alias: bytes | None = None
    ) -> Claimed[S] | TakenOver:
        """`session` wants the output of a request, of which it holds `received_len` tokens. The highest number wins, an
        equal one the later claim; a claim that loses is answered what its gateway is to be told. A request may be claimed
        before its first record. `alias` is the id under which it was submitted now: what is said of that is said of the request."""
        stream = self._streams.get(request_id) or self._begin(request_id)
        if subscriber < stream.subscriber:
            return TakenOver(alias or request_id, subscriber)
        replaced = None
        if stream.session is not None and stream.session != session:
            replaced = Subscription(stream.session, stream.subscriber)
        self._leave(request_id, stream)
        stream.session, stream.subscriber, stream.alias = session, subscriber, alias
        stream.is_end_sent, stream.expires_us = False, None
        self._columns.cursor[stream.row] = received_len
        if alias is not None:
            self._aliases[alias] = request_id
        self._due.setdefault(session, {})
        self._shown.setdefault(session, [])
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
        self._shown.pop(session, None)

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
                stream = self._begin(delta.request_id)
                self.detach(delta.request_id, now_us)
            self._tell(stream, delta, record.number)
            if delta.finish is not None:
                stream.expires_us = None
        if record.decoded is not None:
            rows = self._look_up(record.decoded.request_ids).rows
            assert rows is not None, "columns name a request that nobody knows"
            self._columns.told[rows] = record.decoded.token_offsets + 1
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
        return [session for session, requests in self._due.items() if requests or self._shown[session]]

    @property
    def unsent_tokens(self) -> dict[S, int]:
        """Of each session, the output tokens that may be seen and that it has not been sent."""
        behind, counts = (self._columns.visible - self._columns.cursor).tolist(), dict.fromkeys(self._due, 0)
        for stream in self._streams.values():
            if stream.session is not None:
                counts[stream.session] += max(0, behind[stream.row])
        return counts

    def take_frame(self, session: S) -> OutputColumns:
        """Everything that is due to a session; its cursors move, so it is the caller's duty to send it or close the session."""
        due = self._due.get(session)
        if due is None:
            return NO_OUTPUTS
        columns = self._take_columns(session, due)
        streams = [(request_id, self._streams[request_id]) for request_id in due]
        due.clear()
        outputs = [self._take(request_id, stream) for request_id, stream in streams if self._is_due(stream)]
        return columns.followed_by(outputs)

    def _tell(self, stream: _Stream[S], delta: RequestDelta, number: int) -> None:
        columns, row = self._columns, stream.row
        if delta.token_offset < columns.told[row]:  # cut, or replaced by what a gateway had seen
            columns.visible[row] = min(int(columns.visible[row]), delta.token_offset)
            stream.finish = None  # that of the output before; this record's may be seen with its tokens
            columns.void_until[row] = self._void_until = number - 1
        columns.told[row] = delta.token_offset + len(delta.token_ids)
        stream.told_finish = delta.finish
        if delta.subscriber > stream.subscriber:
            stream.subscriber, self._lookup = delta.subscriber, None

    def _show(self, record: Record) -> None:
        columns = self._columns
        for delta in record.requests:
            stream = self._streams.get(delta.request_id)
            if stream is not None and record.number > columns.void_until[stream.row]:
                stream.finish = delta.finish
                stream.num_cached_tokens, stream.timings = delta.num_cached_tokens, delta.timings
                columns.visible[stream.row] = delta.token_offset + len(delta.token_ids)
                self._note_due(delta.request_id, stream)
        if record.decoded is None:
            return
        lookup = self._look_up(record.decoded.request_ids)
        if lookup.rows is not None and record.number > self._void_until:
            columns.visible[lookup.rows] = record.decoded.token_offsets + 1
            for share in lookup.shares:
                shown = self._shown[share.session]
                shown.append(record.decoded)
                if len(shown) > SHOWN_MAX:  # nobody asks for its frames: then a cursor is all that is kept
                    self._note_all_due(share.session, shown)
                    shown.clear()
            return
        for request_id, offset in zip(record.decoded.request_ids, record.decoded.token_offsets.tolist(), strict=True):
            stream = self._streams.get(request_id)
            if stream is not None and record.number > columns.void_until[stream.row]:
                columns.visible[stream.row] = offset + 1
                self._note_due(request_id, stream)

    def _take_columns(self, session: S, due: dict[bytes, None]) -> OutputColumns:
        """What columns have shown to a session since its last frame, of the requests for which that is all that they have to be sent. The others
        become `due` one by one, and so do all where the columns are not of the same requests."""
        shown, self._shown[session] = self._shown[session], []
        if not shown:
            return NO_OUTPUTS
        first, columns = shown[0], self._columns
        shares = self._look_up(first.request_ids).shares
        share = next((share for share in shares if share.session == session), None)
        if share is None or any(one.request_ids != first.request_ids for one in shown[1:]):
            self._note_all_due(session, shown)
            return NO_OUTPUTS
        offsets, ends = first.token_offsets[share.where], shown[-1].token_offsets[share.where] + 1
        cursor, visible = columns.cursor[share.rows], columns.visible[share.rows]
        if due or not (are_equal(cursor, offsets) and are_equal(visible, ends)):
            fits = (cursor == offsets) & (visible == ends) & np.array([key not in due for key in share.request_ids], np.bool_)
            due.update((share.request_ids[row], None) for row in np.flatnonzero(~fits).tolist())
            share, offsets, ends = share.only(fits), offsets[fits], ends[fits]
        columns.cursor[share.rows] = ends
        token_ids, counts = first.token_ids[share.where], share.ones
        if len(shown) > 1:
            assert (ends - offsets == len(shown)).all(), "what is told between columns is due one by one"
            token_ids = np.stack([one.token_ids[share.where] for one in shown], axis=1).ravel()
            counts = counts * np.int32(len(shown))
        logprobs = joined_columns([one.logprobs for one in shown], len(first.request_ids), share.where)
        return OutputColumns(share.request_ids, share.subscribers, offsets, counts, token_ids, {}, logprobs)

    def _take(self, request_id: bytes, stream: _Stream[S]) -> RequestOutput:
        cursor, visible_len = int(self._columns.cursor[stream.row]), int(self._columns.visible[stream.row])
        count = visible_len - cursor
        read = self._read_output(request_id, cursor, visible_len) if count > 0 else NO_OUTPUT
        is_end = stream.finish is not None
        offset = min(cursor, visible_len) if is_end else cursor
        self._columns.cursor[stream.row] = offset + len(read.token_ids)
        stream.is_end_sent = is_end
        return RequestOutput(
            request_id=request_id,
            subscriber=stream.subscriber,
            token_offset=offset,
            token_ids=read.token_ids,
            num_cached_tokens=stream.num_cached_tokens if is_end else 0,
            finish=stream.finish,
            timings=stream.timings if is_end else None,
            logprobs=read.logprobs,
            prompt_logprobs=read.prompt_logprobs,
        )

    def _look_up(self, request_ids: tuple[bytes, ...]) -> _Lookup[S]:
        """The streams of these requests; the last ones looked up are remembered."""
        if self._lookup is not None and self._lookup.request_ids == request_ids:
            return self._lookup
        found = [self._streams.get(request_id) for request_id in request_ids]
        by_session: dict[S, list[int]] = {}
        for index, stream in enumerate(found):
            if stream is not None and stream.session is not None:
                by_session.setdefault(stream.session, []).append(index)
        shares = []
        for session, indexes in by_session.items():
            streams = [stream for index in indexes if (stream := found[index]) is not None]
            share = _Share(
                session,
                as_slice(np.array(indexes, np.int64)),
                as_slice(np.array([stream.row for stream in streams], np.int64)),
                tuple(request_ids[index] for index in indexes),
                np.array([stream.subscriber for stream in streams], np.uint64),
                np.ones(len(streams), np.int32),
            )
            shares.append(share)
        rows = [stream.row for stream in found if stream is not None]
        known = as_slice(np.array(rows, np.int64)) if len(rows) == len(found) else None
        self._lookup = _Lookup(request_ids, known, tuple(shares))
        return self._lookup

    def _begin(self, request_id: bytes) -> _Stream[S]:
        stream = self._streams[request_id] = _Stream[S](self._columns.add())
        self._lookup = None
        return stream

    def _is_due(self, stream: _Stream[S]) -> bool:
        columns, row = self._columns, stream.row
        return bool(columns.cursor[row] < columns.visible[row]) or (stream.finish is not None and not stream.is_end_sent)

    def _note_due(self, request_id: bytes, stream: _Stream[S]) -> None:
        if stream.session is not None and self._is_due(stream):
            self._due[stream.session][request_id] = None

    def _note_all_due(self, session: S, shown: list[DecodeColumns]) -> None:
        """Look one by one at all requests of a session that these columns name."""
        for request_id in dict.fromkeys(key for columns in shown for key in columns.request_ids):
            stream = self._streams.get(request_id)
            if stream is not None and stream.session == session:
                self._note_due(request_id, stream)

    def _leave(self, request_id: bytes, stream: _Stream[S]) -> None:
        """Take the request from whoever has it."""
        if stream.session is not None:
            self._due[stream.session].pop(request_id, None)
        if stream.alias is not None:
            self._aliases.pop(stream.alias, None)
        stream.session = stream.alias = self._lookup = None

    def _forget(self, request_id: bytes) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            self._leave(request_id, stream)
            self._columns.remove(stream.row)
            del self._streams[request_id]
