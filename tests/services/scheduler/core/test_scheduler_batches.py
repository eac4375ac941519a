"""What one step computes: decodes first, then chunks of prefills, oldest first, with two batches in flight."""

from dataclasses import replace

import numpy as np
import pytest
from fake_worker import FakeWorker
from scheduler_rig import WORKER, Rig

from services.scheduler.core.errors import BadOutput
from services.scheduler.core.sequence_status import SequenceType
from services.scheduler.core.worker_loss import LEFT
from tessera.values.config import Config
from tessera.values.finish import FinishReason


def numbers(count: int, first: int = 10) -> list[int]:
    return list(range(first, first + count))


def rig_of(budget: int, num_blocks: int = 40, **config: object) -> Rig:
    return Rig(Config(**{"max_num_seqs": 4, "max_num_batched_tokens": budget, **config}), FakeWorker(num_blocks, 4))


def test_decodes_come_first_and_prefills_share_what_is_left() -> None:
    rig = rig_of(8)
    rig.submit(1, numbers(3))
    rig.step()
    rig.submit(2, numbers(5, 30))
    rig.submit(3, numbers(9, 40))
    batch = rig.schedule()
    assert batch is not None
    assert batch.num_decodes == 1
    assert batch.num_scheduled_tokens.tolist() == [1, 5, 2]
    assert batch.context_lens.tolist() == [4, 5, 2]
    assert [entry.request_id[-1] for entry in batch.entries] == [2, 3]
    assert batch.total_tokens == 8
    assert rig.sequence(1).type is SequenceType.DECODE and rig.sequence(3).type is SequenceType.PREFILL
    rig.finish_all()
    for number in (1, 2, 3):
        rig.assert_as_alone(number)


def test_older_prefills_go_before_younger_ones() -> None:
    rig = rig_of(4)
    rig.submit(1, numbers(6))
    rig.submit(2, numbers(6, 30))
    first = rig.schedule()
    second = rig.schedule()
    assert first is not None and first.num_scheduled_tokens.tolist() == [4]
    assert second is not None and second.num_scheduled_tokens.tolist() == [2, 2]
    assert second.slots.tolist() == [0, 1]


def test_a_long_prompt_leaves_room_for_others() -> None:
    rig = rig_of(20, long_prefill_token_threshold=4)
    rig.submit(1, numbers(9))
    rig.submit(2, numbers(3, 30))
    batch = rig.schedule()
    assert batch is not None and batch.num_scheduled_tokens.tolist() == [4, 3]
    rig.finish_all()


def test_no_more_than_the_limit_run() -> None:
    rig = rig_of(20, max_num_seqs=2)
    for number in (1, 2, 3):
        rig.submit(number, numbers(3, 10 * number), max_tokens=3)
    batch = rig.schedule()
    assert batch is not None and batch.num_rows == 2
    rig.finish_all()
    entered = [entry.request_id[-1] for issued in rig.batches for entry in issued.entries]
    assert entered == [1, 2, 3]


def test_the_table_covers_every_step_and_grows_at_boundaries_only() -> None:
    """Case 37, B=4: a decode step writes position T-1; a block is needed iff (T-1) % 4 == 0."""
    rig = rig_of(20, num_blocks=8)
    rig.submit(1, numbers(4), max_tokens=10)
    lengths = []
    while rig.step():
        batch = rig.batches[-1]
        if batch.num_rows:
            lengths.append((int(batch.context_lens[0]), int(batch.new_block_counts[0]), len(rig.worker.slots[0].block_table)))
    # The first block of the decode comes with the entry: the first decode position is reserved.
    assert [(length, new) for length, new, _ in lengths] == [
        (4, 0),
        *[(n, 1 if n == 9 or n == 13 else 0) for n in range(5, 14)],
    ]
    assert all(table >= -(-length // 4) for length, _, table in lengths)


def test_two_batches_in_flight_hide_a_step() -> None:
    rig = rig_of(20)
    rig.submit(1, numbers(5), max_tokens=6)
    first, second = rig.schedule(), rig.schedule()
    assert first is not None and second is not None and rig.schedule() is None
    assert (second.num_decodes, second.context_lens.tolist(), second.entries) == (1, [6], ())
    assert second.step_id == first.step_id + 1
    rig.finish_all(in_flight=2)
    rig.assert_as_alone(1)


def test_no_position_is_computed_behind_max_tokens() -> None:
    """Placeholders count: the row that samples the last token is the last row."""
    rig = rig_of(20)
    rig.submit(1, numbers(5), max_tokens=4)
    rig.finish_all(in_flight=2)
    assert rig.worker.computed_positions == 5 + 3
    assert len(rig.output(1)) == 4


def test_a_late_stop_wastes_at_most_one_position() -> None:
    rig = rig_of(20)
    alone = Rig(worker=FakeWorker(40, 4))
    alone.submit(1, numbers(5), max_tokens=9)
    alone.finish_all()
    stop_id = alone.output(1)[3]
    rig.submit(1, numbers(5), max_tokens=9, stop_token_ids=(stop_id,))
    rig.finish_all(in_flight=2)
    length = alone.output(1).index(stop_id) + 1
    assert rig.output(1) == alone.output(1)[:length]
    assert rig.reason(1) is FinishReason.STOP_TOKEN
    assert rig.worker.computed_positions <= 5 + length


def test_with_nothing_to_do_there_is_no_batch() -> None:
    """Case 92."""
    rig = rig_of(20)
    assert rig.schedule() is None
    rig.submit(1, numbers(3), max_tokens=2)
    rig.finish_all()
    assert rig.schedule() is None


def test_a_batch_may_carry_nothing_but_drops() -> None:
    rig = rig_of(20)
    rig.submit(1, numbers(3))
    rig.step()
    rig.scheduler.abort((1).to_bytes(16, "big"), rig.now_us)
    batch = rig.schedule()
    assert batch is not None and batch.num_rows == 0 and len(batch.drops) == 1
    rig.post(rig.execute())
    assert not rig.worker.slots and rig.schedule() is None


def test_a_slot_is_handed_on_in_the_batch_that_drops_it() -> None:
    rig = rig_of(20, max_num_seqs=1)
    rig.submit(1, numbers(3), max_tokens=1)
    rig.submit(2, numbers(3, 30), max_tokens=1)
    rig.step()
    batch = rig.schedule()
    assert batch is not None
    assert [drop.slot for drop in batch.drops] == [entry.slot for entry in batch.entries] == [0]


def test_an_output_for_another_batch_changes_nothing() -> None:
    """Invariant 5: old epoch, attach or step id is a no-op."""
    rig = rig_of(20)
    rig.submit(1, numbers(5))
    rig.schedule()
    output = rig.execute()
    stale = (
        replace(output, epoch=replace(output.epoch, number=0)),
        replace(output, nonce=0),
        replace(output, step_id=output.step_id + 1),
    )
    for other in stale:
        rig.post(other)
        assert rig.output(1) == []
    rig.post(output)
    assert len(rig.output(1)) == 1
    rig.post(output)
    assert len(rig.output(1)) == 1
    rig.scheduler.postprocess("worker:2", output, rig.now_us)


@pytest.mark.parametrize(
    "damage",
    [
        {"token_counts": np.array([1, 1], np.int32)},
        {"token_counts": np.array([0], np.int32), "token_ids": np.array([], np.int32)},
        {"token_ids": np.array([], np.int32)},
    ],
)
def test_columns_that_do_not_fit_change_nothing(damage: dict[str, np.ndarray]) -> None:
    rig = rig_of(20)
    rig.submit(1, numbers(5))
    rig.schedule()
    output = rig.execute()
    with pytest.raises(BadOutput, match=f"step {output.step_id}"):
        rig.scheduler.postprocess(WORKER, replace(output, **damage), rig.now_us)
    rig.check()
    rig.attach()
    rig.finish_all()
    assert len(rig.output(1)) == 64 - 5


def test_timings_are_durations_on_the_callers_clock() -> None:
    rig = rig_of(20, max_num_seqs=1)
    rig.submit(1, numbers(3), max_tokens=2)
    rig.submit(2, numbers(3, 30), max_tokens=2)
    rig.finish_all()
    first, second = rig.sequence(1).timings, rig.sequence(2).timings
    assert (first.queue_us, first.ttft_us, first.total_us) == (0, 1000, 2000)
    assert (second.queue_us, second.ttft_us, second.total_us) == (2000, 3000, 4000)


def test_finished_requests_are_forgotten_after_their_retention() -> None:
    rig = rig_of(20, result_retention_ms=5)
    rig.submit(1, numbers(3), max_tokens=1)
    rig.finish_all()
    finished_us = rig.sequence(1).finished_us
    rig.scheduler.forget_finished(finished_us + 4999)
    assert rig.sequence(1).finish is not None
    rig.scheduler.forget_finished(finished_us + 5000)
    rig.check()
    assert rig.scheduler.request((1).to_bytes(16, "big")) is None and not rig.state.requests


def test_steady_decodes_are_told_as_columns() -> None:
    rig = rig_of(20)
    rig.submit(1, numbers(3), max_tokens=6)
    rig.submit(2, numbers(4, 30), max_tokens=6)
    rig.step()
    rig.schedule()
    rig.scheduler.take_changes()
    rig.scheduler.postprocess(WORKER, rig.execute(), rig.now_us)
    changes = rig.scheduler.take_changes()
    assert changes is not None and changes.requests == () and changes.decoded is not None
    assert changes.decoded.token_offsets.tolist() == [1, 1]
    assert changes.decoded.token_ids.tolist() == [rig.output(1)[1], rig.output(2)[1]]
    assert rig.scheduler.take_changes() is None


def test_two_tokens_since_the_last_change_are_told_as_a_delta() -> None:
    rig = rig_of(20)
    rig.take_every = 1000
    rig.submit(1, numbers(3), max_tokens=6)
    rig.step()
    rig.take()
    rig.step()
    rig.step()
    rig.take()
    assert list(rig.state.requests[(1).to_bytes(16, "big")].output_token_ids) == rig.output(1)


def test_a_table_that_was_given_up_and_filled_again_is_told_anew() -> None:
    rig = rig_of(20)
    rig.submit(1, numbers(9), max_tokens=6)
    rig.submit(2, numbers(9, 40), max_tokens=6)
    rig.step()
    before = rig.sequence(2).table.block_ids
    rig.take_every = 1000
    rig.scheduler.abort((1).to_bytes(16, "big"), rig.now_us)
    rig.scheduler.lose_worker(WORKER, LEFT, rig.now_us)
    rig.worker.restart()
    rig.attach()
    rig.step()
    assert rig.sequence(2).table.block_ids != before
    rig.take()
