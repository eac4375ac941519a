"""Whether a reported slot is a sequence's own, and what it takes from it."""

import numpy as np
import pytest
from scheduler_rig import submission

from services.scheduler.core.ledger import Ledger
from services.scheduler.core.record import Arrival
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.sequence_status import SequenceStatus
from services.scheduler.core.tokens import Tokens
from tessera.values.finish import Finish, FinishReason
from tessera.values.report import SlotReport

PROMPT = [10, 11, 12]


def sequence_with(output: list[int]) -> Sequence:
    return Sequence(submission(1, PROMPT), Arrival(1, 1), 0, Ledger(Tokens(np.array(PROMPT, np.int32), output)))


def slot_with(output: list[int], computed_len: int, prompt_len: int = 3) -> SlotReport:
    ids = np.array(PROMPT + output, np.int32)
    return SlotReport(2, bytes(16), 4, prompt_len, ids, np.array([7, 8], np.int32), computed_len)


@pytest.mark.parametrize(
    ("slot", "agrees"),
    [
        (slot_with([20], 3), True),
        (slot_with([20, 21], 4), True),
        (slot_with([20, 21, 22], 5), True),  # further on than the sequence
        (slot_with([20, 99], 4), True),  # the token that differs has no KV yet
        (slot_with([20, 99, 22], 5), False),
        (slot_with([99], 3), True),
        (slot_with([], 2), True),
        (slot_with([20, 21], 5), False),  # more computed than there are ids
        (slot_with([20], 3, prompt_len=2), False),
    ],
)
def test_a_slot_agrees_where_its_kv_is_the_sequences_own(slot: SlotReport, agrees: bool) -> None:
    assert sequence_with([20, 21]).agrees_with(slot) is agrees


@pytest.mark.parametrize(
    ("output", "computed_len", "tokens", "has_entered"),
    [
        ([20, 21], 4, [20, 21], True),
        ([20, 21, 22], 5, [20, 21, 22], True),
        ([20], 3, [20, 21], False),
        ([20, 99], 4, [20, 21], False),
    ],
)
def test_going_on_in_a_slot_takes_ids_only_where_they_extend(
    output: list[int], computed_len: int, tokens: list[int], has_entered: bool
) -> None:
    sequence = sequence_with([20, 21])
    sequence.continue_in(slot_with(output, computed_len), "w")
    assert (sequence.status, sequence.worker, sequence.slot, sequence.attempt) == (SequenceStatus.RUNNING, "w", 2, 4)
    assert list(sequence.output_token_ids()) == tokens
    assert (sequence.ledger.computed_len, sequence.has_entered) == (computed_len, has_entered)
    assert sequence.table.block_ids.tolist() == [7, 8]


@pytest.mark.parametrize(
    ("reason", "status"), [(FinishReason.EOS, SequenceStatus.FINISHED), (FinishReason.ABORTED, SequenceStatus.ABORTED)]
)
def test_an_ended_sequence_goes_nowhere(reason: FinishReason, status: SequenceStatus) -> None:
    sequence = sequence_with([20, 21])
    sequence.end(Finish(reason, 1), 5)
    assert sequence.output_token_ids() == (20,) and sequence.timings.total_us == 5
    for move in (sequence.wait, lambda: sequence.run("w", 0), lambda: sequence.end(Finish(FinishReason.ABORTED, 1), 6)):
        with pytest.raises(AssertionError):
            move()
        assert sequence.status is status and status.has_ended and sequence.finished_us == 5
