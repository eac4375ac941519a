"""One attached worker as the scheduler sees it: its pool, its slots, what runs on it and what is in flight."""

from collections import deque
from collections.abc import Iterable
from heapq import heapify, heappop, heappush

import numpy as np

from kv_manager.allocation import PoolExhausted, PrefixMatch
from kv_manager.block_manager import BlockManager
from kv_manager.block_table import HeldTable
from kv_manager.host_pool import HostPoolExhausted
from kv_manager.published_block import PublishedBlock
from services.scheduler.core.held_blocks import kv_namespace
from services.scheduler.core.lane_rows import LaneRows
from services.scheduler.core.lanes import Lanes
from services.scheduler.core.queue_order import running_rank
from services.scheduler.core.record import BlockDelta
from services.scheduler.core.replica_integrity import check_rows
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.sequence_status import SequenceStatus
from services.scheduler.core.service_figures import TokenPace
from services.scheduler.core.slot_orders import Orphan, reported_table, slot_drop, slot_swap
from services.scheduler.core.slot_sweep import SlotSweep
from services.scheduler.core.step_plan import IssuedBatch, StepPlan
from services.scheduler.core.step_times import StepTimes
from tessera.values.batch import NO_BLOCKS, NO_PAIRS, ScheduledBatch, ScheduledBatchOutput, SlotDrop, SlotSwap
from tessera.values.config import Config
from tessera.values.finish import Finish
from tessera.values.identity import Epoch
from tessera.values.report import SlotReport, WorkerReport

PATIENCE_US = 500_000
"""How long a request waits in the line of the better worker for that to end its step, while others may have room."""


class Replica:
    """One worker between two attaches; every attach makes a new one from the worker's report (`adopt` before use).

    `running` is in order of `running_rank`; who is in `swapped` keeps its slot. A slot is free again as soon as its drop is queued: drops
    leave with the next batch, before any entry. Blocks likewise: a worker executes batches in order, so whoever gets a block writes
    it after everybody before.
    """

    def __init__(self, name: str, report: WorkerReport, config: Config) -> None:
        description = report.description
        geometry, limits = description.geometry, description.limits
        self.name = name
        self.description = description
        self.manager = BlockManager(
            geometry.num_blocks,
            geometry.block_size,
            kv_namespace(description),
            config.enable_prefix_caching,
            geometry.num_host_blocks,
            config.secure_zero,
            config.prefix_index,
        )
        self.tokens_max = min(config.max_num_batched_tokens, limits.max_num_batched_tokens)
        self.num_speculative_tokens = min(config.num_speculative_tokens, limits.num_speculative_tokens)
        rows_max = max(1, self.tokens_max // (1 + self.num_speculative_tokens))
        self.running_max = min(config.max_num_seqs, limits.max_num_seqs, rows_max)
        self.batches_max = min(config.max_batches_in_flight, limits.max_batches_in_flight)
        self._takes_one_more = limits.max_batches_in_flight > self.batches_max > 1 and not self.num_speculative_tokens
        self.nonce = report.nonce
        self.next_step = report.last_step + 1
        self.applied_step = 0  # the highest step whose output was applied
        self.durable_step = 0
        self.progress_us = 0  # when its oldest batch in flight became the oldest
        self.sweep = SlotSweep()
        self.step_times = StepTimes()
        self.pace = TokenPace()
        self.is_attached = True
        self.is_ending = False  # it has said that it is to end
        self.is_drained = False  # an operator wants it empty
        self.lanes = Lanes(limits.max_num_seqs, description.model.vocab_size, geometry.block_size)
        self._lane_rows = LaneRows.of(self.lanes, [])
        self.running: dict[bytes, Sequence] = {}
        self.swapped: dict[bytes, Sequence] = {}
        self.orphans: dict[bytes, Orphan] = {}
        self.drops: list[SlotDrop] = []
        self.swap_outs: list[SlotSwap] = []
        self.swap_ins: list[SlotSwap] = []
        self.in_flight: deque[IssuedBatch] = deque()
        self.block_deltas: list[BlockDelta] = []
        self.attempts: dict[bytes, int] = {}  # the highest that the report names, of every request in it
        seen = [(slot.request_id, slot.attempt) for slot in report.slots]
        seen += [(slot.request_id, slot.attempt) for slot in report.dropped]
        for request_id, attempt in seen:
            self.attempts[request_id] = max(attempt, self.attempts.get(request_id, 0))
        self.given_up: dict[
            bytes, SlotReport
        ] = {}  # orphans' slots that nobody has come for in time, or who came with other tokens
        self._late_drops: list[SlotDrop] = []  # for the batch after the next
        self._prefills: dict[bytes, Sequence] = {}  # who may be one of `prefills`
        self._rank = running_rank(config.queue_order)
        self._last_step = report.last_step
        self._free_slots: list[int] = []

    @property
    def boot_id(self) -> bytes:
        """The worker's process incarnation."""
        return self.description.boot_id

    @property
    def has_orders(self) -> bool:
        """Whether the worker is to be told anything beside rows: slots to drop or to swap, or that a dropped slot can be forgotten."""
        owes_sweep = self.sweep.owes_batch(self.next_step, self.durable_step)
        return bool(self.drops or self.swap_outs or self.swap_ins) or owes_sweep

    @property
    def is_full(self) -> bool:
        """Whether as many batches are in flight as may be, beside one of latecomers."""
        return len(self.in_flight) - self._has_latecomers >= self.batches_max

    @property
    def takes_latecomers(self) -> bool:
        """Whether there may be one batch more, of prompts alone: the worker computes it together with the one before, where that still waits."""
        return self._takes_one_more and self.is_full and not self._has_latecomers

    @property
    def _has_latecomers(self) -> bool:
        return any(batch.are_latecomers for batch in self.in_flight)

    def lane_rows(self) -> LaneRows:
        """The running sequences that hold lanes, by slot: so they mostly follow each other in the columns."""
        if self._lane_rows.version != self.lanes.version:
            held = [sequence for sequence in self.running.values() if sequence.ledger.lanes is not None]
            held.sort(key=lambda sequence: sequence.slot or 0)
            self._lane_rows = LaneRows.of(self.lanes, held)
        return self._lane_rows

    @property
    def seats_left(self) -> int:
        """How many more sequences may be admitted: up to the limit, beyond which it may have taken over some, with slots that no orphan holds;
        and none while somebody is swapped out, who comes back first."""
        return max(0, min(self.running_max - len(self.running), len(self._free_slots))) if not self.swapped else 0

    @property
    def takes_requests(self) -> bool:
        """Whether sequences may be admitted: it is there, and is to stay."""
        return self.is_attached and not self.is_leaving

    @property
    def is_leaving(self) -> bool:
        """Whether its requests are to go to others."""
        return self.is_ending or self.is_drained

    @property
    def num_requests(self) -> int:
        """Requests that hold a slot on it."""
        return len(self.running) + len(self.swapped) + len(self.orphans)

    @property
    def num_free_tokens(self) -> int:
        """Tokens for which there are free blocks."""
        return self.manager.num_free_blocks * self.manager.block_size

    @property
    def num_pending_tokens(self) -> int:
        """Positions of its sequences' known tokens that no batch computes yet, less the one that a decode leaves to each."""
        ledgers = (sequence.ledger for sequence in self.running.values())
        return sum(max(0, ledger.num_tokens - ledger.scheduled_len - 1) for ledger in ledgers)

    def is_slow(self, now_us: int) -> bool:
        """Whether its oldest batch in flight has taken so long that nobody should wait for its next one."""
        return bool(self.in_flight) and now_us - self.progress_us > PATIENCE_US

    def can_hold(self, sequence: Sequence) -> bool:
        """Whether the pool holds a sequence to its end; its last token needs no KV."""
        return sequence.tokens_max - 1 <= self.description.geometry.num_tokens

    @property
    def num_held_tokens(self) -> int:
        """Tokens whose KV its sequences hold, in whole blocks."""
        return (self.manager.num_blocks - self.manager.num_free_blocks) * self.manager.block_size

    # -- taking over what the worker holds

    def adopt(
        self, held: list[tuple[Sequence, SlotReport]], orphans: Iterable[SlotReport], published: Iterable[PublishedBlock]
    ) -> None:
        """Go on with these sequences in their slots, hold the orphans', and give up every other reported slot's blocks.

        `published` are the prefix-cache entries that hold. Drops for the other slots are the caller's.
        """
        for sequence, slot in held:
            self._go_on(sequence, slot)
        self.orphans = {slot.request_id: Orphan(slot, reported_table(slot)) for slot in orphans}
        tables = [HeldTable(sequence.table, slot.token_ids, sequence.ledger.computed_len) for sequence, slot in held]
        tables += [HeldTable(orphan.table, orphan.slot.token_ids, orphan.slot.computed_len) for orphan in self.orphans.values()]
        whole_cache = self.manager.adopt(tables, published, self._last_step)
        self.manager.take_changes()  # the whole is told
        self.block_deltas.append(BlockDelta(self.name, self.boot_id, whole_cache, ()))
        taken = {slot.slot for _, slot in held} | {orphan.slot.slot for orphan in self.orphans.values()}
        self._free_slots = [slot for slot in range(self.description.limits.max_num_seqs) if slot not in taken]
        heapify(self._free_slots)

    def succeed(self, earlier: "Replica") -> None:
        """Go on counting where the same worker's replica stopped, and void what it has told of the prefix cache."""
        self.block_deltas = [*earlier.take_block_deltas(), *self.block_deltas]
        self.manager.stats = earlier.manager.stats
        self.step_times = earlier.step_times
        self.step_times.restart()
        if earlier.boot_id != self.boot_id:
            return  # the journal forgets an earlier boot by itself
        self.next_step = max(self.next_step, earlier.next_step)
        self.applied_step, self.durable_step = earlier.applied_step, earlier.durable_step
        self.is_drained = earlier.is_drained
        stale = tuple(earlier.manager.published().block_ids.tolist())
        self.block_deltas.insert(-1, BlockDelta(self.name, self.boot_id, (), stale))
        if earlier.sweep.is_pending:  # its report has told again of what was forgotten
            self.forget_unused()

    def adopt_orphan(self, sequence: Sequence) -> None:
        """The orphan's request has come: it goes on in its slot, as far as its ids agree (checked by the caller)."""
        orphan = self.orphans.pop(sequence.request_id)
        sequence.table = orphan.table
        self._go_on(sequence, orphan.slot)

    def drop_orphan(self, request_id: bytes) -> None:
        """Give up an orphan's slot and blocks."""
        orphan = self.orphans.pop(request_id)
        self.given_up[request_id] = orphan.slot
        self.manager.free(orphan.table)
        heappush(self._free_slots, orphan.slot.slot)
        self.drop_reported(orphan.slot, None)

    def drop_reported(self, slot: SlotReport, finish: Finish | None) -> None:
        """Tell the worker to give up a slot that it reported and nobody goes on with."""
        self.drops.append(SlotDrop(slot.slot, slot.request_id, slot.attempt, finish))

    def forget_unused(self) -> int:
        """Forget what is cached and no table holds; returns of how many blocks. The worker is to forget the slots dropped until now, too: its
        next report would bring their content back."""
        self.sweep.wanted_step = self.next_step
        return self.manager.forget_unused()

    # -- sequences coming and going

    def seat(self, sequence: Sequence) -> None:
        """Give an admitted sequence, whose table is filled, the lowest free slot."""
        sequence.run(self.name, heappop(self._free_slots))
        self._add_running(sequence)

    def swap_out(self, sequence: Sequence) -> HostPoolExhausted | None:
        """Move the KV of a running sequence to the host, by the next batch; what batches in flight compute moves with it. All or nothing."""
        assert sequence.has_entered, "the worker holds other ids in this slot"
        pairs = self.manager.swap_out(sequence.table, sequence.ledger.scheduled_len)
        if isinstance(pairs, HostPoolExhausted):
            return pairs
        sequence.swap_out()
        self.swapped[sequence.request_id] = self.running.pop(sequence.request_id)
        self.pace.leave()
        self.swap_outs.append(slot_swap(sequence, sequence.table.host_block_ids, pairs))
        return None

    def swap_in(self, sequence: Sequence, match: PrefixMatch, num_tokens: int) -> PoolExhausted | None:
        """Move the KV of a swapped sequence back into the pool, by the next batch, with blocks for `num_tokens` tokens; only where nothing of
        it is in flight. All or nothing.

        Where the worker holds other ids in its slot, it enters that anew after that batch, with its KV kept.
        """
        assert not sequence.ledger.positions_in_flight, "outputs of a swapped sequence are still to come"
        pairs = self.manager.swap_in(sequence.table, match, num_tokens)
        if isinstance(pairs, PoolExhausted):
            return pairs
        sequence.swap_in()
        del self.swapped[sequence.request_id]
        self._add_running(sequence)
        self.swap_ins.append(slot_swap(sequence, sequence.table.block_ids, pairs))
        if not sequence.has_entered:
            self._late_drops.append(slot_drop(sequence, None))
        return None

    def is_swapping_in(self, sequence: Sequence) -> bool:
        """Whether a running sequence's KV comes back with the next batch: until then it cannot leave again."""
        return any(swap.slot == sequence.slot for swap in self.swap_ins)

    def vacate(self, sequence: Sequence, finish: Finish | None) -> None:
        """Take slot and blocks from a sequence; `finish` None means that it will be back."""
        assert sequence.slot is not None
        del (self.running if sequence.status is SequenceStatus.RUNNING else self.swapped)[sequence.request_id]
        self.drops.append(slot_drop(sequence, finish))
        heappush(self._free_slots, sequence.slot)
        self.manager.free(sequence.table)
        if sequence.output_len:
            self.pace.leave()

    def lose(self) -> list[Sequence]:
        """The worker is gone: take everything from its sequences, swapped ones too, and return them. Its next report tells of orphans anew."""
        self.is_attached = False
        self.in_flight.clear()
        self.sweep.void()
        for orphan in self.orphans.values():
            self.manager.free(orphan.table)
            heappush(self._free_slots, orphan.slot.slot)
        self.orphans.clear()
        lost = [*self.running.values(), *self.swapped.values()]
        for sequence in lost:
            self.vacate(sequence, None)
        return lost

    def _go_on(self, sequence: Sequence, slot: SlotReport) -> None:
        """A sequence goes on in a reported slot. Where the slot's ids differ it enters the slot anew: a swapped one once it is back."""
        sequence.continue_in(slot, self.name)
        if slot.is_swapped:
            self.swapped[sequence.request_id] = sequence
            return
        self._add_running(sequence)
        if not sequence.has_entered:
            self.drops.append(slot_drop(sequence, None))

    def prefills(self) -> list[Sequence]:
        """Of `running`, in order, those whose prefill goes on. Looks only at who was one when last asked, or came since: a decode never
        becomes a prefill but by leaving and coming back."""
        for request_id, sequence in list(self._prefills.items()):
            if self.running.get(request_id) is not sequence or sequence.is_past_prefill:
                del self._prefills[request_id]
        return sorted(self._prefills.values(), key=self._rank)

    def _add_running(self, sequence: Sequence) -> None:
        """Put a sequence into `running`, which stays in order."""
        self._prefills[sequence.request_id] = sequence
        last = next(reversed(self.running.values()), None)
        self.running[sequence.request_id] = sequence
        if last is not None and self._rank(last) > self._rank(sequence):
            self.running = {item.request_id: item for item in sorted(self.running.values(), key=self._rank)}

    # -- batches

    def issue(self, plan: StepPlan, epoch: Epoch) -> ScheduledBatch:
        """The plan as the next batch; it is in flight from now on."""
        step_id = self.next_step
        self.next_step += 1
        self.in_flight.append(plan.issued(step_id))
        drops, self.drops, self._late_drops = tuple(self.drops), self._late_drops, []
        swap_outs, self.swap_outs = tuple(self.swap_outs), []
        swap_ins, self.swap_ins = tuple(self.swap_ins), []
        zero_blocks = self.manager.seal_batch()
        self.sweep.issued(self.durable_step)
        slots, counts, context_lens, new_block_counts = plan.columns()
        return ScheduledBatch(
            epoch=epoch,
            nonce=self.nonce,
            step_id=step_id,
            durable_step=self.durable_step,
            entries=tuple(plan.entries),
            drops=drops,
            slots=slots,
            num_scheduled_tokens=counts,
            context_lens=context_lens,
            new_block_counts=new_block_counts,
            new_block_ids=np.array(plan.new_block_ids, np.int32),
            num_decodes=plan.num_decodes,
            is_dummy_run=plan.is_dummy,
            swap_outs=swap_outs,
            swap_ins=swap_ins,
            copies=np.array(plan.copies, np.int32) if plan.copies else NO_PAIRS,
            zero_blocks=np.array(zero_blocks, np.int32) if zero_blocks else NO_BLOCKS,
            seen_step=max(self.applied_step, self._last_step),
        )

    def answered(self, output: ScheduledBatchOutput) -> IssuedBatch | None:
        """The batch that `output` answers, no longer in flight; None for an answer to anything but the oldest one of this attach.

        Raises BadOutput, changing nothing, where the columns do not fit the batch.
        """
        if output.nonce != self.nonce or not self.in_flight or output.step_id != self.in_flight[0].step_id:
            return None
        self.in_flight[0].check(output)
        self.applied_step = output.step_id
        self.sweep.answered()
        return self.in_flight.popleft()

    def take_block_deltas(self) -> list[BlockDelta]:
        """What changed in the prefix cache since the last call."""
        deltas, self.block_deltas = self.block_deltas, []
        changes = self.manager.take_changes()
        if changes.published or changes.unpublished:
            deltas.append(BlockDelta(self.name, self.boot_id, changes.published, changes.unpublished))
        return deltas

    def check_integrity(self) -> None:
        """Assert that sequences, slots, blocks and batches in flight tell one story."""
        held = [*self.running.values(), *self.swapped.values()]
        tables = [sequence.table for sequence in held] + [orphan.table for orphan in self.orphans.values()]
        self.manager.check_integrity(tables)
        taken = [orphan.slot.slot for orphan in self.orphans.values()] + self._free_slots
        for sequence in held:
            assert sequence.slot is not None
            taken.append(sequence.slot)
        assert sorted(taken) == list(range(self.description.limits.max_num_seqs)), "a slot is lost or taken twice"
        ranks = [self._rank(sequence) for sequence in self.running.values()]
        assert ranks == sorted(ranks), "the running ones are out of order"
        prefills = [sequence for sequence in self.running.values() if not sequence.is_past_prefill]
        assert self.prefills() == prefills, "a prefill is forgotten"
        assert not (self.swap_outs or self.swap_ins), "a swap waits for a batch"
        check_rows(self, held)
