"""Every order of events in which something was once lost, as a transcript: who knew what when somebody died, and that no client can tell."""

from dataclasses import replace

import pytest
from fake_worker import reference_output
from recovery_rig import WORKER, Call, House

from services.scheduler.core.journal_call import Append, OlderEpoch
from services.scheduler.core.sequence_status import SequenceStatus
from services.scheduler.core.worker_loss import LossKind, WorkerLoss
from services.scheduler.store.memory import MemoryStore
from tessera.values.finish import Finish, FinishReason


def numbers(count: int, first: int = 10) -> list[int]:
    return list(range(first, first + count))


def two_running(house: House, turns: int = 4) -> tuple[Call, Call]:
    """Two requests; after three turns both decode. One record per turn is in the store, and every token at its client."""
    one = house.call(1, numbers(5), max_tokens=12)
    other = house.call(2, numbers(18, 30), gateway="g2", max_tokens=12)
    house.write()
    house.turn(turns)
    return one, other


def test_leader_killed_between_sending_batch_n_plus_1_and_journalling_n() -> None:
    house = House(max_batches_in_flight=1)
    calls = two_running(house)
    stored = house.store.stored().state.last
    house.execute()  # n
    house.hear()  # n + 1 leaves with it, and the record of n is made
    assert house.worker.queue and house.lead.journal.last_record == stored + 1
    house.take_over()
    house.run()
    house.assert_as_undisturbed(*calls)
    house.assert_nothing_recomputed(*calls)


def test_output_received_but_not_journalled_and_the_store_40_steps_behind() -> None:
    """Frames left without the store: the clients have more than it, and the worker more than the clients."""
    house = House()
    calls = (
        house.call(1, numbers(5), max_tokens=56),
        house.call(2, numbers(3, 30), gateway="g2", max_tokens=56),
    )
    house.write()
    house.turn(3)
    for _ in range(40):
        house.turn(writes=False)
    state = house.store.stored().state
    behind = [len(call.tokens) - len(state.requests[call.submission.request_id].output_token_ids) for call in calls]
    assert all(count >= 15 for count in behind), f"the wait before frames leave undurable is over: {behind}"
    house.execute()
    house.hear()  # received, neither journalled nor sent
    house.take_over()
    house.run()
    house.assert_as_undisturbed(*calls)
    house.assert_nothing_recomputed(*calls)


@pytest.mark.parametrize("executed", [0, 1, 2])
@pytest.mark.parametrize("heard", [0, 1])
def test_two_batches_in_flight(executed: int, heard: int) -> None:
    """Some were executed, the answers of some came; the others are discarded at the attach, and no position was in vain."""
    house = House()
    calls = two_running(house)
    assert len(house.worker.queue) == 2
    for _ in range(executed):
        house.execute()
    for _ in range(min(heard, executed)):
        house.hear()
    house.take_over()
    house.run()
    house.assert_as_undisturbed(*calls)
    house.assert_nothing_recomputed(*calls)


def preempting(house: House) -> tuple[Call, Call]:
    """The second request has just been preempted: the drop of its slot is in the batch at the worker, and nothing of it is written."""
    calls = house.call(1, numbers(7), max_tokens=8), house.call(2, numbers(7, 30), gateway="g2", max_tokens=8)
    house.write()
    second = house.lead.scheduler.request(calls[1].submission.request_id)
    assert second is not None
    for _ in range(20):
        if second.status is SequenceStatus.WAITING and second.attempt:
            assert [drop.request_id for drop in house.worker.queue[-1].drops] == [second.request_id]
            return calls
        house.write()
        house.read()
        house.execute()
        house.hear()
    raise AssertionError("nobody was preempted")


def test_a_preemption_journalled_and_not_executed() -> None:
    """The store says WAITING, the worker still has the slot: it goes on there."""
    house = House(num_blocks=4, max_batches_in_flight=1)
    calls = preempting(house)
    house.write()
    stored = house.store.stored().state.requests[calls[1].submission.request_id]
    assert stored.status is SequenceStatus.WAITING
    house.take_over()
    sequence = house.lead.scheduler.request(calls[1].submission.request_id)
    assert sequence is not None and (sequence.attempt, sequence.stranded_len) == (1, 0)
    house.run()
    house.assert_as_undisturbed(*calls)
    assert house.lead.scheduler.load().recomputed_positions == 0


def test_a_preemption_executed_and_not_journalled() -> None:
    """The store says RUNNING, the worker has dropped the slot: it waits, and what it was computed for is a hit while nobody wrote there.

    That it lost its slot the old leader had decided itself: nothing of it counts as computed again because a leader died."""
    house = House(num_blocks=4, max_batches_in_flight=1)
    calls = preempting(house)
    house.execute()
    stored = house.store.stored().state.requests[calls[1].submission.request_id]
    assert stored.status is SequenceStatus.RUNNING and len(house.worker.slots) == 1
    house.take_over()
    sequence = house.lead.scheduler.request(calls[1].submission.request_id)
    assert sequence is not None and sequence.status is SequenceStatus.WAITING and sequence.attempt == 1
    house.run()
    house.assert_as_undisturbed(*calls)
    assert house.lead.scheduler.load().recomputed_positions == 0


def swapping(house: House, back: bool) -> tuple[Call, Call]:
    """The second request has just been swapped out, or back in: the batch that does it is at the worker, and nothing of that is written."""
    calls = house.call(1, numbers(7), max_tokens=12), house.call(2, numbers(7, 30), gateway="g2", max_tokens=12)
    house.write()
    for _ in range(40):
        if any(batch.swap_ins if back else batch.swap_outs for batch in house.worker.queue):
            return calls
        house.write()
        house.read()
        house.execute()
        house.hear()
    raise AssertionError("nobody was swapped")


def swapping_house(**config: object) -> House:
    return House(num_blocks=6, num_host_blocks=5, preemption_mode="swap", **config)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("is_written", [False, True])
@pytest.mark.parametrize("is_executed", [False, True])
@pytest.mark.parametrize("back", [False, True])
def test_a_swap_in_flight_as_the_leader_dies(back: bool, is_executed: bool, is_written: bool, in_flight: int) -> None:
    """Whatever the store says, the KV is where the worker says, and the request goes on from there: nothing is computed again."""
    house = swapping_house(max_batches_in_flight=in_flight)
    calls = swapping(house, back)
    request_id = calls[1].submission.request_id
    if is_written:
        house.write()
    stored = house.store.stored().state.requests[request_id]
    assert (stored.status is SequenceStatus.SWAPPED) == (back != is_written)
    while is_executed and house.worker.queue:
        house.execute()
    is_out = any(slot.is_swapped for slot in house.worker.slots.values())
    assert is_out == (back != is_executed)
    house.take_over()
    sequence = house.lead.scheduler.request(request_id)
    assert sequence is not None and (sequence.attempt, sequence.worker) == (1, WORKER)
    house.run()
    house.assert_as_undisturbed(*calls)
    house.assert_nothing_recomputed(*calls)


@pytest.mark.parametrize("is_written", [False, True])
@pytest.mark.parametrize("is_executed", [False, True])
def test_a_copy_in_flight_as_the_leader_dies(is_executed: bool, is_written: bool) -> None:
    """A fork has just been admitted with its parent's blocks, and a copy of the last one. Where that was executed the fork goes on in its slot;
    else it never was there, and forks again or computes its prompt."""
    house = House(max_batches_in_flight=1, enable_prefix_caching=False)
    parent = house.call(1, numbers(7), max_tokens=8)
    child = house.call(2, numbers(7), gateway="g2", max_tokens=8, seed=8, fork_of=parent.submission.request_id)
    house.write()
    while not any(len(batch.copies) for batch in house.worker.queue):
        house.write()
        house.read()
        house.execute()
        house.hear()
    if is_written:
        house.write()
    if is_executed:
        house.execute()
    house.take_over()
    sequence = house.lead.scheduler.request(child.submission.request_id)
    assert sequence is not None and (sequence.attempt > 0) == (is_executed or is_written or sequence.slot is not None)
    assert not is_executed or (sequence.slot is not None and sequence.attempt == 1)
    house.run()
    house.assert_as_undisturbed(parent, child)
    assert house.lead.scheduler.load().recomputed_positions == 0
    if is_executed:
        assert house.worker.computed_positions == 7 + 8 - 1 + 8, "of the child the last position of its prompt, and its output"


@pytest.mark.parametrize("comes", ["in time", "after the grace", "never"])
def test_a_swapped_slot_of_a_request_that_the_store_lost(comes: str) -> None:
    """Its host blocks are kept for the gateway that may come with it."""
    house = swapping_house()
    older = house.store.save()
    calls = swapping(house, back=False)
    while house.worker.queue:
        house.execute()
    house.store = older
    house.read()
    house.take_over(late=("g2",))
    request_id = calls[1].submission.request_id
    replica = house.lead.scheduler.replica(WORKER)
    assert replica is not None and house.lead.scheduler.request(request_id) is None
    assert replica.manager.num_free_host_blocks < 4
    if comes != "in time":
        house.lead.scheduler.expire_orphans()
        house.lead.settle()
        assert replica.manager.num_free_host_blocks == 5
    if comes != "never":
        house.say_hello("g2")
    house.run()
    if comes == "never":
        del house.gateways["g2"]
        house.assert_as_undisturbed(calls[0])
    else:
        house.assert_as_undisturbed(*calls)
    if comes == "in time":
        house.assert_nothing_recomputed(*calls)


@pytest.mark.parametrize("more", [1, 2])
def test_a_client_that_has_more_than_the_swapped_slot_of_its_request(more: int) -> None:
    """The KV comes back from host memory, and the request enters its slot anew with it, behind what its client has."""
    house = swapping_house()
    calls = swapping(house, back=False)
    while house.worker.queue:
        house.execute()
    expected, _ = reference_output(calls[1].submission, house.worker.geometry.num_tokens)
    (slot,) = [slot for slot in house.worker.report().slots if slot.is_swapped]
    calls[1].tokens[:] = expected[: len(slot.token_ids) - slot.prompt_len + more]
    house.take_over()
    sequence = house.lead.scheduler.request(calls[1].submission.request_id)
    assert sequence is not None and sequence.status is SequenceStatus.SWAPPED and not sequence.has_entered
    house.run()
    house.assert_as_undisturbed(*calls)
    assert sequence.attempt == 2 and house.lead.scheduler.load().recomputed_positions == 0
    house.assert_nothing_recomputed(*calls)


def test_a_hash_journalled_and_its_block_then_evicted_and_overwritten() -> None:
    """The store still names the block when the leader dies. Whoever asks for these tokens next must compute them."""
    house = House(num_blocks=4)
    first = house.call(1, numbers(9), max_tokens=2)
    house.run()
    (entries,) = house.store.stored().state.blocks.values()
    assert len(entries) == 2
    intruder = house.call(2, numbers(14, 40), gateway="g2", max_tokens=2)
    house.now_us += 1_000_000  # the store has gone: frames leave all the same
    for _ in range(3):
        house.turn(writes=False)
    assert intruder.ends and house.store.stored().state.blocks
    house.take_over()
    again = house.call(3, numbers(9), max_tokens=2)
    house.run()
    house.assert_as_undisturbed(first, again)
    assert house.worker.computed_positions == 10 + 15 + 10, "every position, and once"


@pytest.mark.parametrize("dies", [False, True])
def test_a_script_applied_whose_reply_was_lost_and_that_is_tried_again(dies: bool) -> None:
    house = House()
    calls = two_running(house)
    for _ in range(3):
        house.execute()
        house.hear()
    house.write_unheard()
    house.now_us += 1_000_000
    assert isinstance(house.lead.journal.next_call(house.now_us), Append)
    house.lead.journal.on_reply(house.store.execute(house.lead.epoch, house.lead.journal._retry), house.now_us)  # type: ignore[arg-type]
    house.write()
    if dies:
        house.take_over()
    house.run()
    house.assert_as_undisturbed(*calls)
    house.assert_nothing_recomputed(*calls)


@pytest.mark.parametrize("dies", [False, True])
def test_acknowledged_records_lost_by_the_store(dies: bool) -> None:
    """It came back with an older file, that one of the two requests is not in yet."""
    house = House()
    one = house.call(1, numbers(5), max_tokens=12)
    house.write()
    house.turn(2)
    older = house.store.save()
    other = house.call(2, numbers(18, 30), gateway="g2", max_tokens=12)
    house.write()
    house.turn(4)
    house.store = older
    if dies:
        house.take_over()
    house.run()
    house.assert_as_undisturbed(one, other)
    house.assert_nothing_recomputed(one, other)


def test_an_empty_store_and_a_standby_at_once() -> None:
    """The old leader writes everything anew as the standby takes the term: it is told, and its worker no longer listens to it."""
    house = House()
    calls = two_running(house)
    old = house.lead
    house.store = MemoryStore()
    house.execute()
    house.hear()
    house.read()
    call = old.journal.next_call(house.now_us)
    assert call is not None
    house.take_over()
    assert isinstance(house.store.execute(old.epoch, call), OlderEpoch)
    house.run()
    house.assert_as_undisturbed(*calls)
    house.assert_nothing_recomputed(*calls)


def test_old_leader_stopped_and_continued() -> None:
    """It still has an output, tokens that it may show, and a record that it may write, and nobody takes any of them."""
    house = House()
    calls = two_running(house)
    old = house.lead
    house.execute()
    output = house.outputs[WORKER][0]
    house.take_over()
    house.turn(2)
    old.hear(WORKER, output)
    assert old.refused_sends == 1
    old.streams.release(1 << 60, is_durable=True)
    house.read(old)
    call = old.journal.next_call(house.now_us)
    assert call is not None
    refusal = house.store.execute(old.epoch, call)
    old.journal.on_reply(refusal, house.now_us)
    assert old.journal.superseded == house.lead.epoch
    house.run()
    house.assert_as_undisturbed(*calls)
    house.assert_nothing_recomputed(*calls)


@pytest.mark.parametrize("resume_is_first", [False, True])
@pytest.mark.parametrize("subscriber", [0, 1])
def test_resume_on_one_gateway_racing_the_abort_of_another(resume_is_first: bool, subscriber: int) -> None:
    """Whichever comes first decides: a resume makes the abort void, also one of the same number; an abort is what the resume is told."""
    house = House()
    left = house.call(1, numbers(5), max_tokens=12, name="mine")
    other = house.call(2, numbers(18, 30), gateway="g2", max_tokens=12)
    house.write()
    house.turn(4)
    if resume_is_first:
        resumed = house.resume(left, 3, "g2", subscriber)
        house.abort(left)
    else:
        house.abort(left)
        resumed = house.resume(left, 3, "g2", 1)
    house.run()
    if resume_is_first:
        assert left.is_taken_over and not left.ends
        house.assert_as_undisturbed(resumed, other)
        house.assert_nothing_recomputed(resumed, other)
    else:
        assert resumed.ends == [Finish(FinishReason.ABORTED, len(resumed.tokens))]
        house.assert_as_undisturbed(other)


@pytest.mark.parametrize("numbers_", [(1, 2), (2, 1), (1, 1)])
@pytest.mark.parametrize("dies", [False, True])
def test_two_gateways_resuming_one_id(numbers_: tuple[int, int], dies: bool) -> None:
    """The higher number has it, in whichever order they come, and the later one of two equals. The other is told."""
    house = House()
    first = house.call(1, numbers(5), max_tokens=12, name="mine")
    house.write()
    house.turn(4)
    one = house.resume(first, 2, "g2", numbers_[0])
    house.turn()
    other = house.resume(first, 3, "g3", numbers_[1])
    house.turn()
    if dies:
        house.take_over()
    house.run()
    winner, loser = (one, other) if numbers_[0] > numbers_[1] else (other, one)
    assert first.is_taken_over and loser.is_taken_over and not winner.is_taken_over
    assert not first.ends and not loser.ends
    house.assert_as_undisturbed(winner)
    house.assert_nothing_recomputed(winner)


@pytest.mark.parametrize("dies", ["before the stop is journalled", "after", "not at all"])
def test_stop_string_found_after_later_tokens_were_journalled(dies: str) -> None:
    """A gateway finds it in the text of token 4 when 9 are in the store: the end is there, whoever leads by then."""
    house = House()
    call, other = two_running(house, turns=9)
    assert len(call.tokens) >= 8
    stored = house.store.stored().state.requests[call.submission.request_id]
    assert len(stored.output_token_ids) >= 8
    expected = call.tokens[:4]
    house.stop_found(call, 4)
    if dies == "after":
        house.write()
    if dies != "not at all":
        del call.tokens[4:]  # the text ends there: no more of it is given out
        house.take_over()
        house.stop_found(call, 4)  # a gateway says it again to the next leader
    house.write()
    house.lead.streams.release(1 << 60, is_durable=True)
    (output,) = house.lead.streams.take_frame(f"g1 with {house.lead.epoch.number}")
    assert output.finish == Finish(FinishReason.STOP_STRING, 4, stop_string="stop")
    assert (output.token_offset, output.token_ids) == (4, ())
    del house.gateways["g1"]
    sequence = house.lead.scheduler.request(call.submission.request_id)
    assert sequence is not None and list(sequence.output_token_ids()) == expected
    house.run()
    house.assert_as_undisturbed(other)
    assert house.lead.scheduler.load().recomputed_positions == 0


@pytest.mark.parametrize("dies", [False, True])
def test_resume_while_text_is_held_back(dies: bool) -> None:
    """The gateway has tokens whose text could be the beginning of a stop string: its client, who goes, has fewer. It is sent them again."""
    house = House()
    first = house.call(1, numbers(5), max_tokens=12, name="mine")
    house.write()
    house.turn(8)
    shown = first.received[:-3]
    if dies:
        house.take_over()
        house.write()
    resumed = house.resume(first, 2, "g2", 1, received=shown)
    house.write()
    house.read()
    assert resumed.tokens[: len(first.tokens)] == first.tokens and first.is_taken_over
    house.run()
    house.assert_as_undisturbed(resumed)
    house.assert_nothing_recomputed(resumed)


@pytest.mark.parametrize("executed", [0, 1])
def test_a_batch_refused_with_another_in_flight(executed: int) -> None:
    """The worker takes neither, until it is attached again: both are made anew from what it holds."""
    house = House()
    calls = two_running(house)
    assert len(house.worker.queue) == 2
    refused = house.worker.queue[executed].step_id
    if executed:
        house.execute()  # the first is answered, too late; the second is refused
    house.outputs[WORKER].clear()
    house.lead.lose(WORKER, WorkerLoss(LossKind.REFUSED, refused, "told to refuse"))
    house.write()
    house.lead.attach(WORKER)
    house.run()
    house.assert_as_undisturbed(*calls)
    house.assert_nothing_recomputed(*calls)


@pytest.mark.parametrize("writes", [True, False])
def test_worker_and_scheduler_die_together(writes: bool) -> None:
    """What only the worker had is computed again; what clients have is kept, also where the store never heard of it."""
    house = House()
    calls = two_running(house)
    house.now_us += 1_000_000
    for _ in range(4):
        house.turn(writes=writes)
    house.execute()
    sent = [call.received for call in calls]
    house.worker.restart()
    house.take_over()
    for call, tokens in zip(calls, sent, strict=True):
        sequence = house.lead.scheduler.request(call.submission.request_id)
        assert sequence is not None and sequence.output_token_ids()[: len(tokens)] == tokens
    house.run()
    house.assert_as_undisturbed(*calls)
    assert house.lead.scheduler.load().recomputed_positions == 0, "nobody held it any more"


def family(house: House, prompt: list[int]) -> list[Call]:
    """Three outputs of one prompt, at two gateways: the first request is the parent of the others."""
    parent = house.call(1, prompt, max_tokens=8)
    children = [
        house.call(number, prompt, gateway="g2", max_tokens=8, seed=number, fork_of=parent.submission.request_id)
        for number in (2, 3)
    ]
    house.write()
    return [parent, *children]


MOMENTS = {
    "before the prompt is computed": "",
    "with half of it computed": "eh",
    "with all of it computed, which nobody heard": "ehe",
    "with the fork at the worker": "eheh",
    "with the fork executed, which nobody heard": "ehehe",
    "after the fork": "eheheh",
}
"""What each of them is reached by: e, the worker executes a batch; h, the leader hears of it."""


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("late", [(), ("g2",)])
def test_n_above_1_killed_between_prefill_and_fork(moment: str, caching: bool, writes: bool, late: tuple[str, ...]) -> None:
    """The children fork under the next leader, or go on in their slots: the prompt is computed once, but for its last position, once by
    each. B=4: the blocks of 18 positions are shared, the fifth is copied."""
    house = House(max_batches_in_flight=1, enable_prefix_caching=caching)
    prompt = numbers(19)
    calls = family(house, prompt)
    for letter in MOMENTS[moment]:
        if letter == "e":
            house.execute()
        else:
            house.hear()
        if writes:
            house.write()
            house.read()
    house.take_over(late=late)
    for name in late:
        house.say_hello(name)
    house.run()
    house.assert_as_undisturbed(*calls)
    assert house.lead.scheduler.load().recomputed_positions == 0
    assert house.worker.computed_positions == len(prompt) + 2 + 3 * 7


@pytest.mark.parametrize("moment", MOMENTS)
def test_n_above_1_and_the_worker_dies_with_its_leader(moment: str) -> None:
    house = House(max_batches_in_flight=1)
    calls = family(house, numbers(19))
    for letter in MOMENTS[moment]:
        if letter == "e":
            house.execute()
        else:
            house.hear()
    house.worker.restart()
    house.take_over()
    house.run()
    house.assert_as_undisturbed(*calls)


@pytest.mark.parametrize("was_caching", [False, True])
def test_forks_outlive_a_leader_that_caches_otherwise(was_caching: bool) -> None:
    """Shared blocks go on being shared where the next leader is started with the other setting."""
    house = House(max_batches_in_flight=1, enable_prefix_caching=was_caching)
    calls = family(house, numbers(19))
    house.turn(4)
    house.config = replace(house.config, enable_prefix_caching=not was_caching)
    house.take_over()
    house.run()
    house.assert_as_undisturbed(*calls)
    assert house.worker.computed_positions == 19 + 2 + 3 * 7
