"""Random schedules: admissions with shared prefixes, chunks, decodes, preemptions, resumptions, refusals. After every step each token is
the model's own continuation, and the report is what a shadow of the slots says."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from engine_driver import BLOCK, LIMITS, MAX_LEN, NUM_BLOCKS, VOCAB, EngineDriver, Row, drop, entry, request_id
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from model_worker.batch_refused import BatchRefused
from model_worker.models.deterministic import next_tokens
from tessera.values.batch import SlotDrop, SlotEntry

NUM_SLOTS = 2 * LIMITS.max_num_seqs


@dataclass
class Sequence:
    """What the test knows of a request; `blocks_shared` leading blocks belong to somebody else too."""

    name: str
    ids: list[int]
    prompt_len: int
    attempt: int = 0
    table: list[int] = field(default_factory=list)
    computed: int = 0


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.driver = EngineDriver()
        self.live: dict[int, Sequence] = {}
        self.waiting: list[Sequence] = []
        self.dropped: list[tuple[bytes, int, list[int], list[int], int, int]] = []
        self.refs = [0] * NUM_BLOCKS
        self.last_write = [0] * NUM_BLOCKS
        self.count = 0

    def allocate(self, count: int) -> list[int] | None:
        free = [block for block, refs in enumerate(self.refs) if not refs]
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
        """Drops, then entries, then rows for some of the slots, in one batch."""
        step_id = self.driver.step + data.draw(st.integers(1, 3))
        drops = [self.preempt(slot, step_id) for slot in sorted(self.live) if data.draw(st.integers(0, 7)) == 0]
        durable = data.draw(st.integers(0, step_id))
        self.dropped = [slot for slot in self.dropped if slot[-1] > durable]
        decodes: list[Row] = []
        chunks: list[Row] = []
        budget = LIMITS.max_num_batched_tokens
        for slot in sorted(self.live):
            count = data.draw(st.integers(0, 5)) if len(decodes) + len(chunks) < LIMITS.max_num_seqs else 0
            row = self.advance(slot, count, budget)
            if row:
                budget -= row.count
                (decodes if row.count == 1 else chunks).append(row)
        entries = []
        while self.waiting and len(decodes) + len(chunks) < LIMITS.max_num_seqs and data.draw(st.booleans()):
            placed = self.admit(data.draw(st.integers(1, 9)), budget)
            if placed is None:
                break
            entries.append(placed[0])
            budget -= placed[1].count
            (decodes if placed[1].count == 1 else chunks).append(placed[1])
        self.run(step_id, durable, drops, entries, [*decodes, *chunks])

    def preempt(self, slot: int, step_id: int) -> SlotDrop:
        sequence = self.live.pop(slot)
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
        for other in self.live.values():
            full = 0
            while (full + 1) * BLOCK <= min(other.computed, len(ids) - 1) and other.ids[
                full * BLOCK : (full + 1) * BLOCK
            ] == ids[full * BLOCK : (full + 1) * BLOCK]:
                full += 1
            best = max(best, other.table[:full], key=len)
        return best

    def run(self, step_id: int, durable: int, drops: list[SlotDrop], entries: list[SlotEntry], rows: list[Row]) -> None:
        output = self.driver.run(rows, entries, drops, step_id=step_id, durable_step=durable)
        assert output.row_errors == ()
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
        dropped = [
            (s.request_id, s.attempt, s.token_ids.tolist(), s.block_table.tolist(), s.computed_len, s.drop_step)
            for s in report.dropped
        ]
        assert dropped == self.dropped


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
