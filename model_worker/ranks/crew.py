"""The other ranks, as rank 0 sees them."""

from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TypeVar

from model_worker.gpu_memory import GPUMemory
from model_worker.group import GroupBroken
from model_worker.ranks.orders import Answer, Join, Order, PoolSize, receive, send
from model_worker.ranks.torch_group import TIMEOUT_S, TorchGroup

T = TypeVar("T")


class RankLost(BaseException):
    """A rank is gone, or does not answer any more. The model cannot go on without its part, so the process must end: no Exception, which
    whoever computes a row keeps from its neighbours."""


class RankFailed(Exception):
    """A pass failed on another rank, for a reason of its own."""


class Crew:
    """Ranks 1 and up, each at the other end of one of `lines`; `group` is rank 0's. Of one thread."""

    def __init__(self, group: TorchGroup, lines: Sequence[Connection]) -> None:
        assert group.rank == 0 and len(lines) == group.size - 1
        self.group = group
        self._lines = lines
        self._generation = 0

    def begin(self) -> None:
        """Wait until every rank has loaded its part, and meet. Raises RankFailed, RankLost."""
        self._loaded()
        self.tell(Join(self._generation))
        self._join()

    def measured(self) -> list[GPUMemory]:
        """What each rank has found its part to take of its GPU, by rank from 1 on. Raises RankFailed, RankLost."""
        return [answer.memory for answer in self._loaded() if answer.memory is not None]

    def _loaded(self) -> list[Answer]:
        """What every rank says to a question of the start, which may take any time."""
        answers = self._answers(None)
        for rank, answer in enumerate(answers, 1):
            if answer.failure:
                raise RankFailed(f"rank {rank}: {answer.failure}")
        return answers

    def tell(self, order: Order | PoolSize) -> None:
        """Give every rank the same order. Raises RankLost."""
        for rank, line in enumerate(self._lines, 1):
            try:
                send(line, order)
            except OSError as error:
                raise self._lost(rank) from error

    def answers(self) -> list[Answer]:
        """Wait for what every rank says to the last order, by rank from 1 on. Raises RankLost."""
        return self._answers(TIMEOUT_S)

    def together(self, order: Order, own: Callable[[], T]) -> T:
        """Have every rank carry out `order`, of which `own` is rank 0's part, and return what that returned. What fails on any rank fails here, and
        leaves all ranks ready for the next order. Raises what `own` raises, RankFailed for what another rank alone could not do, RankLost."""
        self.tell(order)
        failure: Exception | None = None
        try:
            result = own()
        except Exception as error:  # noqa: BLE001 - raised again once all ranks are ready
            self.group.leave()  # or the others would wait for this rank
            failure = error
        failed = [(rank, answer) for rank, answer in enumerate(self.answers(), 1) if answer.failure]
        if failure is None and not failed:
            return result
        self.meet_again()
        causes = [f"rank {rank}: {answer.failure}" for rank, answer in failed if not answer.is_consequence]
        if causes and (failure is None or isinstance(failure, GroupBroken)):
            raise RankFailed("; ".join(causes))
        raise failure or RankFailed(f"rank {failed[0][0]}: {failed[0][1].failure}")

    def meet_again(self) -> None:
        """After a failed pass, which has broken the group: make a new one. Raises RankLost."""
        self._generation += 1
        self.tell(Join(self._generation))
        self._join()
        self.answers()

    def _join(self) -> None:
        try:
            self.group.join(self._generation)
        except GroupBroken as error:
            raise RankLost(str(error)) from error

    def _answers(self, timeout_s: float | None) -> list[Answer]:
        return [self._answer(rank, line, timeout_s) for rank, line in enumerate(self._lines, 1)]

    def _answer(self, rank: int, line: Connection, timeout_s: float | None) -> Answer:
        try:
            if not line.poll(timeout_s):
                raise RankLost(f"rank {rank} of {self.group.size} has not answered for {timeout_s:g} s")
            answer: Answer = receive(line)
        except (EOFError, OSError) as error:
            raise self._lost(rank) from error
        return answer

    def _lost(self, rank: int) -> RankLost:
        return RankLost(f"rank {rank} of {self.group.size} is gone")
