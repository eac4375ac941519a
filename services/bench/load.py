"""Sends a plan's requests: in a closed loop, where so many are always under way, or in an open one, at the times of the plan."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from services.bench.outcome import INTERRUPTED, Outcome
from services.bench.workload import PlannedRequest

Ask = Callable[[PlannedRequest, float | None], Awaitable[Outcome]]
"""Sends a request and waits for its end; the second argument is when it was meant to be sent, on the clock of `time.monotonic`."""


FAILURE_PAUSE_S = 0.1
"""A closed loop waits so long where a request failed: a gateway that refuses at once would be asked thousands of times a second."""


@dataclass
class Load:
    """One level of load. `concurrency` None is an open loop. After `duration_s` of the `clock` nothing is sent any more, whatever the plan has
    been late with; what is under way goes on.

    `outcomes` grows while `run` runs, in the order of their ends.
    """

    ask: Ask
    concurrency: int | None
    duration_s: float | None = None
    clock: Callable[[], float] = time.monotonic
    outcomes: list[Outcome] = field(default_factory=list)
    num_started: int = 0
    began_s: float = 0.0

    @property
    def num_running(self) -> int:
        """Requests under way."""
        return self.num_started - len(self.outcomes)

    async def run(self, plan: Iterator[PlannedRequest], stop: asyncio.Event) -> None:
        """Until all of the plan is answered, or `stop` is set: then what is under way is cancelled, and its outcome INTERRUPTED. Raises what `plan` and `ask` raise."""
        self.began_s = self.clock()
        job = asyncio.create_task(self._open(plan) if self.concurrency is None else self._closed(plan, self.concurrency))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((job, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            if not job.done():
                job.cancel()
        try:
            await job
        except asyncio.CancelledError:
            if not stop.is_set():
                raise
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _closed(self, plan: Iterator[PlannedRequest], concurrency: int) -> None:
        async def lane() -> None:
            for request in plan:
                outcome = await self._one(request, None)
                if not outcome.is_ok:
                    await asyncio.sleep(FAILURE_PAUSE_S)
                if self.duration_s is not None and self.clock() - self.began_s >= self.duration_s:
                    return

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(lane())

    async def _open(self, plan: Iterator[PlannedRequest]) -> None:
        async with asyncio.TaskGroup() as group:
            for request in plan:
                assert request.arrival_s is not None, "an open loop's requests have their times"
                now_s = self.clock()
                if self.duration_s is not None and max(request.arrival_s, now_s - self.began_s) > self.duration_s:
                    return
                due_s = self.began_s + request.arrival_s
                await asyncio.sleep(max(0.0, due_s - now_s))
                group.create_task(self._one(request, due_s))

    async def _one(self, request: PlannedRequest, due_s: float | None) -> Outcome:
        self.num_started += 1
        sent_s = self.clock()
        try:
            outcome = await self.ask(request, due_s)
        except asyncio.CancelledError:
            self.outcomes.append(Outcome(request.index, sent_s, self.clock(), INTERRUPTED, arrival_s=due_s))
            raise
        self.outcomes.append(outcome)
        return outcome
