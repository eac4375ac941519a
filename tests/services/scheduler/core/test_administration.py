"""What operators may do: see requests, end them, refuse new ones, empty a worker, forget prefixes for good."""

import pytest
from fake_worker import FakeWorker
from fleet_rig import FleetRig
from scheduler_rig import WORKER, Rig

from services.scheduler.core.admission import Admitted, Known, RefusalReason, Refused
from services.scheduler.core.held_blocks import held_blocks
from tessera.values.admin import (
    AbortRequests,
    ListRequests,
    NoSuch,
    PageMark,
    RequestsAborted,
    SetDrain,
    WorkerDrained,
    WorkerUndrained,
)
from tessera.values.config import Config
from tessera.values.finish import FinishReason
from tessera.values.load import WorkerState


def numbers(count: int, first: int = 10) -> list[int]:
    return list(range(first, first + count))


def rig_of(budget: int = 20, num_blocks: int = 40, **config: object) -> Rig:
    return Rig(Config(**{"max_num_seqs": 4, "max_num_batched_tokens": budget, **config}), FakeWorker(num_blocks, 4))


def test_requests_are_listed_as_they_came_and_without_what_they_say() -> None:
    rig = rig_of(max_num_seqs=1)
    rig.submit(1, numbers(6), "mine", max_tokens=4, priority=3)
    rig.submit(2, numbers(5, 30), max_tokens=4)
    rig.step()
    rig.now_us += 7_000_000
    first, second = rig.scheduler.admin.list_requests(ListRequests(), rig.now_us).requests
    assert (first.request_id, first.client_request_id, first.principal) == (rig.sequence(1).request_id, "mine", "someone")
    assert (first.status, first.worker, first.prompt_len, first.output_len) == ("RUNNING", WORKER, 6, 1)
    assert (first.priority, first.age_ms) == (3, 7001)
    assert (second.status, second.worker, second.output_len) == ("WAITING", "", 0)
    rig.finish_all()
    assert rig.scheduler.admin.list_requests(ListRequests(), rig.now_us).requests == (), "what has ended is not listed"


def test_pages_follow_each_other_while_requests_come_and_go() -> None:
    rig = rig_of()
    for number in range(1, 6):
        rig.submit(number, numbers(3))
    page = rig.scheduler.admin.list_requests(ListRequests(2), 0)
    assert [view.request_id for view in page.requests] == [rig.sequence(number).request_id for number in (1, 2)]
    assert page.next == PageMark(1, 2)
    rig.scheduler.abort(rig.sequence(2).request_id, 0)
    rig.scheduler.abort(rig.sequence(3).request_id, 0)
    rig.submit(6, numbers(3))
    page = rig.scheduler.admin.list_requests(ListRequests(2, page.next), 0)
    assert [view.request_id for view in page.requests] == [rig.sequence(number).request_id for number in (4, 5)]
    page = rig.scheduler.admin.list_requests(ListRequests(2, page.next), 0)
    assert [view.request_id for view in page.requests] == [rig.sequence(6).request_id] and page.next is None


def test_a_request_is_aborted_by_its_id_once() -> None:
    rig = rig_of()
    request_id = rig.submit(1, numbers(6), max_tokens=9)
    rig.step()
    admin = rig.scheduler.admin
    assert admin.abort(AbortRequests(request_id), rig.now_us) == RequestsAborted(1)
    assert (rig.reason(1), len(rig.output(1))) == (FinishReason.ABORTED, 1)
    for unknown in (request_id, bytes(16)):
        answer = admin.abort(AbortRequests(unknown), rig.now_us)
        assert isinstance(answer, NoSuch) and answer.field == "id" and unknown.hex() in answer.text
    rig.finish_all()


def test_all_requests_of_a_principal_are_aborted_and_nobody_elses() -> None:
    rig = rig_of()
    for number in (1, 2, 3):
        rig.submit(number, numbers(5), max_tokens=2)
    rig.step()
    assert rig.scheduler.admin.abort(AbortRequests(principal="someone else"), 0) == RequestsAborted(0)
    assert rig.scheduler.admin.abort(AbortRequests(principal="someone"), 0) == RequestsAborted(3)
    assert {rig.reason(number) for number in (1, 2, 3)} == {FinishReason.ABORTED}
    rig.finish_all()


def test_while_admission_is_paused_only_what_had_begun_comes_in() -> None:
    rig = rig_of()
    running = rig.submit(1, numbers(6), max_tokens=6)
    rig.step()
    admin = rig.scheduler.admin
    admin.set_admission(True)
    refused = rig.try_submit(2, numbers(5))
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.PAUSED and refused.retry_after_ms > 0
    assert isinstance(rig.scheduler.submit(rig.sequence(1).submission, 1, (), 0), Known)
    resumed, received = rig.sequence(1).submission, rig.sequence(1).output_token_ids()
    rig.finish_all()
    rig.assert_as_alone(1)
    assert rig.scheduler.request(running) is not None
    rig.scheduler.forget_finished(10**12)
    rig.check()
    again = rig.scheduler.submit(resumed, 2, (), 0)
    assert isinstance(again, Refused) and again.reason is RefusalReason.PAUSED, "to try again is not to have begun"
    assert isinstance(rig.scheduler.submit(resumed, 2, received, 0), Admitted), "it has tokens: it ran"
    admin.set_admission(False)
    rig.submit(2, numbers(5))
    rig.finish_all()


def test_a_drained_worker_is_emptied_and_serves_again_when_it_is_wanted() -> None:
    rig, first = FleetRig(), "worker:0"
    for number in range(1, 5):
        rig.submit(number, numbers(6, 10 * number), max_tokens=12)
    rig.turn()
    admin, replica = rig.scheduler.admin, rig.scheduler.replica(first)
    assert replica is not None and replica.num_requests == 2
    assert admin.set_drain(SetDrain(first, True)) == WorkerDrained(2)
    assert [worker.state for worker in rig.scheduler.load_meter.read(0).workers] == [WorkerState.DRAINING, WorkerState.SERVING]
    rig.submit(5, numbers(6, 70), max_tokens=12)
    while replica.num_requests or replica.in_flight:
        assert any(sequence.finish is None for sequence in rig.scheduler.requests()), "moved, and not ended"
        rig.turn()
    assert admin.set_drain(SetDrain(first, True)) == WorkerDrained(0)
    assert rig.scheduler.load_meter.read(0).workers[0].state is WorkerState.DRAINED
    rig.finish_all()
    assert {rig.sequence(number).finish.reason for number in range(1, 6)} == {FinishReason.MAX_TOKENS}
    rig.attach(first)
    assert rig.scheduler.replica(first).is_drained, "a stream that breaks is no new process"
    assert admin.set_drain(SetDrain(first, False)) == WorkerUndrained()
    for number in range(6, 10):
        rig.submit(number, numbers(6, 10 * number), max_tokens=3)
    rig.turn()
    assert rig.scheduler.replica(first).num_requests == 2
    rig.finish_all()
    admin.set_drain(SetDrain(first, True))
    rig.kill(first)
    rig.attach(first)
    assert rig.scheduler.load_meter.read(0).workers[0].state is WorkerState.SERVING, "a new process was not drained"


def test_a_worker_that_is_not_there_cannot_be_drained() -> None:
    answer = rig_of().scheduler.admin.set_drain(SetDrain("elsewhere", True))
    assert isinstance(answer, NoSuch) and answer.field == "address" and WORKER in answer.text


def sweep(rig: Rig, turns: int = 4) -> None:
    """The journal has everything at once."""
    for _ in range(turns):
        replica = rig.scheduler.replica(WORKER)
        assert replica is not None
        rig.scheduler.set_durable_step(WORKER, replica.boot_id, replica.applied_step)
        rig.step()


def cached_blocks(rig: Rig) -> set[int]:
    """What a leader would find cached that attaches now."""
    recorded = rig.scheduler.replica(WORKER).manager.published()
    return set(held_blocks(rig.worker.report(), recorded).block_ids.tolist())


@pytest.mark.parametrize("is_running", [False, True])
def test_no_report_brings_back_what_was_forgotten(is_running: bool) -> None:
    rig = rig_of()
    rig.submit(1, numbers(9), max_tokens=3)
    rig.step()
    if is_running:
        rig.submit(2, numbers(9, 50), max_tokens=20)
    rig.step()
    rig.step()
    assert rig.sequence(1).finish is not None
    admin = rig.scheduler.admin
    answer, mark = admin.reset_prefix_cache(), admin.sweep_mark
    held = set(rig.sequence(2).table.block_ids[: answer.num_held_blocks]) if is_running else set()
    assert (answer.num_forgotten_blocks, answer.num_held_blocks) == (2, 2 * is_running)
    assert not admin.is_swept(mark) and cached_blocks(rig) > held, "the worker still tells of it"
    sweep(rig)
    assert admin.is_swept(mark)
    assert cached_blocks(rig) == (set(rig.sequence(2).table.block_ids[:3]) if is_running else set())
    assert is_running or rig.schedule() is None, "nothing more is owed"


def test_a_stream_that_breaks_in_between_does_not_bring_it_back_either() -> None:
    rig = rig_of()
    rig.submit(1, numbers(9), max_tokens=3)
    rig.finish_all()
    admin = rig.scheduler.admin
    admin.reset_prefix_cache()
    mark = admin.sweep_mark
    rig.attach()
    assert len(rig.scheduler.replica(WORKER).manager.published()) == 0 and not admin.is_swept(mark)
    assert not any(rig.state.blocks.values())
    sweep(rig)
    rig.attach()
    assert len(rig.scheduler.replica(WORKER).manager.published()) == 0


def test_resets_without_a_pause_do_not_hold_up_the_first() -> None:
    rig = rig_of()
    rig.submit(1, numbers(9), max_tokens=3)
    rig.finish_all()
    admin = rig.scheduler.admin
    admin.reset_prefix_cache()
    mark = admin.sweep_mark
    for _ in range(4):
        sweep(rig, turns=1)
        admin.reset_prefix_cache()
    assert admin.is_swept(mark) and not admin.is_swept(admin.sweep_mark)


def test_a_worker_that_is_away_is_not_waited_for_and_forgets_when_it_is_back() -> None:
    rig = FleetRig(1)
    rig.submit(1, numbers(9), max_tokens=3)
    rig.finish_all()
    rig.lose("worker:0")
    admin = rig.scheduler.admin
    assert admin.reset_prefix_cache().num_forgotten_blocks == 2
    mark = admin.sweep_mark
    assert admin.is_swept(mark)
    rig.attach("worker:0")
    assert len(rig.scheduler.replica("worker:0").manager.published()) == 0
    rig.kill("worker:0")
    rig.attach("worker:0")
    assert admin.is_swept(mark), "another process remembers nothing"
