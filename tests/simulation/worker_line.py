"""A scheduler's end of one worker: attach under the next nonce, read the report, open Execute, and again whenever that ends."""

from typing import Any, Protocol

from services.scheduler.core.errors import SchedulerError
from services.scheduler.core.step_clock import StepClock
from services.scheduler.core.worker_loss import LEFT, LossKind, WorkerLoss
from tessera.values.batch import ScheduledBatch, ScheduledBatchOutput
from tessera.values.identity import Epoch
from tessera.values.report import WorkerReport
from tests.simulation.world import Actor, End

RETRY = 100_000
TURN = 125_000
TURNS_PER_SILENCE = 8
"""Silence is counted in turns, so that a pause of the scheduler is none of a worker's."""


class Listener(Protocol):
    """The scheduler that owns the line."""

    def worker_attached(self, line: "WorkerLine", report: WorkerReport) -> None: ...
    def worker_output(self, line: "WorkerLine", output: ScheduledBatchOutput) -> None: ...
    def worker_detached(self, line: "WorkerLine", loss: WorkerLoss) -> None: ...
    def told_older(self, epoch: Epoch) -> None: ...


class WorkerLine:
    """Lives for one term. `owner` and `listener` are the same process."""

    def __init__(self, owner: Actor, listener: Listener, worker: str, epoch: Epoch) -> None:
        self.worker, self.epoch, self.nonce = worker, epoch, 0
        self._owner, self._listener = owner, listener
        self._end: End | None = None
        self._silent_turns = 0
        self._clock = StepClock()
        self._boot_id = b""
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
            self._clock.sent(batch.step_id, batch.total_tokens, may_join=not batch.num_decodes)
            self._end.send(("batch", batch))

    def close(self) -> None:
        """The term is over; the listener is told nothing more."""
        self._is_closed = True
        if self._end is not None:
            self._end.close()

    def give_up(self, loss: WorkerLoss) -> None:
        """End this round, and begin the next one soon."""
        if self._is_closed:
            return
        if self._end is not None:
            self._end.close()
            self._end = None
        if self._is_attached:
            self._is_attached = False
            self._listener.worker_detached(self, loss)
        self._owner.later(RETRY, self.attach)

    def _connect(self, kind: str) -> End | None:
        world = self._owner.world
        self._end = end = world.connect(self._owner, world.actors[self.worker], kind)
        if end is not None:
            self._silent_turns = 0
            end.on_close = lambda: self.give_up(_broken("stream ended")) if end is self._end else None
        return end

    def _watch(self, end: End) -> None:
        if self._is_closed or end is not self._end:
            return
        self._silent_turns += 1
        overdue = self._clock.advance(TURN)
        if self._silent_turns > TURNS_PER_SILENCE or overdue is not None:
            self._owner.log("gives up", self.worker, overdue or "silent")
            self.give_up(_broken(str(overdue or "silent")))
            return
        if self._is_attached and self._silent_turns % 2:
            end.send(("heartbeat", None))
        self._owner.later(TURN, lambda: self._watch(end))

    def _hear(self, end: End, kind: str, value: Any) -> None:
        if self._is_closed or end is not self._end:
            return
        self._silent_turns = 0
        if kind == "report":
            self._execute(value)
        elif kind == "output" and (value.epoch, value.nonce) == (self.epoch, self.nonce):
            self._clock.answered(value.step_id, value.compute_us)
            try:
                self._listener.worker_output(self, value)
            except SchedulerError as error:
                self._owner.log("gives up", self.worker, error)
                self.give_up(WorkerLoss(LossKind.REFUSED, value.step_id, str(error)))
        elif kind == "left":
            self.give_up(LEFT)
        elif kind == "older":
            self._listener.told_older(value)
        elif kind == "superseded":
            if not self.epoch.supersedes(value):
                self._listener.told_older(value)
            else:
                self.give_up(LEFT)

    def _execute(self, report: WorkerReport) -> None:
        assert self._end is not None
        self._end.close()
        self._clock.restart(is_same_boot=report.description.boot_id == self._boot_id)
        self._boot_id = report.description.boot_id
        end = self._connect("execute")
        if end is None:
            self._owner.later(RETRY, self.attach)
            return
        end.on_message = lambda message: self._hear(end, *message)
        end.send(("bind", self.epoch, self.nonce))
        self._is_attached = True
        self._listener.worker_attached(self, report)
        self._watch(end)


def _broken(why: str) -> WorkerLoss:
    return WorkerLoss(LossKind.BROKEN, None, why)
