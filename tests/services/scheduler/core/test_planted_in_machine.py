"""The random lives of the scheduler find what they are for: each of these defects, planted, ends one of them within seconds."""

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import initialize, run_state_machine_as_test
from test_scheduler_machine import SchedulerMachine

from kv_manager.block_manager import BlockManager
from kv_manager.block_table import BlockTable
from services.scheduler.core.lifecycle import Lifecycle
from services.scheduler.core.replica import Replica
from services.scheduler.core.sequence import Sequence
from tessera.values.batch import ScheduledBatch
from tessera.values.config import Config

SETTINGS = settings(
    max_examples=40, stateful_step_count=40, deadline=None, derandomize=True, database=None, phases=(Phase.generate,)
)


def leak_a_block(patch: pytest.MonkeyPatch) -> None:
    """Whoever ends keeps his last block."""
    free = BlockManager.free

    def forgetful(manager: BlockManager, table: BlockTable) -> None:
        table.block_ids = table.block_ids[:-1]
        free(manager, table)

    patch.setattr(BlockManager, "free", forgetful)


def leak_a_slot(patch: pytest.MonkeyPatch) -> None:
    """A swapped sequence that ends leaves its slot at the worker."""
    end = Lifecycle.end

    def forgetful(lifecycle: Lifecycle, sequence: Sequence, *given: Any) -> None:
        replica, is_swapped = lifecycle.fleet.get(sequence.worker), bool(sequence.table.host_block_ids)
        end(lifecycle, sequence, *given)
        if is_swapped and replica is not None:
            replica.drops.pop()

    patch.setattr(Lifecycle, "end", forgetful)


def edit_batches(patch: pytest.MonkeyPatch, edit: Callable[[ScheduledBatch], None]) -> None:
    issue = Replica.issue

    def edited(replica: Replica, *given: Any) -> ScheduledBatch:
        batch = issue(replica, *given)
        edit(batch)
        return batch

    patch.setattr(Replica, "issue", edited)


def cross_pairs_in(patch: pytest.MonkeyPatch) -> None:
    """Two blocks come back in each other's place."""

    def edit(batch: ScheduledBatch) -> None:
        for swap in batch.swap_ins:
            swap.pairs[:, 0] = np.roll(swap.pairs[:, 0], 1)

    edit_batches(patch, edit)


def lose_a_swap_in(patch: pytest.MonkeyPatch) -> None:
    """A swap in does not leave with its batch."""
    edit_batches(patch, lambda batch: object.__setattr__(batch, "swap_ins", ()))


def count_an_output_twice(patch: pytest.MonkeyPatch) -> None:
    """What was in flight as a sequence was swapped out is computed again."""
    swap_out = Sequence.swap_out

    def forgetful(sequence: Sequence) -> None:
        swap_out(sequence)
        sequence.ledger.restart(sequence.ledger.computed_len)

    patch.setattr(Sequence, "swap_out", forgetful)


class TightMachine(SchedulerMachine):
    """The same lives where blocks are short and host memory is not."""

    @initialize(caching=st.booleans(), in_flight=st.integers(1, 2), block_size=st.sampled_from((2, 4)))
    def start(self, caching: bool, in_flight: int, block_size: int) -> None:
        config = Config(4, 16, caching, max_batches_in_flight=in_flight, preemption_mode="swap", result_retention_ms=20)
        super().start(config, 32, 64, block_size, 1)


PLANTS = (leak_a_block, leak_a_slot, cross_pairs_in, lose_a_swap_in, count_an_output_twice)


def test_without_a_defect_all_of_them_hold() -> None:
    run_state_machine_as_test(TightMachine, settings=SETTINGS)


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_defect_ends_a_random_life(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(TightMachine, settings=SETTINGS)
