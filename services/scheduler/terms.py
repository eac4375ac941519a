"""The terms of one scheduler process, and the waits between them."""

import asyncio
import contextlib
from typing import TYPE_CHECKING

import structlog

from services.rpc.health import HealthServicer
from services.scheduler.config import SchedulerConfig
from services.scheduler.leader import Leader
from services.scheduler.leader_sight import LeaderSight
from services.scheduler.notice import Notice
from services.scheduler.sessions import SessionServicer
from services.scheduler.standby import Standby
from services.scheduler.store.port import LeaseView, Store
from services.scheduler.term import Term
from services.scheduler.term_end import Deposed, GatewayAhead, TermEnd
from tessera.scheduler.v1 import session_pb2
from tessera.values.identity import Epoch

if TYPE_CHECKING:
    from services.rpc.spans import Tracing

_log = structlog.get_logger()

SERVICE_NAME = session_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name

DURABLE = "durable"
"""Name under which health says whether the store keeps up."""

READY = "ready"
"""Name under which health says whether this process leads, or would where nobody did: for who replaces one scheduler after the other."""

HAND_OVER_S = 1.0
"""Most time for a hand-over; a store that does not answer is left to find the lease ended."""


class Terms:
    """One term after the other, and the waits between them. Tells health how the present one does."""

    def __init__(
        self,
        config: SchedulerConfig,
        store: Store,
        sessions: SessionServicer,
        health: HealthServicer,
        tracing: "Tracing | None" = None,
    ) -> None:
        self._tracing = tracing
        self._config = config
        self._store = store
        self._sessions = sessions
        self._health = health
        self._present: Term | None = None
        self._num_led = 0  # terms that have ended, and had begun to lead
        self._is_ending = False
        self._notice = Notice(_log)
        self.running = asyncio.create_task(self._run())

    async def end(self) -> None:
        """Hand over, and lead no more."""
        if self._present is not None and not self.running.done():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HAND_OVER_S):
                    await self._present.hand_over()
        self._is_ending = True
        self.running.cancel()
        await asyncio.wait((self.running,))

    @property
    def num_takeovers(self) -> int:
        """How often this process has begun to lead."""
        return self._num_led + (self._leader is not None)

    def sight(self) -> LeaderSight | None:
        """What there is to see of the present leader; None where this process does not lead."""
        return self._leader.sight() if self._leader is not None else None

    @property
    def _leader(self) -> Leader | None:
        return self._present.leader if self._present is not None else None

    def serving(self, is_serving: bool) -> None:
        """See `TermHealth`."""
        self._health.set_ready(SERVICE_NAME, is_serving)

    def durable(self, is_durable: bool) -> None:
        """See `TermHealth`."""
        self._health.set_ready(DURABLE, is_durable)

    def _ready(self, is_ready: bool) -> None:
        """It stays so for the term that follows: a leader that loses its store serves on."""
        self._health.set_ready(READY, is_ready)

    async def _note_stranger(self, end: Deposed, mine: Epoch) -> None:
        """Say once that a worker follows somebody whom this group's store does not know: two groups that share a worker take it from each
        other for ever."""
        view = await self._store.look()
        if isinstance(view, LeaseView) and view.epoch == mine:
            self._notice.say(
                "a worker follows a scheduler that is not of this group",
                worker=end.worker,
                group=self._config.group,
                advice="give every group workers of its own, and all schedulers of one the same --redis and --group",
            )

    async def _run(self) -> None:
        told, mine = 0, None
        while not self._is_ending:  # a term that ends by itself in the moment of the cancel swallows that
            taken = await Standby(self._config, self._store, told, mine, self._ready).take()
            term = self._present = Term(self._config, self._store, taken, self, self._tracing)
            self._sessions.invite(term)
            try:
                await term.run()
            except TermEnd as end:
                _log.warning("standing by again", reason=str(end))
                told = max(told, end.told)
                mine = taken.epoch if isinstance(end, GatewayAhead) else None  # after Deposed somebody else may lead
                if isinstance(end, Deposed) and end.worker:
                    await self._note_stranger(end, taken.epoch)
            finally:
                self._num_led += term.leader is not None
                self._present = None
                self._sessions.stand_by()
