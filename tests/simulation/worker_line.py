"""A scheduler's end of one worker: attach under the next nonce, read the report, open Execute, and again whenever that ends."""

from typing import Any, Protocol

from services.scheduler.core.errors import SchedulerError
from tessera.values.batch import ScheduledBatch, ScheduledBatchOutput
from tessera.values.identity import Epoch
from tessera.values.report import WorkerReport
from tests.simulation.world import Actor, End

RETRY = 200_000
HEARTBEAT = 500_000
SILENCE = 2_000_000


class Listener(Protocol):
    """The scheduler that owns the line."""

    def worker_attached(self, line: "WorkerLine", report: WorkerReport) -> None: ...
    def worker_output(self, line: "WorkerLine", output: ScheduledBatchOutput) -> None: ...
    def worker_detached(self, line: "WorkerLine") -> None: ...
    def told_older(self, epoch: Epoch) -> None: ...


class WorkerLine:
    """Lives for one term. `owner` and `listener` are the same process."""

    def __init__(self, owner: Actor, listener: Listener, worker: str, epoch: Epoch) -> None:
        self.worker, self.epoch, self.nonce = worker, epoch, 0
        self._owner, self._listener = owner, listener
        self._end: End | None = None
        self._heard_at = 0
        self._is_attached = False
        self._is_closed = False
        self.attach()

    def attach(self) -> None:
        """The next round."""
        if self._is_closed:
            return
        self.nonce += 1
        end = self._connect("attach")
        if end is None:
            self._owner.later(RETRY, self.attach)
            return
        end.on_message = lambda message: self._hear(end, *message)
        end.send((self.epoch, self.nonce))
        self._watch(end)

    def send(self, batch: ScheduledBatch) -> None:
        """To the worker, while it is attached."""
        if self._end is not None:
            self._end.send(("batch", batch))

    def close(self) -> None:
        """The term is over; the listener is told nothing more."""
        self._is_closed = True
        if self._end is not None:
            self._end.close()

    def give_up(self) -> None:
        """End this round, and begin the next one soon."""
        if self._is_closed:
            return
        if self._end is not None:
            self._end.close()
            self._end = None
        if self._is_attached:
            self._is_attached = False
            self._listener.worker_detached(self)
        self._owner.later(RETRY, self.attach)

    def _connect(self, kind: str) -> End | None:
        world = self._owner.world
        self._end = end = world.connect(self._owner, world.actors[self.worker], kind)
        if end is not None:
            self._heard_at = world.now
            end.on_close = lambda: self.give_up() if end is self._end else None
        return end

    def _watch(self, end: End) -> None:
        if self._is_closed or end is not self._end:
            return
        if self._owner.world.now - self._heard_at > SILENCE:
            self._owner.log("hears nothing of", self.worker)
            self.give_up()
            return
        if self._is_attached:
            end.send(("heartbeat", None))
        self._owner.later(HEARTBEAT, lambda: self._watch(end))

    def _hear(self, end: End, kind: str, value: Any) -> None:
        if self._is_closed or end is not self._end:
            return
        self._heard_at = self._owner.world.now
        if kind == "report":
            self._execute(value)
        elif kind == "output" and (value.epoch, value.nonce) == (self.epoch, self.nonce):
            try:
                self._listener.worker_output(self, value)
            except SchedulerError as error:
                self._owner.log("gives up", self.worker, error)
                self.give_up()
        elif kind == "older":
            self._listener.told_older(value)
        elif kind == "superseded":
            if not self.epoch.supersedes(value):
                self._listener.told_older(value)
            else:
                self.give_up()

    def _execute(self, report: WorkerReport) -> None:
        assert self._end is not None
        self._end.close()
        end = self._connect("execute")
        if end is None:
            self._owner.later(RETRY, self.attach)
            return
        end.on_message = lambda message: self._hear(end, *message)
        end.send(("bind", self.epoch, self.nonce))
        self._is_attached = True
        self._listener.worker_attached(self, report)
        self._watch(end)
