"""Applying what a batch sampled to its sequences: tokens, computed blocks, stops."""

from array import array
from collections import deque

import numpy as np
import numpy.typing as npt

from services.scheduler.core.lifecycle import Lifecycle
from services.scheduler.core.replica import Replica
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.sequence_status import SequenceStatus
from services.scheduler.core.step_plan import IssuedBatch


class OutputCommit:
    """Commits rows one by one, and those of sequences in lanes all at once; both with the same result."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._book = lifecycle.book

    def lanes(self, replica: Replica, issued: IssuedBatch, token_ids: npt.NDArray[np.int32], now_us: int) -> list[int]:
        """Commit the rows of sequences that still hold the lanes in which they were, a token each; `token_ids` are those of all rows, none of
        which failed. Returns the rows left over."""
        rows = issued.lane_rows
        if rows is None:
            return list(range(len(issued.sequences)))
        rest = list(range(len(rows), len(issued.sequences)))
        token_ids = token_ids[: len(rows)]
        held = rows.still_held()
        if held is not None:
            kept = set(held)
            rest = [row for row in range(len(rows)) if row not in kept] + rest
            rows, token_ids = rows.only(held), token_ids[held]
        if not len(rows):
            return rest
        deque(map(array.append, rows.outputs, token_ids.tolist()), maxlen=0)
        num_tokens, looked_at = rows.lanes.append(rows.slots, token_ids)
        self._book.decoded_in_lanes(rows, num_tokens - rows.lanes.prompt_lens.take(rows.slots) - 1, token_ids)
        for row in looked_at.tolist():
            sequence = rows.sequences[row]
            rows.lanes.looked_after(int(rows.slots[row]), replica.manager.block_size)
            self._settle(replica, sequence, sequence.output_len - 1, now_us)
        return rest

    def row(self, replica: Replica, sequence: Sequence, count: int, num_drafts: int, sampled: list[int], now_us: int) -> None:
        """Apply one row: of `count` positions, `num_drafts` of them for drafts, as many are computed as the sampled tokens say. What comes
        behind the earliest stop is neither output nor hashed."""
        checked = sequence.output_len
        sequence.ledger.commit(count, sampled, num_drafts)
        if sampled:
            if sequence.timings.ttft_us:
                self._book.decoded(sequence)
            else:
                sequence.note_tokens(now_us)
                self._book.touch(sequence)
        self._settle(replica, sequence, checked, now_us)

    def _settle(self, replica: Replica, sequence: Sequence, checked: int, now_us: int) -> None:
        """What follows from tokens committed behind the first `checked` of the output: where it ends, and which blocks are complete."""
        ledger, table, manager = sequence.ledger, sequence.table, replica.manager
        num_sampled = ledger.output_len - checked
        finish = sequence.first_stop(checked) if num_sampled else None
        if finish is not None and num_sampled > 1:
            ledger.cut(finish.output_len)
        if ledger.computed_len // manager.block_size > table.num_published and sequence.status is SequenceStatus.RUNNING:
            manager.publish(table, ledger.token_ids, ledger.computed_len, replica.applied_step)
        if finish is not None:
            self._lifecycle.end(sequence, finish, now_us)
