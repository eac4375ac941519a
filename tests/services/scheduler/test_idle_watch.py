"""When nothing is to be done, what is held is checked once, where that does not take too long."""

from types import SimpleNamespace

import pytest
import structlog

from services.scheduler.core.load import Load
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.idle_watch import CHECKED_BLOCKS_MAX, INTEGRITY_IDLE_US, IdleWatch
from tessera.values.config import Config
from tessera.values.identity import Epoch


class Checked(Scheduler):
    """Counts its checks; its one worker has `num_cached` blocks in its cache."""

    num_checks = 0
    num_loads = 0
    num_cached = 0
    has_unfinished = False
    num_submitted = 0

    def check_integrity(self) -> None:
        self.num_checks += 1

    def load(self) -> Load:
        self.num_loads += 1
        return super().load()

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


def test_while_there_is_work_nothing_is_counted(scheduler: Checked) -> None:
    """It is asked every few steps, and counting takes as long as a part of one."""
    watch, scheduler.has_unfinished = IdleWatch(scheduler), True
    for now_us in range(0, 3 * INTEGRITY_IDLE_US, INTEGRITY_IDLE_US):
        watch.look(now_us)
    assert scheduler.num_loads == scheduler.num_checks == 0
    scheduler.has_unfinished = False
    watch.look(4 * INTEGRITY_IDLE_US)
    watch.look(5 * INTEGRITY_IDLE_US)
    assert scheduler.num_checks == 1


def test_a_request_that_comes_and_ends_between_two_looks_was_work(scheduler: Checked) -> None:
    watch = IdleWatch(scheduler)
    with structlog.testing.capture_logs() as logs:
        for now_us in (0, 10, 20):
            watch.look(now_us)
        scheduler.num_submitted = 1
        for now_us in (30, 40, 29 + INTEGRITY_IDLE_US):
            watch.look(now_us)
    assert [entry["event"] for entry in logs] == ["idle", "idle"]
    watch.look(30 + INTEGRITY_IDLE_US)
    assert scheduler.num_checks == 1
