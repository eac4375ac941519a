"""What is done once while there is nothing to do."""

from dataclasses import asdict

import structlog

from services.scheduler.core.scheduler import Scheduler

_log = structlog.get_logger()

INTEGRITY_IDLE_US = 2_000_000
"""Idle time after which the cores are checked: it costs a pass over all blocks."""

CHECKED_BLOCKS_MAX = 100_000
"""Cached blocks, over all workers, up to which that is done: 0.3 s, in which nothing else happens here. Several times that, and heartbeats are missed."""


class IdleWatch:
    """Says once per idle time how much there is, and checks once that all parts tell one story."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._since_us: int | None = None
        self._is_checked = False
        self._num_submitted = 0  # when it last looked: requests that came and ended since then were work too

    def look(self, now_us: int) -> None:
        """To be called now and then."""
        has_unfinished, num_submitted = self._scheduler.has_unfinished, self._scheduler.num_submitted
        if has_unfinished or num_submitted != self._num_submitted:
            self._since_us, self._is_checked, self._num_submitted = None, False, num_submitted
        if has_unfinished:
            return
        if self._since_us is None:
            self._since_us = now_us
            _log.debug("idle", **asdict(self._scheduler.load()))
        elif not self._is_checked and now_us - self._since_us >= INTEGRITY_IDLE_US:
            self._is_checked = True
            num_cached = sum(replica.manager.num_cached_blocks for replica in self._scheduler.attached)
            if num_cached > CHECKED_BLOCKS_MAX:
                return
            self._scheduler.check_integrity()
            _log.debug("integrity checked", **asdict(self._scheduler.load()))
