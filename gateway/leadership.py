"""Which of several schedulers a gateway listens to: the one that invited it under the highest epoch."""

from collections.abc import Hashable
from enum import Enum
from typing import Generic, TypeVar

from tessera.values.identity import NO_EPOCH, Epoch

S = TypeVar("S", bound=Hashable)
"""A scheduler, as its gateway reaches it."""


class Answer(Enum):
    """What a gateway makes of an invitation."""

    FOLLOW = "follow"  # say Hello; whoever led before is listened to no more
    KEEP = "keep"  # the same leader by another way: one session is enough
    REFUSE = "refuse"  # a higher epoch is known: the scheduler is to hear of it


class Leadership(Generic[S]):
    """Invariant: the leader has invited under the highest epoch ever heard of, and no other scheduler is listened to."""

    def __init__(self) -> None:
        self.highest: Epoch = NO_EPOCH
        self.leader: S | None = None
        self._invitations: dict[S, Epoch] = {}

    def invited(self, scheduler: S, epoch: Epoch) -> Answer:
        """`scheduler` has taken `epoch`, as it says. After FOLLOW it is the leader."""
        if not epoch.supersedes(self.highest):
            self.gone(scheduler)
            return Answer.REFUSE
        self._invitations[scheduler] = epoch
        if self.leader is not None and self.leader != scheduler and epoch == self.highest:
            return Answer.KEEP
        self.highest, self.leader = epoch, scheduler
        return Answer.FOLLOW

    def gone(self, scheduler: S) -> S | None:
        """`scheduler` stands by, or cannot be heard any more. Returns who leads under the same epoch instead, if it was the leader and
        there is one: it is the leader now."""
        self._invitations.pop(scheduler, None)
        if self.leader != scheduler:
            return None
        invited = (other for other, epoch in self._invitations.items() if epoch == self.highest)
        self.leader = next(invited, None)
        return self.leader

    def counts(self, scheduler: S, epoch: Epoch) -> bool:
        """Whether what `scheduler` says under `epoch` is to be heeded."""
        return scheduler == self.leader and epoch == self.highest
