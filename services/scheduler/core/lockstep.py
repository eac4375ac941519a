"""Lockstep groups (expert parallelism): no forward pass of one worker ends unless all others run one, so that each step is issued to all."""

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Protocol

from services.scheduler.core.fleet import Fleet
from services.scheduler.core.replica import Replica
from services.scheduler.core.step_plan import StepPlan
from tessera.values.batch import ScheduledBatch


class Issue(Protocol):
    """Makes a plan the next batch of a worker."""

    def __call__(self, replica: Replica, plan: StepPlan, now_us: int) -> ScheduledBatch: ...


class Lockstep:
    """All workers of a scheduler as one group, which goes on in rounds: each round is one batch for every member.

    A member without rows computes a dummy run of the size and path of the largest batch of its round, prefills before decodes. A round
    in which nobody has rows runs no model: it only tells those workers that have to give something up. Rounds need every member:
    while one is away the others wait, and after one has come or gone they begin again once nothing is in flight any more, so that
    the n-th batch of each is of the same round.
    """

    def __init__(self, fleet: Fleet, plan: Callable[[Replica, int], StepPlan], issue: Issue) -> None:
        self._fleet = fleet
        self._plan = plan
        self._issue = issue
        self._ready: defaultdict[str, deque[ScheduledBatch]] = defaultdict(deque)  # issued, and not asked for yet
        self._is_settling = False

    def disturb(self, name: str) -> None:
        """A worker has come or is gone: what was issued to it before is void."""
        self._ready.pop(name, None)
        self._is_settling = True

    def next_batch(self, name: str, now_us: int, may_begin: bool) -> ScheduledBatch | None:
        """A member's batch of the earliest round that it has not been given; begins a round, if that is allowed, where it has been given all,
        and all are ready."""
        if not self._ready[name] and may_begin and self._are_ready():
            self._begin(now_us)
        ready = self._ready[name]
        return ready.popleft() if ready else None

    def _are_ready(self) -> bool:
        members = list(self._fleet)
        if not all(replica.is_attached for replica in members):
            return False
        if self._is_settling and any(replica.in_flight for replica in members):
            return False
        self._is_settling = False
        return all(not replica.is_full for replica in members)

    def _begin(self, now_us: int) -> None:
        plans = []
        for replica in self._fleet:
            plan = self._plan(replica, now_us)
            if plan.counts:  # issued at once: what is planned next may depend on it
                self._ready[replica.name].append(self._issue(replica, plan, now_us))
            plans.append((replica, plan))
        largest = max((plan for _, plan in plans), key=lambda plan: (plan.num_decodes < len(plan.counts), sum(plan.counts)))
        for replica, plan in plans:
            if plan.counts:
                continue
            if largest.counts:
                plan = StepPlan.dummy(largest, replica.tokens_max, replica.running_max)
            elif not replica.has_orders:
                continue
            self._ready[replica.name].append(self._issue(replica, plan, now_us))
