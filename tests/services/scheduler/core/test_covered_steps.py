"""Outputs that change nothing but the slots they drop: the worker is told that they are durable all the same."""

from services.scheduler.core.changes import Changes
from services.scheduler.core.journal import Journal, WorkerStep
from services.scheduler.core.journal_call import Applied
from tessera.values.config import Config

BOOT = b"1" * 16


def acknowledge(journal: Journal) -> None:
    while journal.next_call(0) is not None:
        journal.on_reply(Applied(journal.last_record), 0)


def test_a_step_that_changed_nothing_is_as_durable_as_what_came_before() -> None:
    journal = Journal(Config(), 1, 0)
    journal.add(Changes(), 0, WorkerStep("w", BOOT, 3))
    journal.cover(WorkerStep("w", BOOT, 4))
    assert journal.durable_step("w", BOOT) == 0
    acknowledge(journal)
    assert journal.durable_step("w", BOOT) == 4
    journal.cover(WorkerStep("w", BOOT, 5))
    assert journal.durable_step("w", BOOT) == 5, "nothing is pending"
