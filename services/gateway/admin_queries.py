"""What operators ask at this gateway and the leader has not answered yet."""

import asyncio
import itertools
from collections.abc import Callable

from services.rpc.errors import Unavailable
from tessera.values.admin import AdminAnswer, AdminCommand, AdminQuery, AdminReply

ANSWER_S_MAX = 25.0
"""An answer waits for the store, and that of a reset prefix cache for about six steps of each worker, which may be long ones. Less than the
deadline of our own client, so that this says what is the matter."""

RETRY_MS = 500
"""About the time in which another scheduler takes over."""


class AdminQueries:
    """By number. Belongs to one event loop. `say` sends a query to the leader."""

    def __init__(self, say: Callable[[AdminQuery], None]) -> None:
        self._say = say
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[AdminAnswer]] = {}

    async def ask(self, command: AdminCommand) -> AdminAnswer:
        """What the leader answers; there must be one. Raises Unavailable where it is lost before, or is silent: what was asked may have been
        done then."""
        number = next(self._numbers)
        answer: asyncio.Future[AdminAnswer] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._say(AdminQuery(number, command))
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                return await answer
        except TimeoutError:
            text = (
                f"the scheduler has not answered for {ANSWER_S_MAX:g} s; what was asked may have been done: is the store there?"
            )
            raise Unavailable(text, reason="NO_ANSWER", retry_after_ms=RETRY_MS) from None
        finally:
            self._answers.pop(number, None)

    def answered(self, reply: AdminReply) -> None:
        """The leader answers; nobody may wait for it any more."""
        answer = self._answers.get(reply.number)
        if answer is not None and not answer.done():
            answer.set_result(reply.answer)

    def lost(self) -> None:
        """The leader is gone: nobody answers what it was asked."""
        text = "the scheduler that was asked does not lead any more; what was asked may have been done"
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(Unavailable(text, reason="LEADER_LOST", retry_after_ms=RETRY_MS))
