"""What is cached behind this gateway, for those of its callers who want to be told: the whole, then what changes, and the load with it.

Nothing is asked of the scheduler while nobody listens. A listener that does not read, and all of them when another scheduler leads, are told
of the whole again; until the new leader has told all of it they know what the last one said.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gateway.cached_blocks import CachedBlocks, CacheEvent, Stored
from services.gateway.refusals import draining
from services.rpc.errors import Overloaded
from tessera.values.kv_events import KvEvents
from tessera.values.load import GroupLoad

LISTENERS_MAX = 16
"""At once; each may be a gateway in front of this one."""

PENDING_EVENTS_MAX = 16_384
"""A listener that leaves more of them unread is told of the whole again."""

RETRY_AFTER_MS = 1000


@dataclass(frozen=True, slots=True)
class Told:
    """What a listener is told next: with `is_whole` everything, and what was told before is void. `load` is the group's, `load_age_ms` old; None
    where it is not known. Without events, and not the whole, it is told for the load alone."""

    events: list[Stored] | list[CacheEvent]
    is_whole: bool
    load: GroupLoad | None = None
    load_age_ms: int = 0

    @property
    def is_load_alone(self) -> bool:
        """Whether there is nothing else to tell."""
        return not self.events and not self.is_whole


class CacheListener:
    """One who is told. Belongs to one event loop."""

    def __init__(self, cached: Callable[[], CachedBlocks | None], load: Callable[[], tuple[GroupLoad | None, int]]) -> None:
        """`cached` and `load`, with its age in milliseconds, as they are known at present."""
        self._cached = cached
        self._load = load
        self._is_load_due = False
        self._pending: list[CacheEvent] = []
        self._is_void = True
        self._is_over = False
        self._changed = asyncio.Event()
        self._changed.set()

    def add(self, events: list[CacheEvent]) -> None:
        """These have happened."""
        if self._is_void:
            return
        self._pending += events
        if len(self._pending) > PENDING_EVENTS_MAX:
            self.begin_anew()
        self._changed.set()

    def note_load(self) -> None:
        """The load is another."""
        self._is_load_due = True
        self._changed.set()

    def begin_anew(self) -> None:
        """What was told is void."""
        self._is_void = True
        self._pending = []
        self._changed.set()

    def end(self) -> None:
        """Nothing more is told."""
        self._is_over = True
        self._changed.set()

    async def next(self) -> Told | None:
        """What is next; waits for it. None at the end."""
        while not self._is_over:
            await self._changed.wait()
            self._changed.clear()
            cached = self._cached()
            if self._is_over:
                break
            if self._is_void and cached is not None:
                self._is_void = False
                return self._told(cached.whole(), is_whole=True)
            if self._pending or self._is_load_due:
                events, self._pending = self._pending, []
                return self._told(events, is_whole=False)
        return None

    def _told(self, events: list[Stored] | list[CacheEvent], is_whole: bool) -> Told:
        self._is_load_due = False
        return Told(events, is_whole, *self._load())


class CacheFeed:
    """The listeners of one gateway. `watch(True)` asks the leader, if there is one, to tell; `watch(False)` not to."""

    def __init__(self, watch: Callable[[bool], None]) -> None:
        self._watch = watch
        self._listeners: set[CacheListener] = set()
        self._cached: CachedBlocks | None = None  # None: not known yet
        self._coming: CachedBlocks | None = None  # what has come of a whole
        self._is_over = False
        self.load: GroupLoad | None = None  # what the leader told last; None while there is none, and before it has
        self._load_told_s = 0.0

    @contextmanager
    def listener(self) -> Iterator[CacheListener]:
        """One more, as long as the body runs. Raises Overloaded where there are too many, Unavailable when this gateway is to end."""
        if self._is_over:
            raise draining()
        if len(self._listeners) == LISTENERS_MAX:
            text = f"{LISTENERS_MAX} are told of what is cached here, which is the most there may be"
            raise Overloaded(text, reason="TOO_MANY_SUBSCRIBERS", retry_after_ms=RETRY_AFTER_MS)
        listener = CacheListener(lambda: self._cached, self._load_and_age)
        self._listeners.add(listener)
        if len(self._listeners) == 1:
            self._watch(True)
        try:
            yield listener
        finally:
            self._listeners.remove(listener)
            if not self._listeners:
                self._watch(False)
                self._cached = self._coming = None

    def connected(self) -> None:
        """Another leader has answered, or the same one in another session: it begins with the whole."""
        self._coming = None
        if self._listeners:
            self._watch(True)

    def disconnected(self) -> None:
        """There is no leader: nobody knows the load. What was cached is known until the next one has told the whole."""
        self.load = None

    def take(self, events: KvEvents) -> None:
        """The leader tells. What still comes after nobody listens is of no use."""
        if not self._listeners:
            return
        if events.begins:
            self._coming = CachedBlocks()
        if self._coming is not None:
            for change in events.changes:
                self._coming.fill(change)
            if not events.more:
                self._replace(self._coming)
        elif self._cached is not None:
            for change in events.changes:
                happened = self._cached.apply(change)
                for listener in self._listeners if happened else ():
                    listener.add(happened)

    def tell_load(self, load: GroupLoad) -> None:
        """The leader tells the group's load."""
        self.load, self._load_told_s = load, time.monotonic()
        for listener in self._listeners:
            listener.note_load()

    def end(self) -> None:
        """This gateway is to end: an open stream would hold it up."""
        self._is_over = True
        for listener in self._listeners:
            listener.end()

    def _load_and_age(self) -> tuple[GroupLoad | None, int]:
        return self.load, int(1000 * (time.monotonic() - self._load_told_s))

    def _replace(self, whole: CachedBlocks) -> None:
        whole.filled()
        self._cached, self._coming = whole, None
        for listener in self._listeners:
            listener.begin_anew()
