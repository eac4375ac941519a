"""When nothing is to be done, what is held is checked once, where that does not take too long."""

from types import SimpleNamespace

import pytest

from services.scheduler.core.scheduler import Scheduler
from services.scheduler.idle_watch import CHECKED_BLOCKS_MAX, INTEGRITY_IDLE_US, IdleWatch
from tessera.values.config import Config
from tessera.values.identity import Epoch


class Checked(Scheduler):
    """Counts its checks; its one worker has `num_cached` blocks in its cache."""

    num_checks = 0
    num_cached = 0

    def check_integrity(self) -> None:
        self.num_checks += 1

    @property
    def attached(self):
        return [SimpleNamespace(manager=SimpleNamespace(num_cached_blocks=self.num_cached))]


@pytest.fixture
def scheduler() -> Checked:
    return Checked(Config(), Epoch(1, b"a" * 16))


def test_it_is_checked_once_in_an_idle_time(scheduler: Checked) -> None:
    watch = IdleWatch(scheduler)
    for now_us, expected in ((5, 0), (4 + INTEGRITY_IDLE_US, 0), (5 + INTEGRITY_IDLE_US, 1), (9 * INTEGRITY_IDLE_US, 1)):
        watch.look(now_us)
        assert scheduler.num_checks == expected


def test_a_cache_so_large_that_heartbeats_would_wait_is_not(scheduler: Checked) -> None:
    watch, scheduler.num_cached = IdleWatch(scheduler), CHECKED_BLOCKS_MAX + 1
    watch.look(0)
    watch.look(INTEGRITY_IDLE_US)
    assert scheduler.num_checks == 0
    assert watch._is_checked, "nor looked at again in this idle time"
