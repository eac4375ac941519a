"""Applying what a batch sampled to its sequences: tokens, computed blocks, stops."""

from array import array
from collections import deque
from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt

from services.scheduler.core.lane_rows import LaneRows
from services.scheduler.core.lifecycle import Lifecycle
from services.scheduler.core.replica import Replica
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.sequence_status import SequenceStatus
from services.scheduler.core.spec_stats import SpecStats
from services.scheduler.core.step_plan import IssuedBatch
from tessera.values.batch import ScheduledBatchOutput
from tessera.values.finish import Finish, FinishReason


class OutputCommit:
    """Commits rows one by one, and those of sequences in lanes all at once; both with the same result."""

    def __init__(self, lifecycle: Lifecycle, spec_stats: SpecStats) -> None:
        self._lifecycle = lifecycle
        self._book = lifecycle.book
        self._spec_stats = spec_stats

    def lanes(self, replica: Replica, issued: IssuedBatch, token_ids: npt.NDArray[np.int32], now_us: int) -> Items[int]:
        """Commit the rows of sequences that still hold the lanes in which they were, a token each; `token_ids` are those of all rows, none of
        which failed. Returns the rows left over."""
        rows = issued.lane_rows
        if rows is None:
            return range(len(issued.sequences))
        rest: Items[int] = range(len(rows), len(issued.sequences))
        token_ids = token_ids[: len(rows)]
        left = rows.left()
        if left:
            rest = [*sorted(left), *rest]
            token_ids, rows = np.delete(token_ids, sorted(left)), rows.without(left)
        if not len(rows):
            return rest
        deque(map(array.append, rows.outputs, token_ids.tolist()), maxlen=0)
        lanes = rows.lanes
        num_tokens, may_end, full = lanes.append(rows.index, token_ids)
        self._book.decoded_in_lanes(rows, num_tokens - lanes.prompt_lens[rows.index] - rows.ones, token_ids)
        if len(full):
            self._publish(replica, rows, full.tolist(), num_tokens[full].tolist())
        for row in may_end:
            self._settle(replica, rows.sequences[row], rows.sequences[row].output_len - 1, now_us)
        return rest

    def _publish(self, replica: Replica, rows: LaneRows, full: list[int], nums_tokens: list[int]) -> None:
        """Publish of these rows the blocks that are full now that they have so many tokens: computed is all but the last."""
        manager, step = replica.manager, replica.applied_step
        nums_full = [(num_tokens - 1) // manager.block_size for num_tokens in nums_tokens]
        tables = [rows.tables[row] for row in full]
        ids = [_last_block(rows.sequences[row], rows.outputs[row], manager.block_size) for row in full]
        contents = np.frombuffer(b"".join(ids), np.int32).reshape(len(full), manager.block_size)
        num_done = manager.publish_next(tables, nums_full, contents, step)
        for row, table in zip(full[num_done:], tables[num_done:], strict=True):
            ledger = rows.sequences[row].ledger
            manager.publish(table, ledger.token_ids, ledger.computed_len, step)

    def rows(self, replica: Replica, issued: IssuedBatch, output: ScheduledBatchOutput, rows: Items[int], now_us: int) -> None:
        """Commit these rows of a batch one by one; those whose sequence has moved on come to nothing."""
        errors = {error.row: error.message for error in output.row_errors}
        token_ids, sampled, ends = (
            output.token_ids.tolist(),
            output.token_counts.tolist(),
            np.cumsum(output.token_counts).tolist(),
        )
        drafts = output.draft_counts.tolist() if issued.has_drafts else None
        logprobs = output.logprobs.split(sampled) if output.logprobs is not None else None
        prompts = output.prompt_logprobs.by_row() if output.prompt_logprobs is not None else None
        for row in rows:
            sequence = issued.sequences[row]
            if sequence.attempt != issued.attempts[row] or sequence.worker != replica.name:
                continue
            if row in errors:
                finish = Finish(FinishReason.ERROR, sequence.output_len, message=errors[row])
                self._lifecycle.end(sequence, finish, now_us)
                continue
            num_drafts, num_sampled = 0, sampled[row]
            if drafts is not None:
                num_drafts = max(0, int(issued.samples[row]) - 1)
                if drafts and drafts[row]:
                    self._spec_stats.count(drafts[row], num_sampled - 1)
            if logprobs is not None and sequence.logprobs is not None:
                sequence.logprobs.put(sequence.output_len, logprobs[row])
            if prompts is not None and sequence.prompt_logprobs is not None and not sequence.output_len:
                sequence.prompt_logprobs.put(sequence.ledger.computed_len, prompts[row])
            first = ends[row] - num_sampled
            self._row(replica, sequence, issued.counts[row], num_drafts, token_ids[first : ends[row]], now_us)

    def _row(self, replica: Replica, sequence: Sequence, count: int, num_drafts: int, sampled: list[int], now_us: int) -> None:
        """Apply one row: of `count` positions, `num_drafts` of them for drafts, as many are computed as the sampled tokens say. What comes
        behind the earliest stop is neither output nor hashed."""
        checked = sequence.output_len
        sequence.ledger.commit(count, sampled, num_drafts)
        if sampled:
            if sequence.timings.ttft_us:
                self._book.decoded(sequence)
            else:
                sequence.note_tokens(now_us)
                self._lifecycle.figures.first_token(sequence)
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


def _last_block(sequence: Sequence, output: "array[int]", block_size: int) -> "array[int] | bytes":
    """The ids before the last one of a sequence, a block full, int32."""
    ids = output[-1 - block_size : -1]
    if len(ids) == block_size:
        return ids
    token_ids = sequence.ledger.token_ids
    return token_ids[len(token_ids) - 1 - block_size : len(token_ids) - 1].tobytes()
