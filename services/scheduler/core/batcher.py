"""What the next step of a worker computes: which rows, who is admitted, who is preempted."""

from collections.abc import Sequence as Items
from dataclasses import dataclass

from kv_manager.allocation import PoolExhausted
from services.scheduler.core.batch_policy import BATCH_POLICIES
from services.scheduler.core.departure import move_away
from services.scheduler.core.lifecycle import Lifecycle
from services.scheduler.core.placement import Placement, Placer
from services.scheduler.core.preemption import Preemption
from services.scheduler.core.replica import Replica
from services.scheduler.core.row_index import rows_of
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.sequence_status import SequenceStatus
from services.scheduler.core.step_plan import StepPlan
from tessera.values.config import Config

SUSPECT_CHUNK = 64
"""Positions in one step of a sequence that may bring its worker down."""

CHUNK_GRAIN = 64
"""Where a step is all prefill, a chunk that the budget cuts short is a multiple of so many positions (ATOM), or of a larger block."""


class Batcher:
    """Chooses rows, admits from the queue and preempts; the only place that decides who gets blocks."""

    def __init__(self, config: Config, lifecycle: Lifecycle) -> None:
        self._config = config
        self._lifecycle = lifecycle
        self._waiting = lifecycle.waiting
        self._placer = Placer(config, lifecycle)
        self._fill = BATCH_POLICIES[config.policy]
        self._cuts_evenly = config.policy == "prefill_first"
        self.preemption = Preemption(config, lifecycle)
        self.recomputed_positions = 0

    def plan(self, replica: Replica, now_us: int) -> StepPlan:
        """The rows of the next step; they count as in flight."""
        if replica.is_leaving:
            move_away(self._lifecycle, replica)
        plan = StepPlan(replica.tokens_max, replica.running_max)
        self._placer.begin_batch()
        strong = self._lifecycle.suspects.strong
        if strong and self._plan_alone(replica, plan, now_us):
            return plan
        self._fill(_Step(self, replica, plan, list(replica.running.values()), replica.prefills(), now_us))
        return plan

    def plan_latecomers(self, replica: Replica, now_us: int) -> StepPlan:
        """Prompts that came after the newest batch in flight was issued, in what room that has left. It waits behind another; so the prompts need
        not wait for both, nor its rows for a pass of the prompts alone."""
        newest = replica.in_flight[-1]
        plan = StepPlan(max(0, replica.tokens_max - sum(newest.counts)), max(0, replica.running_max - len(newest.counts)))
        plan.are_latecomers = True
        if self._cuts_evenly or self._config.scheduler_delay_factor or self._lifecycle.suspects.strong:
            return plan
        self._placer.begin_batch()
        step = _Step(self, replica, plan, list(replica.running.values()), [], now_us)
        self._pace(step, newest.num_prefill_positions)
        self._admit_waiting(step)
        return plan

    def add_decodes(self, step: "_Step") -> bool:
        """See `StepRows`."""
        rest = self._add_lanes(step.replica, step.plan, step.running)
        self._add_decodes(step.replica, step.plan, rest)
        if step.replica.swapped:
            self._swap_in(step)
        return bool(step.plan.num_decodes)

    def add_prefills(self, step: "_Step") -> bool:
        """See `StepRows`."""
        replica, plan = step.replica, step.plan
        num_before = len(plan.sequences)
        if plan.num_decodes == len(replica.running) and not self._waiting:
            return False
        self._pace(step)
        if plan.num_decodes < len(replica.running):
            self._add_prefills(replica, plan, step.prefills)
        self._admit_waiting(step)
        return len(plan.sequences) > num_before

    def _admit_waiting(self, step: "_Step") -> None:
        """First chunks, in their order, up to the first that does not fit."""
        replica, plan, strong = step.replica, step.plan, self._lifecycle.suspects.strong
        while self._waiting and not plan.is_full and self._has_waited(replica, step.now_us):
            placement = self._placer.next_for(replica, step.now_us)
            if placement is None or placement.sequence.request_id in strong or not self._admit(placement, plan, step.now_us):
                break

    def _swap_in(self, step: "_Step") -> None:
        """Bring back who was swapped out, after the running ones have grown and before anybody is admitted; each with its next row, unless
        it has to enter its slot anew first."""
        replica, plan = step.replica, step.plan
        while not plan.is_full and (found := self.preemption.next_swap_in(replica)) is not None:
            sequence, match, positions = found
            self._lifecycle.swap_in(sequence, match, positions)
            if sequence.has_entered:
                self._add_decodes(replica, plan, [sequence])
                step.running.append(sequence)
                step.prefills.append(sequence)

    def _pace(self, step: "_Step", num_joined: int = 0) -> None:
        """Where decodes would wait for a prompt that came after their first token, leave this step only as many positions as are expected to
        take `itl_target_ms`, less the `num_joined` of prompts that it is computed with. Prompts that came before it are not held back: of a burst,
        those who are answered first wait for the rest."""
        target_us = 1000 * self._config.itl_target_ms
        if not target_us or not self._config.enable_chunked_prefill:
            return
        times = step.replica.step_times
        streaming = next((sequence for sequence in step.running if sequence.output_len), None)
        prompt = step.prefills[0] if step.prefills else self._waiting.oldest
        if streaming is None or prompt is None or prompt.arrived_us < streaming.first_token_us or not times.has_prefills:
            return
        step.plan.tokens_left = min(step.plan.tokens_left, max(0, times.prefill_positions_max(target_us) - num_joined))

    def _has_waited(self, replica: Replica, now_us: int) -> bool:
        """ATOM's delay: somebody is admitted only when the oldest who waits has waited longer than the last prefill step took, times
        the factor, or when nothing runs."""
        factor, oldest = self._config.scheduler_delay_factor, self._waiting.oldest
        if not factor or not replica.running or oldest is None:
            return True
        return now_us - oldest.arrived_us > factor * replica.step_times.last_prompt_us

    def _plan_alone(self, replica: Replica, plan: StepPlan, now_us: int) -> bool:
        """Give the whole step to one sequence under strong suspicion, with nothing else in flight. False where there is none here."""
        strong = self._lifecycle.suspects.strong
        sequence = next((sequence for request_id, sequence in replica.running.items() if request_id in strong), None)
        placement = self._placer.next_for(replica, now_us) if sequence is None else None
        if sequence is None and (placement is None or placement.sequence.request_id not in strong):
            return False
        if any(batch.sequences for batch in replica.in_flight):
            return True
        if placement is not None:
            self._admit(placement, plan, now_us)
        elif sequence is not None:
            self._add_decodes(replica, plan, [sequence])
            if not plan.sequences:
                self._add_prefills(replica, plan, [sequence])
        return True

    def _add_lanes(self, replica: Replica, plan: StepPlan, running: list[Sequence]) -> list[Sequence]:
        """The next rows of all sequences in lanes that are not at their cap, where there is room for everybody. Returns who else may decode."""
        rows, manager = replica.lane_rows(), replica.manager
        num_others = len(running) - len(rows)
        if not len(rows) or plan.sequences or len(running) > min(plan.tokens_left, plan.rows_left):
            return running
        lanes = rows.lanes
        capped = rows_of(lanes.scheduled[rows.index] + rows.ones >= lanes.caps[rows.index])
        if capped:
            rows = rows.without(set(capped))
        growing = (lanes.scheduled[rows.index] >= lanes.covered[rows.index]).nonzero()[0]
        if len(growing) + num_others > manager.num_free_blocks:
            return running  # somebody may have to leave: in order of rank
        block_ids = manager.append_next([rows.tables[row] for row in growing.tolist()]) if len(growing) else []
        plan.add_lanes(rows, growing, block_ids)
        return [sequence for sequence in running if sequence.ledger.lanes is None] if num_others else []

    def _add_decodes(self, replica: Replica, plan: StepPlan, sequences: Items[Sequence]) -> None:
        block_size, row_len = replica.manager.block_size, 1 + replica.num_speculative_tokens
        for sequence in sequences:
            if plan.is_full:
                return
            # A prefill's last chunk of one position is a decode as well: it has waited longest.
            position = sequence.next_decode()
            if position is None or sequence.status is not SequenceStatus.RUNNING:
                continue
            count = 1 if row_len == 1 else min(row_len, plan.tokens_left, sequence.tokens_max - 1 - position)
            new_block_ids: Items[int] | None = ()
            if position + count > len(sequence.table.block_ids) * block_size:
                count = _affordable(replica, sequence, position, count)
                new_block_ids = self._grow(replica, plan, sequence, count) if count else None
            if new_block_ids is not None:
                plan.add_decode(sequence, position, new_block_ids, count)
                if row_len == 1:
                    sequence.take_lane(replica.lanes)

    def _add_prefills(self, replica: Replica, plan: StepPlan, sequences: Items[Sequence]) -> None:
        for sequence in sequences:
            if plan.is_full:
                return
            if sequence.status is not SequenceStatus.RUNNING or sequence.is_past_prefill:
                continue
            count = self._chunk(sequence, sequence.ledger.scheduled_len, replica, plan)
            new_block_ids = self._grow(replica, plan, sequence, count) if count else None
            if new_block_ids is None:
                continue
            if not sequence.has_entered:
                self._lifecycle.book.touch(sequence)  # its attempt grows
            plan.add_prefill(sequence, count, new_block_ids)

    def _admit(self, placement: Placement, plan: StepPlan, now_us: int) -> bool:
        """Admit a sequence that fits, if a first chunk of it fits the step."""
        replica, sequence, start = placement.replica, placement.sequence, placement.num_cached_tokens
        ledger, is_resumed = sequence.ledger, sequence.attempt > 0
        count = self._chunk(sequence, start, replica, plan)
        if not count:
            return False
        if placement.parent is not None:
            copies = replica.manager.fork(placement.parent.table, sequence.table, start, placement.positions)
            assert not isinstance(copies, PoolExhausted), f"counted as fitting: {copies}"
            plan.copies += copies
        else:
            allocated = replica.manager.allocate(sequence.table, placement.match, placement.positions, resumed=is_resumed)
            assert not isinstance(allocated, PoolExhausted), f"counted as fitting: {allocated}"
        self._waiting.remove(sequence)
        if not is_resumed:
            sequence.note_admission(now_us)
            sequence.num_cached_tokens = min(start, ledger.prompt_len)
        self.recomputed_positions += max(0, sequence.stranded_len - start)
        sequence.stranded_len = 0
        sequence.admission = self._lifecycle.next_admission()
        ledger.restart(start)
        replica.seat(sequence)
        plan.add_prefill(sequence, count)
        self._lifecycle.book.touch(sequence)
        return True

    def _chunk(self, sequence: Sequence, start: int, replica: Replica, plan: StepPlan) -> int:
        """How many of the positions from `start` on go into this step; 0: none, wait.

        Without chunked prefill all or none, except where they can fit no step (a resumed sequence that has outgrown the budget).
        A sequence under strong suspicion is computed in small pieces where it is suspected, so that little has to be lost to find out.
        """
        config, num_remaining = self._config, max(1, sequence.ledger.num_tokens - start)
        if not config.enable_chunked_prefill and num_remaining <= replica.tokens_max:
            return num_remaining if num_remaining <= plan.tokens_left else 0
        count = min(num_remaining, plan.tokens_left)
        suspicion = self._lifecycle.suspects.strong.get(sequence.request_id)
        if suspicion is not None:
            count = min(count, max(SUSPECT_CHUNK, suspicion.first - start))
        threshold = config.long_prefill_token_threshold
        if threshold and threshold <= count:
            return threshold
        if self._cuts_evenly and count == plan.tokens_left < num_remaining:
            even = count - count % max(replica.manager.block_size, CHUNK_GRAIN)
            return count if not (even or plan.sequences) else even
        return count

    def _grow(self, replica: Replica, plan: StepPlan, sequence: Sequence, count: int) -> list[int] | None:
        """New blocks for the next `count` positions; preempts until they are there. None: the sequence itself had to go."""
        while True:
            grown = replica.manager.append(sequence.table, sequence.ledger.scheduled_len + count)
            if not isinstance(grown, PoolExhausted):
                if sequence.ledger.lanes is not None and sequence.slot is not None:
                    replica.lanes.has_table(sequence.slot, len(sequence.table.block_ids), sequence.table.block_ids[-1])
                return grown
            if self.preemption.make_room(replica, plan, sequence) is sequence:
                return None


@dataclass(frozen=True, slots=True)
class _Step:
    """One step under construction, for a batch policy (`StepRows`)."""

    batcher: Batcher
    replica: Replica
    plan: StepPlan
    running: list[Sequence]  # when it began, in order of rank
    prefills: list[Sequence]  # of these
    now_us: int

    def add_decodes(self) -> bool:
        return self.batcher.add_decodes(self)

    def add_prefills(self) -> bool:
        return self.batcher.add_prefills(self)


def _affordable(replica: Replica, sequence: Sequence, position: int, count: int) -> int:
    """How many of a decode's `count` positions from `position` on, which its table does not cover, it is to have blocks for.

    Drafts take no block that a neighbour's next token may need. 0: not even the first has one, but drafts in flight may leave room for it.
    """
    manager = replica.manager
    num_covered = len(sequence.table.block_ids) * manager.block_size - position
    num_spare = max(0, manager.num_free_blocks - len(replica.running) + 1)
    if not num_covered and not num_spare:
        if not manager.num_free_blocks and sequence.ledger.drafts_in_flight:
            return 0
        num_spare = 1
    return min(count, num_covered + num_spare * manager.block_size)
