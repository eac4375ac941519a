"""Which prefix-cache entries a report vouches for."""

from dataclasses import replace

import numpy as np
from fake_worker import FakeWorker
from scheduler_rig import Rig

from kv_manager.published_block import PublishedBlock
from services.scheduler.core.held_blocks import held_blocks, kv_namespace
from tessera.values.report import WorkerReport


def report_of(drop: bool = False) -> tuple[WorkerReport, list[int]]:
    """A worker that computed 11 positions (step 1) and one more (step 2); its table."""
    rig = Rig(worker=FakeWorker(8, 4))
    rig.submit(1, list(range(10, 21)), max_tokens=5)
    rig.step()
    table = list(rig.sequence(1).table.block_ids)
    rig.step()
    if drop:
        rig.scheduler.abort((1).to_bytes(16, "big"), rig.now_us)
        rig.step()
    return rig.worker.report(), table


def written(report: WorkerReport, steps: dict[int, int]) -> WorkerReport:
    """The report, but for the steps that last wrote these blocks."""
    column = report.last_write_step.copy()
    for block_id, step in steps.items():
        column[block_id] = step
    return replace(report, last_write_step=column)


def test_full_computed_blocks_of_a_live_slot_hold_as_of_their_last_write() -> None:
    report, table = report_of()
    entries = held_blocks(report, ())
    assert [(entry.block_id, entry.published_step) for entry in entries] == [(table[0], 1), (table[1], 1), (table[2], 2)]
    assert entries[0].parent is None and entries[1].parent == entries[0].digest
    assert entries[1].token_ids == (14, 15, 16, 17)


def test_a_recorded_entry_holds_until_its_block_is_written_again() -> None:
    report, _ = report_of()
    recorded = PublishedBlock(7, 99, None, (1, 2, 3, 4), published_step=5)
    assert recorded in held_blocks(written(report, {7: 5}), [recorded])
    assert recorded not in held_blocks(written(report, {7: 6}), [recorded])


def test_a_recorded_entry_keeps_its_step() -> None:
    report, table = report_of()
    first = held_blocks(report, ())[0]
    recorded = replace(first, published_step=2)
    assert [entry for entry in held_blocks(report, [recorded]) if entry.block_id == table[0]] == [recorded]


def test_blocks_of_a_dropped_slot_hold_up_to_the_first_that_was_handed_on() -> None:
    report, table = report_of(drop=True)
    (dropped,) = report.dropped
    assert not report.slots and dropped.drop_step == 3
    assert [entry.block_id for entry in held_blocks(report, ())] == table
    handed_on = written(report, {table[1]: dropped.drop_step})
    assert [entry.block_id for entry in held_blocks(handed_on, ())] == table[:1]


def test_a_block_is_named_once() -> None:
    report, table = report_of()
    doubled = replace(report, slots=report.slots * 2)
    assert [entry.block_id for entry in held_blocks(doubled, held_blocks(report, ()))] == table


def test_the_namespace_names_weights_and_format() -> None:
    report, _ = report_of()
    other = replace(report.description, geometry=replace(report.description.geometry, kv_format="other"))
    assert kv_namespace(report.description) != kv_namespace(other)
    assert not {entry.digest for entry in held_blocks(report, ())} & {
        entry.digest for entry in held_blocks(replace(report, description=other), ())
    }


def test_a_partly_computed_block_does_not_count() -> None:
    report, table = report_of()
    (slot,) = report.slots
    behind = replace(slot, computed_len=11, token_ids=np.append(slot.token_ids, np.int32(1)))
    assert [entry.block_id for entry in held_blocks(replace(report, slots=(behind,)), ())] == table[:2]
