"""What operators ask of a leader, on a table: answers leave once the store has what they changed, and a takeover undoes none of it."""

import random
from collections.abc import Iterator

import pytest
import structlog
from core.fake_worker import FakeWorker
from leader_table import WORKER, Gateway, Table, submission

from services.scheduler.core.block_map import BlockMap
from services.scheduler.core.held_blocks import held_blocks
from services.scheduler.store.memory import MemoryStore
from tessera.values.admin import (
    AbortRequests,
    AdminAnswer,
    AdminCommand,
    AdminQuery,
    AdminReply,
    AdmissionSet,
    GetStats,
    GroupStats,
    ListRequests,
    NoSuch,
    PrefixCacheReset,
    RequestPage,
    RequestsAborted,
    ResetPrefixCache,
    SetAdmission,
    SetDrain,
    WorkerDrained,
)
from tessera.values.finish import FinishReason
from tessera.values.load import WorkerState
from tessera.values.session import Rejected, RejectReason

NUMBER = 77


@pytest.fixture
def table() -> Iterator[Table]:
    made = Table()
    yield made
    made.leader.scheduler.check_integrity()


def ask(gateway: Gateway, command: AdminCommand) -> None:
    gateway.table.leader.heard(gateway.session, AdminQuery(NUMBER, command))


def answers(gateway: Gateway) -> list[AdminAnswer]:
    """What has come since the last time."""
    found = gateway.read()
    assert all(isinstance(message, AdminReply) and message.number == NUMBER for message in found), found
    return [message.answer for message in found]


def test_stats_tell_of_the_whole_group(table: Table) -> None:
    gateway, other = table.gateway(), table.gateway()
    gateway.submit(submission(1, [5, 6, 7], max_tokens=4))
    table.run()
    other.submit(submission(2, [5, 6, 7], max_tokens=40))
    table.run(3)
    table.now_us += 5_000_000
    ask(gateway, GetStats())
    table.write()
    (stats,) = (message.answer for message in gateway.read())
    assert isinstance(stats, GroupStats)
    assert (stats.epoch, stats.uptime_ms, stats.is_durable, stats.is_admission_paused) == (1, 5000, True, False)
    assert (stats.num_submitted, stats.num_ended, stats.num_readable, stats.journal_lag_records) == (2, 1, 1, 0)
    assert (stats.load.num_running, stats.load.workers[0].state) == (1, WorkerState.SERVING)


def test_the_log_has_every_order_with_what_it_names_and_what_came_of_it(table: Table) -> None:
    operator = table.gateway()
    with structlog.testing.capture_logs() as logs:
        for command in (SetAdmission(True), SetDrain("nowhere:1", True), AbortRequests(request_id=b"\1" * 16), GetStats()):
            ask(operator, command)
    told = [{**entry} for entry in logs if entry["event"] == "administration"]
    assert all(entry.pop("gateway") == operator.session.gateway_id.hex() for entry in told)
    assert [list(entry)[:2] for entry in told] == [
        ["SetAdmission", "AdmissionSet"],
        ["SetDrain", "NoSuch"],
        ["AbortRequests", "NoSuch"],
    ]
    assert told[0]["SetAdmission"] == {"is_paused": True} and told[1]["SetDrain"]["worker"] == "nowhere:1"
    assert told[2]["AbortRequests"] == {"request_id": "01" * 16}


def test_answers_wait_for_the_store_unless_it_does_not_keep_up(table: Table) -> None:
    operator, gateway, request = table.gateway(), table.gateway(), submission(1, [5, 6, 7], max_tokens=40)
    gateway.submit(request)
    table.run(3)
    table.store_answers = False
    ask(operator, AbortRequests(request.request_id))
    table.write()
    assert answers(operator) == []
    table.store_answers = True
    table.later(30)
    assert answers(operator) == [RequestsAborted(1)]
    gateway.read()
    assert gateway.finishes == {request.request_id: FinishReason.ABORTED}

    table.store_answers = False
    gateway.submit(submission(2, [8, 9, 10], max_tokens=40))
    ask(operator, AbortRequests(principal=""))
    table.later(1000)
    assert not table.leader.is_durable and answers(operator) == [RequestsAborted(1)]


def test_what_is_not_there_is_said(table: Table) -> None:
    operator = table.gateway()
    for command, field in ((AbortRequests(bytes(16)), "id"), (SetDrain("elsewhere", False), "address")):
        ask(operator, command)
        table.write()
        (answer,) = answers(operator)
        assert isinstance(answer, NoSuch) and answer.field == field


def test_a_pause_refuses_what_is_new_and_ends_with_the_term(table: Table) -> None:
    operator, gateway = table.gateway(), table.gateway()
    running, refused = submission(1, [5, 6, 7]), submission(2, [5, 6, 7])
    gateway.submit(running)
    ask(operator, SetAdmission(True))
    gateway.submit(refused)
    table.run()
    (rejected,) = gateway.read()
    assert isinstance(rejected, Rejected) and rejected.reason is RejectReason.PAUSED and rejected.retry_after_ms > 0
    assert gateway.finishes.keys() == {running.request_id} and answers(operator) == [AdmissionSet(True)]
    ask(operator, GetStats())
    table.write()
    (stats,) = answers(operator)
    assert isinstance(stats, GroupStats) and stats.is_admission_paused
    successor = Table(table.worker, table.store, term=2)
    later = successor.gateway()
    later.submit(refused)
    successor.run()
    assert later.read() == [] and refused.request_id in later.finishes


def test_a_drained_worker_gets_no_new_request(table: Table) -> None:
    operator, gateway, request = table.gateway(), table.gateway(), submission(1, [5, 6, 7])
    ask(operator, SetDrain(WORKER, True))
    gateway.submit(request)
    table.run()
    assert answers(operator) == [WorkerDrained(0)]
    ask(operator, ListRequests())
    table.write()
    (page,) = answers(operator)
    assert isinstance(page, RequestPage) and [view.status for view in page.requests] == ["WAITING"]
    ask(operator, SetDrain(WORKER, False))
    table.run()
    gateway.read()
    assert request.request_id in gateway.finishes


def forgotten(table: Table) -> tuple[FakeWorker, MemoryStore]:
    """A finished request's prefix is cached, then forgotten; the answer is still to come."""
    gateway = table.gateway()
    gateway.submit(submission(1, list(range(5, 14)), max_tokens=3))
    table.run()
    ask(gateway, ResetPrefixCache())
    return table.worker, table.store


def cached_blocks(table: Table) -> int:
    replica = table.leader.scheduler.replica(WORKER)
    assert replica is not None
    return len(replica.manager.published())


def test_no_takeover_brings_back_what_was_forgotten_once_that_is_answered(table: Table) -> None:
    operator = table.gateway()
    worker, store = forgotten(table)
    ask(operator, ResetPrefixCache())
    assert answers(operator) == [], "the worker still remembers"
    for _ in range(4):
        table.later(20)
    (answer,) = answers(operator)
    assert isinstance(answer, PrefixCacheReset) and cached_blocks(table) == 0
    successor = Table(worker, store, term=2)
    assert cached_blocks(successor) == 0 and not any(store.stored().state.blocks.values())


def test_before_it_is_answered_a_takeover_can_find_it_again(table: Table) -> None:
    """Which is why the answer waits."""
    worker, store = forgotten(table)
    assert cached_blocks(table) == 0
    assert cached_blocks(Table(worker, store, term=2)) > 0


def test_a_reset_is_not_answered_while_the_store_is_away(table: Table) -> None:
    operator, gateway = table.gateway(), table.gateway()
    gateway.submit(submission(1, list(range(5, 14)), max_tokens=3))
    table.run()
    table.store_answers = False
    ask(operator, ResetPrefixCache())
    for _ in range(50):
        table.later(20)
    assert not table.leader.is_durable and answers(operator) == []
    table.store_answers = True
    for _ in range(60):
        table.later(20)
    assert answers(operator) == [PrefixCacheReset(2, 0)]


def cached_digests(table: Table) -> set[int]:
    replica = table.leader.scheduler.replica(WORKER)
    assert replica is not None
    return {entry.digest for entry in replica.manager.published()}


def found_digests(table: Table) -> set[int]:
    """What the next leader finds, before it goes on."""
    (recorded,) = table.store.stored().state.blocks.values() or [BlockMap()]
    return set(held_blocks(table.worker.report(), recorded.values()).digests.tolist())


@pytest.mark.parametrize("seed", range(20))
def test_in_any_life_a_takeover_finds_nothing_that_is_forgotten(seed: int) -> None:
    """Requests with common beginnings come, run and end, resets in between; a leader follows at any time at which no reset waits. The pool is
    so large that nothing is forgotten for another reason."""
    dice, table, number, num_forgotten = random.Random(seed), Table(FakeWorker(400, 4)), 0, 0
    for term in range(2, 6):
        gateway, operator, num_waiting = table.gateway(), table.gateway(), 0
        for _ in range(dice.randint(5, 30)):
            if dice.random() < 0.5:
                number += 1
                prompt = [*range(5, 5 + dice.randint(1, 12)), dice.randint(20, 22)]
                gateway.submit(submission(number, prompt, max_tokens=dice.randint(1, 20)))
            if dice.random() < 0.3:
                ask(operator, ResetPrefixCache())
                num_waiting += 1
            table.run(dice.randint(0, 6))
            gateway.read()
        while num_waiting:
            table.now_us += 20_000
            table.leader.tick()
            table.run(dice.randint(0, 3))
            found = answers(operator)
            num_waiting -= len(found)
            num_forgotten += sum(answer.num_forgotten_blocks for answer in found if isinstance(answer, PrefixCacheReset))
        assert found_digests(table) <= cached_digests(table)
        table = Table(table.worker, table.store, term)
    assert num_forgotten > 0
