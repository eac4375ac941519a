"""What a scheduler would do, told without doing it."""

from dataclasses import dataclass
from typing import TypeAlias

from services.scheduler.core.admission import Refused, positions_reserved
from services.scheduler.core.lifecycle import Lifecycle
from services.scheduler.core.replica import Replica
from services.scheduler.core.sequence import Sequence
from tessera.values.config import Config


@dataclass(frozen=True, slots=True)
class NextBatchInfo:
    """What the next batch of a worker would be (ATOM's `get_next_batch_info`): positions and requests, at most what the budget allows.

    An estimate from above: of those that wait only the first is counted, without what it may find cached, and nobody is held up by
    the delay factor, a target for the time of a step, or too few blocks.
    """

    is_prefill: bool  # whether any prompt is computed in it
    num_tokens: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class FitsNow:
    """At the head of the queue the request would be admitted to `worker` with its next batch."""

    worker: str
    num_blocks_needed: int
    num_blocks_free: int


@dataclass(frozen=True, slots=True)
class FitsLater:
    """It waits until running requests have given up what it needs: on `worker`, which lacks the fewest blocks, seats or blocks."""

    worker: str
    num_blocks_needed: int
    num_blocks_free: int
    num_seats_free: int


AllocationStatus: TypeAlias = FitsNow | FitsLater | Refused
"""Whether there is room for a request: now, later, or never (the low-level API's `AllocStatus` OK, LATER and NEVER), with the numbers."""


def next_batch_info(lifecycle: Lifecycle, config: Config, replica: Replica) -> NextBatchInfo:
    """See `NextBatchInfo`."""
    row_len, num_decodes = 1 + replica.num_speculative_tokens, 0
    prefills: list[int] = []
    for sequence in replica.running.values():
        if sequence.next_decode() is not None:
            num_decodes += 1
        elif not sequence.has_entered or sequence.ledger.num_tokens > sequence.ledger.scheduled_len:
            prefills.append(sequence.ledger.num_tokens - sequence.ledger.scheduled_len)
    first = lifecycle.waiting.first_for(replica.name)
    if first is not None and replica.seats_left > 0 and replica.takes_requests:
        prefills.append(first.ledger.num_tokens)
    if config.policy == "prefill_first" and prefills:
        num_decodes = 0
    num_tokens, num_requests = num_decodes * row_len, num_decodes
    for count in prefills:
        if num_tokens < replica.tokens_max and num_requests < replica.running_max:
            num_tokens, num_requests = min(replica.tokens_max, num_tokens + count), num_requests + 1
    return NextBatchInfo(num_requests > num_decodes, num_tokens, num_requests)


def room_for(lifecycle: Lifecycle, sequence: Sequence) -> FitsNow | FitsLater | None:
    """Room for a sequence that holds nothing, by the formula of admission; None where no worker that is there can ever hold it."""
    later: list[FitsLater] = []
    for replica in lifecycle.fleet:
        if not (replica.takes_requests and replica.can_hold(sequence)):
            continue
        manager = replica.manager
        match = manager.match(sequence.table, sequence.hit_token_ids)
        needed = manager.blocks_needed(match, positions_reserved(sequence.ledger.num_tokens, sequence.tokens_max))
        if replica.seats_left > 0 and needed <= manager.num_free_blocks:
            return FitsNow(replica.name, needed, manager.num_free_blocks)
        later.append(FitsLater(replica.name, needed, manager.num_free_blocks, replica.seats_left))
    return min(later, key=lambda status: status.num_blocks_needed - status.num_blocks_free, default=None)
