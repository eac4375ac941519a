"""Random lives of one ledger beside a plain model of it: a worker that knows every token and counts positions one by one."""

from collections import deque
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.scheduler.core.ledger import Ledger
from services.scheduler.core.tokens import Tokens


def token_at(position: int) -> int:
    return 1000 + position


@dataclass
class Row:
    """A row in flight. `start` and `seen` are what its batch says; `sampled` and `end` what the worker made of it."""

    number: int
    start: int
    count: int
    room: int  # for drafts
    seen: int
    samples: bool
    sampled: list[int] | None = None


class LedgerMachine(RuleBasedStateMachine):
    """`num_ids` and `computed_len` are the worker's; `unused` the positions for drafts that came to nothing, by row."""

    @initialize(prompt_len=st.integers(1, 9), k=st.integers(0, 4), depth=st.integers(1, 3))
    def start(self, prompt_len: int, k: int, depth: int) -> None:
        self.k, self.depth = k, depth
        self.ledger = Ledger(Tokens(np.array([token_at(position) for position in range(prompt_len)], np.int32)))
        self.rows: deque[Row] = deque()
        self.num_rows = self.seen = 0
        self.enter()

    def enter(self) -> None:
        """The worker has what the ledger has, and nothing is in flight."""
        self.num_ids, self.computed_len = self.ledger.num_tokens, self.ledger.computed_len
        self.unused: list[tuple[int, int]] = []
        self.rows.clear()

    def issue(self, count: int, room: int, samples: bool) -> None:
        self.num_rows += 1
        start = self.ledger.scheduled_len - count
        self.rows.append(Row(self.num_rows, start, count, room, self.seen, samples))

    @precondition(lambda self: len(self.rows) < self.depth and self.ledger.num_remaining > 1)
    @rule(data=st.data())
    def schedule_prefill(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.ledger.num_remaining))
        samples = self.ledger.schedule(count)
        self.issue(count, 0, samples)

    @precondition(lambda self: len(self.rows) < self.depth and self.ledger.num_remaining == 1)
    @rule(data=st.data())
    def schedule_decode(self, data: st.DataObject) -> None:
        room = data.draw(st.integers(0, self.k))
        self.ledger.schedule_decode(1 + room)
        self.issue(1 + room, room, True)

    @precondition(lambda self: any(row.sampled is None for row in self.rows))
    @rule(data=st.data())
    def execute(self, data: st.DataObject) -> None:
        """The worker computes its oldest row: positions of the batch are lowered by what later rows than the seen one left unused."""
        row = next(row for row in self.rows if row.sampled is None)
        lowered = sum(number for step, number in self.unused if step > row.seen)
        assert row.start - lowered == self.computed_len, "the row starts where the KV ends"
        if not row.samples:
            self.computed_len += row.count
            row.sampled = []
            return
        num_accepted = data.draw(st.integers(0, row.room))
        assert self.computed_len + row.count - row.room == self.num_ids, "a row samples behind the last token"
        self.computed_len += row.count - row.room + num_accepted
        row.sampled = [token_at(position) for position in range(self.num_ids, self.num_ids + 1 + num_accepted)]
        self.num_ids += 1 + num_accepted
        self.unused.append((row.number, row.room - num_accepted))

    @precondition(lambda self: self.rows and self.rows[0].sampled is not None)
    @rule()
    def commit(self) -> None:
        row = self.rows.popleft()
        assert row.sampled is not None
        self.ledger.commit(row.count, row.sampled, row.room)
        self.seen = row.number

    @rule(keeps=st.booleans())
    def preempt(self, keeps: bool) -> None:
        """Outputs on the way are dropped; a prefix of what is computed may be found again."""
        self.ledger.restart(self.ledger.computed_len // 2 if keeps else 0)
        self.enter()

    @rule()
    def take_over(self) -> None:
        """Outputs on the way are lost, and the worker reports what it holds: accepted drafts alone are computed."""
        self.ledger.token_ids.replace_output(np.array([token_at(position) for position in range(self.num_ids)], np.int32))
        self.ledger.restart(self.computed_len)
        self.enter()
        self.seen = self.num_rows

    @precondition(lambda self: self.ledger.output_len and not self.rows)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        """It ends, and, as no sequence does, goes on: from what was left."""
        self.ledger.cut(data.draw(st.integers(0, self.ledger.output_len)))
        self.enter()

    @invariant()
    def counts_are_true(self) -> None:
        if not hasattr(self, "ledger"):
            return
        ledger = self.ledger
        assert ledger.token_ids == [token_at(position) for position in range(ledger.num_tokens)]
        assert ledger.num_tokens <= self.num_ids and ledger.computed_len <= self.computed_len < self.num_ids
        assert ledger.positions_in_flight == sum(row.count for row in self.rows) >= ledger.drafts_in_flight
        assert ledger.drafts_in_flight == sum(row.room for row in self.rows) >= 0
        assert 0 <= ledger.computed_len < ledger.num_tokens <= ledger.scheduled_len + ledger.num_remaining
        assert ledger.num_placeholders == sum(1 + row.room for row in self.rows if row.samples)
        unstarted = [row for row in self.rows if row.sampled is None]
        most = self.computed_len + sum(row.count for row in unstarted)
        least = most - sum(row.room for row in unstarted)
        assert ledger.scheduled_len - ledger.drafts_in_flight <= least <= most <= ledger.scheduled_len, "not an upper bound"
        if not self.rows:
            assert (ledger.num_tokens, ledger.computed_len) == (self.num_ids, self.computed_len)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
