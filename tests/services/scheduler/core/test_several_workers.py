"""Takeovers with several workers, as transcripts: who holds a request's KV, who has moved on from it, and who comes too late."""

import pytest
from recovery_rig import OTHER_WORKER, WORKER, Call, House

from services.scheduler.core.sequence import Sequence
from services.scheduler.core.sequence_status import SequenceStatus
from services.scheduler.core.worker_loss import LossKind, WorkerLoss
from tessera.values.batch import SlotDrop

BROKEN = WorkerLoss(LossKind.BROKEN, text="told to break")


def numbers(count: int, first: int = 10) -> list[int]:
    return list(range(first, first + count))


def sequence_of(house: House, call: Call) -> Sequence:
    sequence = house.lead.scheduler.request(call.submission.request_id)
    assert sequence is not None
    return sequence


def running(house: House, turns: int = 4, **sampling: object) -> Call:
    """One request that runs on the first worker."""
    call = house.call(1, numbers(9), **{"max_tokens": 14, **sampling})
    house.write()
    house.turn(turns)
    assert sequence_of(house, call).worker == WORKER
    return call


def lose(house: House, name: str) -> None:
    """The leader loses sight of a worker, which has still computed what it was sent, and holds it."""
    while house.workers[name].queue:
        house.execute(name)
    house.outputs[name].clear()
    house.lead.lose(name, BROKEN)


def moved_on(house: House) -> Call:
    """Attempt 1 is on the first worker, which was thought lost; attempt 2 runs on the other one, and is journalled."""
    call = running(house)
    lose(house, WORKER)
    house.turn(2)
    sequence = sequence_of(house, call)
    assert (sequence.worker, sequence.attempt) == (OTHER_WORKER, 2)
    return call


def test_a_slot_that_the_leader_had_moved_on_from_is_not_gone_back_to() -> None:
    """Its worker is the only one that the next leader reaches. It waits, and enters at a third attempt."""
    house = House(num_workers=2)
    call = moved_on(house)
    assert [slot.attempt for slot in house.worker.report().slots] == [1]
    house.take_over(late_workers=(OTHER_WORKER,))
    sequence = sequence_of(house, call)
    assert (sequence.worker, sequence.attempt) == (WORKER, 3), "admitted at once"
    house.lead.attach(OTHER_WORKER)
    house.run()
    house.assert_as_undisturbed(call)
    assert house.lead.scheduler.load().recomputed_positions == 0, "the last leader had decided that itself"


def test_of_two_live_slots_the_later_attempt_goes_on() -> None:
    house = House(num_workers=2)
    call = moved_on(house)
    computed = house.workers[OTHER_WORKER].computed_positions
    house.take_over()
    assert (sequence_of(house, call).worker, sequence_of(house, call).attempt) == (OTHER_WORKER, 2)
    house.run()
    house.assert_as_undisturbed(call)
    assert not house.worker.slots and house.lead.scheduler.load().recomputed_positions == 0
    done = house.workers[OTHER_WORKER].computed_positions
    assert computed < done == 9 + 13


def test_an_attempt_that_another_worker_has_seen_does_not_come_again() -> None:
    """Attempt 2 was entered, preempted and never journalled; attempt 1 is live, and adopted. The next entry is the third."""
    house = House(num_workers=2)
    call = running(house)
    house.write()
    older = house.store.save()
    lose(house, WORKER)
    house.execute(OTHER_WORKER)
    other = house.workers[OTHER_WORKER]
    (slot,) = other.slots
    held = other.slots[slot]
    other.last_step += 1
    other._drop(_drop_of(held.request_id, slot, held.attempt), other.last_step)
    house.store = older
    house.take_over()
    sequence = sequence_of(house, call)
    assert (sequence.worker, sequence.attempt, sequence.attempt_floor) == (WORKER, 1, 2)
    lose(house, WORKER)
    house.run()  # on the other worker
    assert sequence.attempt == 3
    house.assert_as_undisturbed(call)


def test_a_worker_that_comes_late_with_a_slot_of_what_runs_elsewhere() -> None:
    """The slot is dropped, its full blocks can be hit, and the attempt that it had is not used again."""
    house = House(num_workers=2)
    call = running(house)
    house.take_over(late_workers=(WORKER,))
    sequence = sequence_of(house, call)
    assert (sequence.worker, sequence.attempt) == (OTHER_WORKER, 2)
    house.turn(2)
    house.lead.attach(WORKER)
    assert sequence.worker == OTHER_WORKER
    lose(house, OTHER_WORKER)
    house.run()
    assert not house.worker.slots
    house.assert_as_undisturbed(call)


def test_a_worker_that_comes_late_with_a_later_attempt_than_anybody_knew() -> None:
    """The store lost that the request had moved there. It goes on where it is; the attempt it had there is not used again there."""
    house = House(num_workers=2)
    call = running(house)
    older = house.store.save()
    lose(house, WORKER)
    house.turn(2)
    house.store = older
    house.take_over(late_workers=(OTHER_WORKER,))
    sequence = sequence_of(house, call)
    assert (sequence.worker, sequence.attempt) == (WORKER, 1)
    house.lead.attach(OTHER_WORKER)
    assert (sequence.worker, sequence.attempt) == (WORKER, 1)
    lose(house, WORKER)
    house.run()
    assert sequence.attempt == 3
    house.assert_as_undisturbed(call)


def test_a_worker_that_comes_late_with_the_slot_of_what_waits() -> None:
    """Nobody else has taken it meanwhile: it goes on there, and nothing is computed again."""
    house = House(num_workers=2, max_num_seqs=1)
    call = running(house)
    other = house.call(2, numbers(5, 40), gateway="g2", max_tokens=14)
    house.turn(2)
    house.take_over(late_workers=(WORKER,))
    sequence = sequence_of(house, call)
    assert sequence.status is SequenceStatus.WAITING
    house.lead.attach(WORKER)
    assert (sequence.worker, sequence.attempt) == (WORKER, 1)
    house.run()
    house.assert_as_undisturbed(call, other)
    house.assert_nothing_recomputed(call, other)


# -- gateways that come late


def test_a_hello_that_comes_after_the_join_and_has_more_than_was_joined() -> None:
    """The store was away, and the worker that had computed it is gone: only that gateway had seen it. What it has is kept."""
    house = House(num_workers=2)
    call = running(house)
    for _ in range(7):
        house.turn(writes=False)
    house.now_us += 1_000_000
    house.turn(writes=False)
    received = call.received
    house.worker.restart()
    house.take_over(late=("g1",), late_workers=(WORKER,))
    house.turn()
    sequence = sequence_of(house, call)
    assert sequence.output_len < len(received) and sequence.worker == OTHER_WORKER
    before = sequence.attempt
    house.say_hello("g1")
    assert sequence.output_token_ids() == received
    house.run()
    assert sequence.attempt == before + 1
    house.assert_as_undisturbed(call)
    assert house.lead.scheduler.load().recomputed_positions == 0, "no worker held anything"


def orphaned(house: House) -> Call:
    """The next leader knows nothing of a request but its slot: the store is empty, and its gateway is late."""
    call = running(house)
    house.store = type(house.store)()
    house.take_over(late=("g1",))
    assert house.lead.scheduler.request(call.submission.request_id) is None
    return call


def test_an_orphan_whose_gateway_comes_within_the_grace() -> None:
    house = House()
    call = orphaned(house)
    house.say_hello("g1")
    house.run()
    house.assert_as_undisturbed(call)
    house.assert_nothing_recomputed(call)


def test_an_orphan_whose_gateway_comes_after_the_grace() -> None:
    """Its slot is gone, its attempt is not used again, and what its worker had held is counted: the last block was not full."""
    house = House()
    call = orphaned(house)
    held = house.worker.report().slots[0].computed_len
    house.lead.scheduler.expire_orphans()
    house.say_hello("g1")
    house.run()
    house.assert_as_undisturbed(call)
    assert sequence_of(house, call).attempt == 2
    recomputed = house.lead.scheduler.load().recomputed_positions
    assert recomputed == held % 4 == house.worker.computed_positions - (9 + 13)


@pytest.mark.parametrize("hears_first", [True, False])
def test_an_orphan_whose_gateway_has_more_than_its_slot(hears_first: bool) -> None:
    """It enters its slot again behind what the gateway has, its KV kept."""
    house = House()
    call = running(house)
    received = call.received
    snapshot = house.worker.report()
    house.store = type(house.store)()
    while house.worker.queue:
        house.execute()
    assert len(house.worker.report().slots[0].token_ids) > len(snapshot.slots[0].token_ids)
    house.take_over(late=() if hears_first else ("g1",))
    if not hears_first:
        house.say_hello("g1")
    assert sequence_of(house, call).output_token_ids()[: len(received)] == received
    house.run()
    house.assert_as_undisturbed(call)
    house.assert_nothing_recomputed(call)


# -- what is counted


def test_what_a_late_gateway_makes_start_again_is_counted() -> None:
    """Its client has seen other tokens from the fourth on: what the slot held of the first three is computed again, but for full blocks."""
    house = House()
    call = running(house, turns=6)
    held = house.worker.report().slots[0].computed_len
    house.take_over(late=("g1",))
    contradicted = [*call.tokens[:3], call.tokens[3] ^ 1]
    call.tokens[:] = contradicted
    house.say_hello("g1")
    agreeing = 9 + 3
    assert held > agreeing
    house.write()
    load = house.lead.scheduler.load()
    assert (load.recomputed_positions, load.num_contradictions) == (agreeing % 4, 1)
    house.run()
    assert call.tokens[:4] == contradicted and len(call.tokens) == 14


def test_what_a_contradicted_slot_held_is_counted_but_for_full_blocks() -> None:
    """The other worker is busy: the request waits, is admitted where its KV had been, and finds two full blocks of it."""
    house = House(num_workers=2, max_num_seqs=1)
    call = running(house, turns=6)
    other = house.call(2, numbers(5, 40), gateway="g2", max_tokens=14)
    house.turn()
    call.tokens[2:] = [call.tokens[2] ^ 1]
    house.take_over()
    sequence = sequence_of(house, call)
    assert (sequence.worker, sequence.attempt) == (WORKER, 2)
    load, agreeing = house.lead.scheduler.load(), 9 + 2
    assert load.recomputed_positions == agreeing - 8
    assert load.num_contradictions == 2, "the store's and the slot's"
    house.run()
    assert len(call.ends) == len(other.ends) == 1


def test_what_this_leader_decides_itself_is_not_counted() -> None:
    """Adopted, then preempted, then lost: no takeover was to blame for that."""
    house = House(num_blocks=5)
    calls = house.call(1, numbers(7), max_tokens=12), house.call(2, numbers(3, 30), gateway="g2", max_tokens=12)
    house.write()
    house.turn(3)
    house.take_over()
    house.run()
    assert house.lead.scheduler.load().num_preemptions > 0
    assert house.lead.scheduler.load().recomputed_positions == 0
    house.assert_as_undisturbed(*calls)


def _drop_of(request_id: bytes, slot: int, attempt: int) -> SlotDrop:
    return SlotDrop(slot, request_id, attempt)
