"""The one thread that computes, beside the event loop that speaks: a forward pass never holds up a heartbeat."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from model_worker.batch_refused import BatchRefused
from model_worker.engine import Engine
from model_worker.joined_batch import parted
from model_worker.ranks.crew import RankLost
from tessera.values.batch import ScheduledBatch, ScheduledBatchOutput

Outcome = ScheduledBatchOutput | BatchRefused

T = TypeVar("T")


class EngineCrashed(Exception):
    """The engine has raised what it never may; the process is about to end."""


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    batch: ScheduledBatch
    tell: Callable[[Outcome], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Visit:
    """Something to be done between two batches; `lifts_poison`: batches submitted from then on are taken."""

    do: Callable[[], Any]
    done: "asyncio.Future[Any]"
    lifts_poison: bool


class EngineThread:
    """Executes submitted batches in order. Made and called on the event loop, which hears every outcome too.

    The engine belongs to the thread; the loop may use it after `fence` has returned and until the next `submit`. `crashed` never
    completes unless the engine raises something else than BatchRefused: RankLost, or a bug, after which what it holds cannot be trusted.
    Each of `notes` is told of every outcome, in the thread.

    A batch of prompts that came late is computed together with the one before it, where both wait (see `model_worker.joined_batch`).

    An outcome is told when the next batch's forward pass begins, where there is a next one: before, loop and engine would take Python's lock from
    each other while the cores wait for that pass.
    """

    def __init__(self, engine: Engine, notes: Iterable[Callable[[ScheduledBatch, Outcome], None]] = ()) -> None:
        self.engine = engine
        self._notes = tuple(notes)
        self._loop = asyncio.get_running_loop()
        self.crashed: asyncio.Future[None] = self._loop.create_future()
        self._changed = threading.Condition()
        self._queue: deque[_Job | _Visit] = deque()
        self._poisoned = False
        self._closed = False
        self._untold: Callable[[], None] | None = None  # the thread's own
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def submit(self, batch: ScheduledBatch, tell: Callable[[Outcome], None]) -> None:
        """Execute `batch` after those before it and `tell` the loop how it went. A no-op while poisoned."""
        with self._changed:
            if not self._poisoned:
                self._queue.append(_Job(batch, tell))
                self._changed.notify()

    def poison(self) -> None:
        """Forget the batches that have not started, and take no more until a `fence`. A refusal does this by itself."""
        with self._changed:
            self._poisoned = True
            visits = [item for item in self._queue if isinstance(item, _Visit)]
            self._queue = deque(visits)

    async def fence(self) -> None:
        """Forget the batches that have not started, wait for the one that has (its outcome is told first), and begin afresh.

        Raises EngineCrashed.
        """
        self.poison()
        await self._visit(lambda: None, lifts_poison=True)

    async def between_batches(self, do: Callable[[Engine], T]) -> T:
        """What `do` answers, called in the engine's thread before the next batch. Disturbs nothing. Raises EngineCrashed."""
        return await self._visit(partial(do, self.engine), lifts_poison=False)  # type: ignore[no-any-return]

    async def end(self) -> None:
        """End the thread after the batch it executes. Once this has returned, nothing of it runs any more."""
        self.poison()
        with self._changed:
            self._closed = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)

    async def _visit(self, do: Callable[[], Any], *, lifts_poison: bool) -> Any:
        done = self._loop.create_future()
        with self._changed:
            visit = _Visit(do, done, lifts_poison)
            if lifts_poison:
                self._queue.append(visit)
            else:
                self._queue.appendleft(visit)
            self._changed.notify()
        await asyncio.wait((done, self.crashed), return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise EngineCrashed("the engine has crashed")
        return done.result()

    def _work(self) -> None:
        try:
            while (item := self._next()) is not None:
                if isinstance(item, _Visit):
                    self._tell()
                    self._call(partial(_answer, item.done, item.do()))
                else:
                    told = self._execute(item)
                    self._tell()
                    self._untold = told
        except (Exception, RankLost) as error:  # noqa: BLE001 - handed to the loop, which ends the process
            self._tell()
            self._call(partial(self.crashed.set_exception, error))

    def _next(self) -> _Job | _Visit | None:
        """The next thing to do; None when closed."""
        with self._changed:
            if not self._queue or self._closed:
                self._tell()
            self._changed.wait_for(lambda: self._queue or self._closed)
            if self._closed:
                return None
            item = self._queue.popleft()
            if isinstance(item, _Visit) and item.lifts_poison:
                self._poisoned = False
            return item

    def _execute(self, job: _Job) -> Callable[[], None]:
        """Execute a job, and with it the next where that can join it; returns what tells the loop of it."""
        late = self._joining(job)
        if late is not None and (told := self._execute_both(job, late)) is not None:
            return told
        outcome: Outcome
        try:
            outcome = self.engine.execute(job.batch, self._tell)
        except BatchRefused as refusal:
            self.poison()  # here, before the loop hears of it: nothing may run behind a refused batch
            outcome = refusal
        self._note(job.batch, outcome)
        return partial(job.tell, outcome)

    def _joining(self, job: _Job) -> _Job | None:
        """The next in the queue, where it can join this one."""
        with self._changed:
            late = self._queue[0] if self._queue else None
        return late if isinstance(late, _Job) and self.engine.joins(job.batch, late.batch) else None

    def _execute_both(self, job: _Job, late: _Job) -> Callable[[], None] | None:
        """Both in one pass; None where they do not fit, with nothing done."""
        try:
            both, output = self.engine.execute_both(job.batch, late.batch, self._tell)
        except BatchRefused:
            return None
        with self._changed:
            if late in self._queue:  # else forgotten meanwhile; but it has started, so it is told
                self._queue.remove(late)
        self._note(both, output)
        one, other = parted(output, job.batch)

        def tell() -> None:
            job.tell(one)
            late.tell(other)

        return tell

    def _note(self, batch: ScheduledBatch, outcome: Outcome) -> None:
        for note in self._notes:
            note(batch, outcome)

    def _tell(self) -> None:
        """Tell the loop of the last outcome, if it has not been told."""
        if self._untold is not None:
            self._call(self._untold)
            self._untold = None

    def _call(self, function: Callable[[], None]) -> None:
        """Call `function` on the loop, unless the loop has ended."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)


def _answer(done: "asyncio.Future[Any]", answer: Any) -> None:
    if not done.done():  # whoever waited may have been cancelled
        done.set_result(answer)
