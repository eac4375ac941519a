"""The batch of one step while it is put together."""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kv_manager.allocation import BlockPairs
from services.scheduler.core.errors import BadOutput
from services.scheduler.core.lane_rows import LaneRows
from services.scheduler.core.row_index import Rows
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.sequence_status import SequenceType
from tessera.values.batch import NO_BLOCKS, ScheduledBatchOutput, SlotEntry

Column: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class IssuedBatch:
    """A batch in flight: which sequence, at which attempt, each row belongs to, and how many tokens each row samples at most, int32 `[R]`:
    none or one, and `1 + drafts` for a decode, whose count that is.

    A dummy run has rows of nobody: no sequences and counts, and R zeros in `samples`.
    """

    step_id: int
    sequences: list[Sequence]
    attempts: list[int]
    counts: list[int]
    samples: npt.NDArray[np.int32]
    num_decodes: int
    has_drafts: bool
    has_logprobs: bool = False  # some row's sequence wants them
    lane_rows: LaneRows | None = None  # the first rows, where these are
    are_latecomers: bool = False  # prompts that may be computed together with the batch before

    @property
    def num_prefill_positions(self) -> int:
        """Positions of all rows that are no decodes."""
        return sum(self.counts[self.num_decodes :])

    def check(self, output: ScheduledBatchOutput) -> None:
        """Raise BadOutput unless the columns of its output fit: a row samples what it must, and only one with drafts fewer than it could,
        but one."""
        num_rows = len(self.samples)
        failed = [error.row for error in output.row_errors]
        expected = self.samples
        if failed:
            if not all(0 <= row < num_rows for row in failed):
                raise BadOutput(f"step {self.step_id} has {num_rows} rows, errors in rows {failed}")
            expected = expected.copy()
            expected[failed] = 0
        counts = output.token_counts
        fits = counts.tobytes() == expected.tobytes() or np.array_equal(counts, expected)
        if self.has_drafts and not fits and len(counts) == num_rows:
            fits = bool(((counts <= expected) & (counts >= np.minimum(expected, 1))).all())
        if not fits or len(output.token_ids) != counts.sum():
            raise BadOutput(
                f"step {self.step_id} must sample {expected.tolist()} tokens a row{' at most' * self.has_drafts}, "
                f"got {counts.tolist()} with {len(output.token_ids)} ids"
            )
        if self.has_drafts or len(output.draft_counts):
            self._check_drafts(output)
        if self.has_logprobs:
            self._check_logprobs(output, failed)

    def _check_drafts(self, output: ScheduledBatchOutput) -> None:
        drafts = output.draft_counts if len(output.draft_counts) else np.zeros(len(self.samples), np.int32)
        room = np.maximum(self.samples - 1, 0)
        if len(drafts) != len(room) or (drafts > room).any() or (drafts < output.token_counts - 1).any() or (drafts < 0).any():
            raise BadOutput(
                f"step {self.step_id} has room for {room.tolist()} drafts a row, got {drafts.tolist()} and {output.token_counts.tolist()} tokens"
            )

    def _check_logprobs(self, output: ScheduledBatchOutput, failed: list[int]) -> None:
        """Raise BadOutput where a sequence that is still where it was is not told what it wants."""
        ends = np.cumsum(output.token_counts).tolist()
        told = output.logprobs.counts if output.logprobs is not None else np.zeros(len(output.token_ids), np.int32)
        prompts = output.prompt_logprobs.row_counts if output.prompt_logprobs is not None else np.zeros(len(ends), np.int32)
        for row, sequence in enumerate(self.sequences):
            if row in failed or sequence.slot is None or sequence.attempt != self.attempts[row]:
                continue
            num_wanted = sequence.num_prompt_logprobs(self.counts[row])
            is_told = sequence.logprobs is None or told[ends[row] - output.token_counts[row] : ends[row]].all()
            if not is_told or prompts[row] < num_wanted:
                raise BadOutput(
                    f"step {self.step_id} must tell log-probabilities of every token of row {row}, and of {num_wanted} of its prompt"
                )


_NO_COLUMNS: tuple[Column, Column, Column] = (NO_BLOCKS, NO_BLOCKS, NO_BLOCKS)


class StepPlan:
    """Rows chosen so far, decodes first, and the budget left. Adding a row puts its positions in flight."""

    def __init__(self, tokens_max: int, rows_max: int) -> None:
        self.tokens_left = tokens_max
        self.rows_left = rows_max
        self.num_decodes = 0
        self.entries: list[SlotEntry] = []
        self.sequences: list[Sequence] = []
        self.slots: list[int] = []  # as `context_lens` and `new_block_counts` without rows in lanes
        self.counts: list[int] = []
        self.context_lens: list[int] = []
        self.new_block_counts: list[int] = []
        self.new_block_ids: list[int] = []
        self.copies: BlockPairs = []  # of blocks of the pool, before anything is computed
        self.is_dummy = False
        self.are_latecomers = False
        self._samples: list[int] = []
        self._has_drafts = False
        self._has_logprobs = False
        self._lane_rows: LaneRows | None = None  # before all others: in `sequences` and `counts`, with columns of their own
        self._lane_columns: tuple[Column, Column, Column] = _NO_COLUMNS

    @classmethod
    def dummy(cls, of: "StepPlan", tokens_max: int, rows_max: int) -> "StepPlan":
        """Rows of the size and path of another worker's plan that belong to nobody, within these limits."""
        plan = cls(tokens_max, rows_max)
        for count in of.counts[:rows_max]:
            taken = min(count, plan.tokens_left)
            if taken:
                plan.counts.append(taken)
                plan.tokens_left -= taken
        num_rows = len(plan.counts)
        plan.is_dummy, plan.rows_left = True, rows_max - num_rows
        plan.num_decodes = min(of.num_decodes, num_rows)
        plan.context_lens = list(plan.counts)
        plan.slots, plan.new_block_counts, plan._samples = [0] * num_rows, [0] * num_rows, [0] * num_rows
        return plan

    @property
    def is_full(self) -> bool:
        """No budget left for another row."""
        return not (self.tokens_left and self.rows_left)

    def add_lanes(self, rows: LaneRows, growing: Rows, block_ids: list[int]) -> None:
        """The next position of each of these sequences, into an empty plan; none of them is at its cap. The tables of `growing` rows have
        just got a block each, which cover it."""
        num_rows, lanes, index = len(rows), rows.lanes, rows.index
        assert not self.sequences and num_rows <= min(self.tokens_left, self.rows_left)
        lanes.scheduled[index] += rows.ones
        block_counts = np.zeros(num_rows, np.int32)
        if block_ids:
            lanes.grow(rows.slots[growing], block_ids)
            block_counts[growing] = 1
            self.new_block_ids.extend(block_ids)
        # A copy, since a slice of the column would grow with it: the position is computed, so the context is one longer than where it began.
        self._lane_rows, self._lane_columns = rows, (rows.slots, lanes.scheduled[index].copy(), block_counts)
        self.sequences.extend(rows.sequences)
        self.counts.extend([1] * num_rows)
        self.num_decodes = num_rows
        self.tokens_left -= num_rows
        self.rows_left -= num_rows

    def columns(self) -> tuple[Column, Column, Column, Column]:
        """Of all rows the slots, counts, context lengths and numbers of new blocks."""
        slots, context_lens, block_counts = self._lane_columns
        num_lanes = len(slots)
        if self.slots:
            slots = np.concatenate((slots, np.array(self.slots, np.int32)))
            context_lens = np.concatenate((context_lens, np.array(self.context_lens, np.int32)))
            block_counts = np.concatenate((block_counts, np.array(self.new_block_counts, np.int32)))
        return slots, self._with_lanes(self.counts[num_lanes:]), context_lens, block_counts

    def _with_lanes(self, counts: list[int]) -> Column:
        """These counts behind a one for every lane."""
        ones = self._lane_rows.ones if self._lane_rows is not None else NO_BLOCKS
        return np.concatenate((ones, np.array(counts, np.int32))) if counts else ones

    def add_decode(self, sequence: Sequence, position: int, new_block_ids: Items[int], count: int = 1) -> None:
        """The next position, which samples, and `count` - 1 for drafts. All decodes come before the first prefill."""
        sequence.type = SequenceType.DECODE
        sequence.ledger.schedule_decode(count)
        self._add(sequence, count, position + count, new_block_ids)
        self._samples.append(count)
        self.num_decodes += 1
        self._has_drafts |= count > 1

    def add_prefill(self, sequence: Sequence, count: int, new_block_ids: Items[int] = ()) -> None:
        """A chunk of `count` positions; a sequence that is not in its slot yet enters with it."""
        sequence.type = SequenceType.PREFILL
        if not sequence.has_entered:
            self.entries.append(sequence.enter())
            new_block_ids = ()  # its whole table came with the entry
        samples = sequence.ledger.schedule(count)
        self._add(sequence, count, sequence.ledger.scheduled_len, new_block_ids)
        self._samples.append(int(samples))

    def issued(self, step_id: int) -> IssuedBatch:
        """The rows as they are remembered until their output comes."""
        rows = self._lane_rows
        attempts = rows.attempts if rows is not None else []
        if len(attempts) < len(self.sequences):
            attempts = attempts + [sequence.attempt for sequence in self.sequences[len(attempts) :]]
        counts = [] if self.is_dummy else self.counts
        return IssuedBatch(
            step_id,
            self.sequences,
            attempts,
            counts,
            self._with_lanes(self._samples),
            self.num_decodes,
            self._has_drafts,
            self._has_logprobs,
            rows,
            self.are_latecomers,
        )

    def _add(self, sequence: Sequence, count: int, context_len: int, new_block_ids: Items[int]) -> None:
        assert sequence.slot is not None and count <= self.tokens_left and self.rows_left
        self._has_logprobs |= sequence.logprobs is not None or sequence.prompt_logprobs is not None
        self.sequences.append(sequence)
        self.slots.append(sequence.slot)
        self.counts.append(count)
        self.context_lens.append(context_len)
        self.new_block_counts.append(len(new_block_ids))
        if new_block_ids:
            self.new_block_ids.extend(new_block_ids)
        self.tokens_left -= count
        self.rows_left -= 1
