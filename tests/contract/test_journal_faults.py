"""The journal against a store whose calls are lost, repeated, late or forgotten: nothing unwritten is ever reported as written."""

import random
from dataclasses import dataclass, field

import pytest
from journal_story import Story, facts

from services.scheduler.core.journal import Journal, WorkerStep
from services.scheduler.core.journal_call import Applied, Failed, JournalCall, JournalReply
from services.scheduler.core.record import StoredState
from services.scheduler.store.memory import MemoryStore
from tessera.values.config import Config
from tessera.values.identity import Epoch

EPOCH = Epoch(1, b"a" * 16)
WAIT_MS = 200
STEP_US = 10_000
BOOT = b"b" * 16


@dataclass
class Simulation:
    """One leader's journal, its store, and what every record number means."""

    rng: random.Random
    backlog_max: int
    now_us: int = 0
    history: dict[int, object] = field(default_factory=dict)
    zombies: list[JournalCall] = field(default_factory=list)
    saved: list[MemoryStore] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.journal = Journal(Config(journal_wait_ms=WAIT_MS, journal_backlog_max=self.backlog_max), 1, 0)
        self.store = MemoryStore()
        self.store.epoch = EPOCH
        self.story = Story(self.rng)
        self.live = StoredState()
        self.history[0] = facts(self.live)

    def record(self) -> None:
        record = self.journal.add(self.story.step(), self.now_us, WorkerStep("w", BOOT, self.journal.last_record + 1))
        self.live.apply(record)
        self.history[record.number] = facts(self.live)

    def exchange(self, fault_rate: float) -> None:
        """At most one call and its answer."""
        call = self.journal.next_call(self.now_us)
        if call is None:
            return
        assert self.journal.next_call(self.now_us) is None, "two calls in flight"
        acked = self.journal.acked
        self.journal.on_reply(self.reply(call, fault_rate), self.now_us)
        if self.journal.acked > acked:
            assert self.store.stored().state.last >= self.journal.acked, "acknowledged and not in the store"
        assert self.journal.durable_step("w", BOOT) <= self.journal.acked

    def reply(self, call: JournalCall, fault_rate: float) -> JournalReply:
        rng = self.rng
        if self.zombies and rng.random() < 0.3:
            self.store.execute(EPOCH, self.zombies.pop(rng.randrange(len(self.zombies))))
        if rng.random() >= fault_rate:
            return self.store.execute(EPOCH, call)
        match rng.choice(("lost", "reply lost", "late", "twice", "rollback", "empty")):
            case "reply lost":
                self.store.execute(EPOCH, call)
            case "late":
                self.zombies.append(call)
            case "twice":
                self.zombies.append(call)
                return self.store.execute(EPOCH, call)
            case "rollback" if self.saved:
                self.store = rng.choice(self.saved).save()
            case "empty" if rng.random() < 0.2:
                self.store = MemoryStore()
        return Failed("simulated")

    def check(self) -> None:
        state = self.store.stored().state
        assert facts(state) == self.history[state.last], f"the store's state is not that of record {state.last}"

    def run(self, steps: int, fault_rate: float) -> None:
        for _ in range(steps):
            self.now_us += STEP_US
            if self.rng.random() < 0.7:
                self.record()
            for _ in range(self.rng.choice((0, 1, 1, 1, 4))):
                self.exchange(fault_rate)
            self.check()
            if self.rng.random() < 0.1:
                self.saved = [*self.saved[-3:], self.store.save()]


@pytest.mark.parametrize("seed", range(12))
def test_the_store_always_holds_the_state_of_its_last_record(seed: int) -> None:
    rng = random.Random(seed)
    simulation = Simulation(rng, backlog_max=rng.choice((3, 20, 4096)))
    for fault_rate in (0.0, 0.4, 0.9, 0.2):
        simulation.run(50, fault_rate)

    simulation.zombies.clear()
    for _ in range(150):
        simulation.now_us += STEP_US
        simulation.exchange(0.0)
    journal = simulation.journal
    simulation.record()
    simulation.run(20, 0.0)
    while journal.acked < journal.last_record:
        simulation.exchange(0.0)
    assert journal.is_durable(simulation.now_us)
    assert journal.durable_step("w", BOOT) == journal.last_record
    assert facts(simulation.store.stored().state) == simulation.history[journal.last_record]
    assert not simulation.store.log_len or journal.next_call(simulation.now_us) is None


def test_the_same_call_is_made_again_after_a_failure() -> None:
    simulation = Simulation(random.Random(1), backlog_max=100)
    simulation.run(20, 0.0)
    simulation.record()
    call = simulation.journal.next_call(simulation.now_us)
    assert call is not None
    simulation.journal.on_reply(Failed("no"), simulation.now_us)
    assert simulation.journal.next_call(simulation.now_us) is None, "retried without a pause"
    wake_us = simulation.journal.wake_us(simulation.now_us)
    assert wake_us is not None
    simulation.record()
    assert simulation.journal.next_call(wake_us) is call
    simulation.journal.on_reply(Applied(simulation.journal.last_record), wake_us)
