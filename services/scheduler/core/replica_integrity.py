"""Whether the counts of a worker's sequences are those of its batches in flight, its lanes and its blocks."""

from typing import TYPE_CHECKING

from services.scheduler.core.sequence import Sequence
from services.scheduler.core.sequence_status import SequenceStatus

if TYPE_CHECKING:
    from services.scheduler.core.replica import Replica


def check_rows(replica: "Replica", held: list[Sequence]) -> None:
    """Assert it for all sequences that hold a slot of this worker."""
    flying: dict[bytes, int] = {sequence.request_id: 0 for sequence in held}
    drafts = dict(flying)
    for batch in replica.in_flight:
        # Not strict: a dummy run has rows of nobody.
        rows = zip(batch.sequences, batch.attempts, batch.counts, batch.samples.tolist(), strict=False)
        for sequence, attempt, count, num_samples in rows:
            if sequence in held and sequence.attempt == attempt:
                flying[sequence.request_id] += count
                drafts[sequence.request_id] += max(0, num_samples - 1)
    num_lanes = 0
    for sequence in held:
        ledger, size = sequence.ledger, replica.manager.block_size
        is_swapped = replica.swapped.get(sequence.request_id) is sequence
        status = SequenceStatus.SWAPPED if is_swapped else SequenceStatus.RUNNING
        assert sequence.status is status and sequence.worker == replica.name
        assert ledger.positions_in_flight == flying[sequence.request_id], "positions in flight are not those of the batches"
        assert ledger.drafts_in_flight == drafts[sequence.request_id], "drafts in flight are not those of the batches"
        assert ledger.computed_len < ledger.num_tokens
        if ledger.lanes is not None:
            num_lanes += 1
            assert ledger.lanes is replica.lanes and status is SequenceStatus.RUNNING, "a lane is held by somebody else"
            lanes, slot, block_ids = replica.lanes, sequence.slot, sequence.table.block_ids
            counts = [int(column[slot]) for column in (lanes.num_tokens, lanes.caps, lanes.covered, lanes.last_blocks)]
            assert counts == [ledger.num_tokens, sequence.tokens_max, len(block_ids) * size, block_ids[-1]], (
                "a lane tells another story"
            )
            assert lanes.full_at[slot] == (ledger.computed_len // size + 1) * size + 1, "a full block goes unnoticed"
        num_blocks = len(sequence.table.host_block_ids if is_swapped else sequence.table.block_ids)
        assert num_blocks * size >= ledger.scheduled_len, "a table is too short"
        if replica.manager.enable_prefix_caching:
            assert sequence.table.num_published <= ledger.computed_len // size
    assert len(replica.lanes) == num_lanes, "a lane is held by nobody"
