"""Making room when blocks run out, and bringing back who was swapped out for it."""

from kv_manager.allocation import PrefixMatch
from services.scheduler.core.admission import positions_reserved, resume_watermark
from services.scheduler.core.lifecycle import Lifecycle
from services.scheduler.core.queue_order import running_rank
from services.scheduler.core.replica import Replica
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.step_plan import StepPlan
from services.scheduler.core.victims import VICTIM_CHOICES, Candidate
from tessera.values.config import Config


class Preemption:
    """Decides who gives up blocks, and what becomes of their KV: given up (the sequence waits in the queue, tokens kept), or swapped out to
    the worker's host memory, as far as that has room.

    Whatever the policy chooses, a sequence takes blocks only from those behind it in `running_rank`, and goes itself where there are none.
    So the first in rank never loses any, and always ends: there is no livelock. What makes others give way is a sequence that grows
    by a token which no batch computed before, and tokens are kept: so all preemptions together are bounded by the tokens of all requests.
    """

    def __init__(self, config: Config, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._choose = VICTIM_CHOICES[config.preemption_policy]
        self._rank = running_rank(config.queue_order)
        self._swaps = config.preemption_mode == "swap"
        self.count = 0  # since the start
        self.num_swap_outs = 0  # of these, kept in host memory

    def make_room(self, replica: Replica, plan: StepPlan, sequence: Sequence) -> Sequence:
        """Take the blocks of a running sequence that is behind `sequence`, or of `sequence` itself where there is none; returns whose.

        Nobody who is in this step's batch: he would have to leave it again. `sequence` is not in it yet.
        """
        rank, planned = self._rank(sequence), {other.request_id for other in plan.sequences}
        behind = [
            other
            for other in replica.running.values()
            if other.request_id not in planned and self._rank(other) > rank and not replica.is_swapping_in(other)
        ]
        victim = behind[self._choose([_candidate(other, replica) for other in behind])] if behind else sequence
        if self._can_swap(replica, victim) and self._lifecycle.swap_out(victim) is None:
            self.num_swap_outs += 1
        else:
            self._lifecycle.send_back(victim)
        victim.note_preemption()
        self.count += 1
        return victim

    def next_swap_in(self, replica: Replica) -> tuple[Sequence, PrefixMatch, int] | None:
        """Who comes back from the host next: of the swapped ones the first in rank, if there is a seat, and room for its whole length and a
        watermark; with its cached prefix, which need not be copied, and the positions that it gets blocks for. Nobody in a step in which
        others had to leave."""
        if not replica.swapped or replica.swap_outs or len(replica.running) >= replica.running_max:
            return None
        sequence = min(replica.swapped.values(), key=self._rank)
        if sequence.ledger.positions_in_flight:
            return None
        manager, ledger = replica.manager, sequence.ledger
        positions = positions_reserved(ledger.num_tokens, sequence.tokens_max)
        match = manager.match(sequence.table, ledger.token_ids[: ledger.computed_len + 1])
        num_kept = resume_watermark(manager.num_blocks) if replica.running else 0
        fits = manager.blocks_needed(match, positions) + num_kept <= manager.num_free_blocks
        return (sequence, match, positions) if fits else None

    def _can_swap(self, replica: Replica, victim: Sequence) -> bool:
        """Whether the KV of a running sequence can move as it is, and come back: what has outgrown this pool goes on elsewhere. A suspect of
        bringing workers down is to be computed alone, from the queue."""
        is_strong = victim.request_id in self._lifecycle.suspects.strong
        can_move = victim.has_entered and victim.ledger.scheduled_len > 0
        return self._swaps and can_move and replica.can_hold(victim) and not is_strong


def _candidate(sequence: Sequence, replica: Replica) -> Candidate:
    return Candidate(
        priority=sequence.submission.priority,
        admission=sequence.admission,
        num_remaining=sequence.tokens_max - sequence.ledger.num_tokens,
        num_cached_tokens=sequence.table.num_published * replica.manager.block_size,
    )
