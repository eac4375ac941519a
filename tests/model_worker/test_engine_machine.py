"""Random schedules: admissions with shared prefixes, forks, chunks, decodes, preemptions, resumptions, swaps out and in, zeroed blocks,
dummy runs, refusals. After every step each token is the model's own continuation, and the report is what a shadow of the slots says."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from engine_driver import (
    BLOCK,
    LIMITS,
    MAX_LEN,
    NUM_BLOCKS,
    NUM_HOST_BLOCKS,
    VOCAB,
    EngineDriver,
    Row,
    drop,
    entry,
    int32,
    pairs,
    request_id,
    swap,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from model_worker.batch_refused import BatchRefused
from model_worker.models.deterministic import next_tokens
from tessera.values.batch import SlotDrop, SlotEntry, SlotSwap

NUM_SLOTS = 2 * LIMITS.max_num_seqs


@dataclass
class Sequence:
    """What the test knows of a request; while it is swapped out `table` names host blocks."""

    name: str
    ids: list[int]
    prompt_len: int
    attempt: int = 0
    table: list[int] = field(default_factory=list)
    computed: int = 0
    is_swapped: bool = False


@dataclass
class Moves:
    """What one batch moves, and the blocks that it gives away, which may be zeroed."""

    swap_outs: list[SlotSwap] = field(default_factory=list)
    swap_ins: list[SlotSwap] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    given: list[int] = field(default_factory=list)


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.driver = EngineDriver()
        self.live: dict[int, Sequence] = {}
        self.waiting: list[Sequence] = []
        self.dropped: list[tuple[bytes, int, list[int], list[int], int, int]] = []
        self.refs = [0] * NUM_BLOCKS
        self.host_used: set[int] = set()
        self.last_write = [0] * NUM_BLOCKS
        self.count = 0

    def allocate(self, count: int) -> list[int] | None:
        free = [block for block, refs in enumerate(self.refs) if not refs]
        count = max(0, count)  # a table may have been grown already
        return free[:count] if len(free) >= count else None

    def hold(self, blocks: list[int]) -> None:
        for block in blocks:
            self.refs[block] += 1

    @rule(data=st.data(), prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14))
    def submit(self, data: st.DataObject, prompt: list[int]) -> None:
        """A new request, perhaps one that begins like another."""
        if self.live and data.draw(st.booleans()):
            other = self.live[data.draw(st.sampled_from(sorted(self.live)))]
            prompt = [*other.ids[: data.draw(st.integers(0, len(other.ids)))], *prompt][: MAX_LEN - 4]
        self.count += 1
        self.waiting.append(Sequence(str(self.count), prompt, len(prompt)))

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Drops, then swaps, then entries, then rows for some of the slots, in one batch."""
        step_id = self.driver.step + data.draw(st.integers(1, 3))
        drops = [self.preempt(slot, step_id) for slot in sorted(self.live) if data.draw(st.integers(0, 7)) == 0]
        durable = data.draw(st.integers(0, step_id))
        self.dropped = [slot for slot in self.dropped if slot[-1] > durable]
        moves = self.moves = Moves()
        for slot in sorted(self.live):
            if not self.live[slot].is_swapped and data.draw(st.integers(0, 5)) == 0:
                self.swap_out(slot)
        gone = {slot.slot for slot in moves.swap_outs}
        freed: set[int] = set()
        for slot in sorted(self.live):
            if self.live[slot].is_swapped and slot not in gone and data.draw(st.booleans()):
                freed |= self.swap_in(slot, data.draw(st.integers(0, 2)))
        decodes: list[Row] = []
        chunks: list[Row] = []
        budget = LIMITS.max_num_batched_tokens
        for slot in sorted(slot for slot in self.live if not self.live[slot].is_swapped):
            count = data.draw(st.integers(0, 5)) if len(decodes) + len(chunks) < LIMITS.max_num_seqs else 0
            row = self.advance(slot, count, budget)
            if row:
                budget -= row.count
                (decodes if row.count == 1 else chunks).append(row)
        entries = []
        while self.waiting and len(decodes) + len(chunks) < LIMITS.max_num_seqs and data.draw(st.booleans()):
            parents = [slot for slot in sorted(self.live) if self.can_fork(slot)]
            if parents and budget and data.draw(st.booleans()):
                placed = self.fork(data.draw(st.sampled_from(parents)))
            else:
                placed = self.admit(data.draw(st.integers(1, 9)), budget)
            if placed is None:
                break
            entries.append(placed[0])
            budget -= placed[1].count
            (decodes if placed[1].count == 1 else chunks).append(placed[1])
        self.host_used -= freed
        zeroed = [block for block in moves.given if data.draw(st.integers(0, 3)) == 0]
        self.run(step_id, durable, drops, entries, [*decodes, *chunks], zeroed)

    def swap_out(self, slot: int) -> None:
        sequence = self.live[slot]
        count = -(-sequence.computed // BLOCK)
        table = [block for block in range(NUM_HOST_BLOCKS) if block not in self.host_used][:count]
        if len(table) == count:
            self.moves.swap_outs.append(
                swap(slot, table, list(zip(sequence.table, table, strict=False)), sequence.name, sequence.attempt)
            )
            self.host_used |= set(table)
            for block in sequence.table:
                self.refs[block] -= 1
            sequence.table, sequence.is_swapped = table, True

    def swap_in(self, slot: int, growth: int) -> set[int]:
        """Bring a sequence back on the full blocks of whoever has its prefix; the host blocks that are free after the batch."""
        sequence = self.live[slot]
        shared = self.shared_prefix(sequence.ids)[: sequence.computed // BLOCK]
        # A block that was another slot's in front of this batch may have been swapped in by it.
        count = -(-sequence.computed // BLOCK)
        own = self.allocate(min(count + growth, -(-MAX_LEN // BLOCK)) - len(shared))
        if own is None:
            return set()
        host, sequence.table, sequence.is_swapped = sequence.table, [*shared, *own], False
        self.hold(sequence.table)
        moved = list(zip(host, sequence.table, strict=False))[len(shared) :]
        self.moves.swap_ins.append(swap(slot, sequence.table, moved, sequence.name, sequence.attempt))
        for _, block in moved:
            self.last_write[block] = -1  # by the step that is put together
        return set(host)

    def can_fork(self, slot: int) -> bool:
        """Whether a slot has computed its prompt, and not only comes back with this batch."""
        sequence = self.live[slot]
        back = {slot.slot for slot in self.moves.swap_ins}
        return not sequence.is_swapped and sequence.computed >= sequence.prompt_len and slot not in back

    def fork(self, parent_slot: int) -> tuple[SlotEntry, Row] | None:
        """A child of a live sequence: full blocks before the last prompt position shared, that position's block copied."""
        parent, slot = self.live[parent_slot], next((slot for slot in range(NUM_SLOTS) if slot not in self.live), None)
        own = self.allocate(1)
        if slot is None or own is None:
            return None
        shared = (parent.prompt_len - 1) // BLOCK
        self.count += 1
        child = Sequence(str(self.count), parent.ids[: parent.prompt_len], parent.prompt_len, 1)
        child.table, child.computed = [*parent.table[:shared], *own], parent.prompt_len - 1
        self.moves.copies.append((parent.table[shared], own[0]))
        self.last_write[own[0]] = -1
        self.hold(child.table)
        self.live[slot] = child
        return entry(slot, child.ids, child.table, child.name, cached=child.computed), Row(slot, 1, child.prompt_len)

    def preempt(self, slot: int, step_id: int) -> SlotDrop:
        sequence = self.live.pop(slot)
        if sequence.is_swapped:
            self.host_used -= set(sequence.table)
            sequence.table, sequence.computed = [], 0
        for block in sequence.table:
            self.refs[block] -= 1
        self.dropped.append(
            (request_id(sequence.name), sequence.attempt, list(sequence.ids), sequence.table, sequence.computed, step_id)
        )
        message = drop(slot, sequence.name, sequence.attempt)
        if len(sequence.ids) < MAX_LEN:
            self.waiting.append(Sequence(sequence.name, list(sequence.ids), sequence.prompt_len, sequence.attempt))
        return message

    def advance(self, slot: int, count: int, budget: int) -> Row | None:
        """A row for a live slot, its new blocks held; None where nothing is to be computed or the pool is full."""
        sequence = self.live[slot]
        count = min(count, len(sequence.ids) - sequence.computed, budget, MAX_LEN - sequence.computed)
        if count < 1:
            return None
        blocks = self.allocate(-(-(sequence.computed + count) // BLOCK) - len(sequence.table))
        if blocks is None:
            return None
        self.hold(blocks)
        self.moves.given += blocks
        sequence.table = [*sequence.table, *blocks]
        return Row(slot, count, sequence.computed + count, blocks)

    def admit(self, count: int, budget: int) -> tuple[SlotEntry, Row] | None:
        """An entry of the first waiting request, on the full blocks of whoever has the same prefix."""
        sequence = self.waiting[0]
        slot = next((slot for slot in range(NUM_SLOTS) if slot not in self.live), None)
        shared = self.shared_prefix(sequence.ids)
        cached = len(shared) * BLOCK
        count = min(count, len(sequence.ids) - cached, budget)
        own = self.allocate(-(-(cached + count) // BLOCK) - len(shared))
        if slot is None or count < 1 or own is None:
            return None
        self.waiting.pop(0)
        sequence.attempt += 1
        sequence.table, sequence.computed = [*shared, *own], cached
        self.hold(sequence.table)
        self.moves.given += own
        self.live[slot] = sequence
        placed = entry(
            slot,
            sequence.ids,
            sequence.table,
            sequence.name,
            cached=cached,
            attempt=sequence.attempt,
            prompt_len=sequence.prompt_len,
        )
        return placed, Row(slot, count, cached + count)

    def shared_prefix(self, ids: list[int]) -> list[int]:
        """The longest run of computed full blocks of a live sequence with the same ids, leaving at least one id to compute."""
        best: list[int] = []
        for other in (other for other in self.live.values() if not other.is_swapped):
            full = 0
            while (full + 1) * BLOCK <= min(other.computed, len(ids) - 1) and other.ids[
                full * BLOCK : (full + 1) * BLOCK
            ] == ids[full * BLOCK : (full + 1) * BLOCK]:
                full += 1
            best = max(best, other.table[:full], key=len)
        return best

    def run(
        self, step_id: int, durable: int, drops: list[SlotDrop], entries: list[SlotEntry], rows: list[Row], zeroed: list[int]
    ) -> None:
        output = self.driver.run(
            rows,
            entries,
            drops,
            step_id=step_id,
            durable_step=durable,
            swap_outs=tuple(self.moves.swap_outs),
            swap_ins=tuple(self.moves.swap_ins),
            copies=pairs(*self.moves.copies),
            zero_blocks=int32(zeroed),
        )
        assert output.row_errors == ()
        for block in zeroed:
            self.last_write[block] = step_id
        self.last_write = [step_id if step == -1 else step for step in self.last_write]
        tokens = iter(output.token_ids.tolist())
        for row, count in zip(rows, output.token_counts.tolist(), strict=True):
            sequence = self.live[row.slot]
            for position in range(row.context_len - row.count, row.context_len):
                self.last_write[sequence.table[position // BLOCK]] = step_id
            sequence.computed = row.context_len
            assert count == (row.context_len == len(sequence.ids))
            if count:
                token = next(tokens)
                assert token == next_tokens(sequence.ids, VOCAB)[0]
                sequence.ids.append(token)

    @rule(counts=st.lists(st.integers(1, 8), min_size=1, max_size=4))
    def dummy_run(self, counts: list[int]) -> None:
        """Rows of nobody; the invariant sees that nothing changed."""
        output = self.driver.run([Row(0, count, count + 3) for count in counts], is_dummy_run=True, durable_step=0)
        assert not output.token_counts.any() and output.row_errors == ()

    @rule(data=st.data())
    def refused(self, data: st.DataObject) -> None:
        """A row that starts one position late; the invariant sees that nothing changed."""
        if self.live:
            slot = data.draw(st.sampled_from(sorted(self.live)))
            with pytest.raises(BatchRefused):
                self.driver.run([Row(slot, 1, self.live[slot].computed + 2)], drops=[drop(slot, "stranger")])

    @invariant()
    def the_report_is_the_shadow_s(self) -> None:
        report = self.driver.engine.report(1)
        assert report.last_step == self.driver.step
        assert report.last_write_step.tolist() == self.last_write
        shown = [(s.slot, s.request_id, s.attempt, s.prompt_len, s.token_ids.tolist(), s.computed_len) for s in report.slots]
        expected = [
            (slot, request_id(s.name), s.attempt, s.prompt_len, s.ids, s.computed) for slot, s in sorted(self.live.items())
        ]
        assert shown == expected
        assert all(np.array_equal(s.block_table, self.live[s.slot].table) for s in report.slots)
        slots = self.driver.engine._slots
        assert slots.users.tolist() == self.refs
        assert set(np.flatnonzero(slots.host_users)) == self.host_used and slots.host_users.max() <= 1
        assert all(s.is_swapped == self.live[s.slot].is_swapped for s in report.slots)
        dropped = [
            (s.request_id, s.attempt, s.token_ids.tolist(), s.block_table.tolist(), s.computed_len, s.drop_step)
            for s in report.dropped
        ]
        assert dropped == self.dropped


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
