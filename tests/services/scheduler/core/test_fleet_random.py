"""Random lives of several workers under one leader after the other: whoever comes, goes, hangs or dies, every request gets the output it
would get alone, and nothing is left behind."""

import random
from collections.abc import Callable

import pytest
from fleet_rig import BROKEN, FleetRig
from scheduler_rig import own_stop

from services.scheduler.core.record import StoredState
from services.scheduler.core.recovery import GatewayClaim, join
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.worker_loss import LEFT
from tessera.values.admin import SetDrain, WorkerDrained, WorkerUndrained
from tessera.values.config import POLICIES, PREEMPTION_POLICIES, WORKER_CHOICES
from tessera.values.finish import FinishReason
from tessera.values.identity import Epoch

PREFIXES = ([], [10, 11, 12, 13], [10, 11, 12, 13, 14, 15, 16, 17], [20, 21, 22, 23])


class FleetLife:
    def __init__(self, seed: int, **given: object) -> None:
        self.random = random.Random(seed)
        choice = self.random.choice(WORKER_CHOICES)
        budget = self.random.choice((16, 24, 64))
        num_workers, num_blocks = self.random.randint(1, 3), self.random.choice((16, 30))
        drawn = {"max_num_seqs": 8, "max_num_batched_tokens": budget, "worker_choice": choice}
        self.rig = FleetRig(num_workers, num_blocks, **drawn | given)
        self.number = 0
        self.num_joined = 0
        self.away: set[str] = set()

    def run(self, num_events: int) -> None:
        events = [self.submit, self.submit, self.turns, self.turns, self.turns, self.turns]
        rare = self.rare_events()
        for _ in range(num_events):
            self.random.choice(events)()
            if self.random.random() < 0.25:
                self.random.choice(rare)()

    def rare_events(self) -> list[Callable[[], None]]:
        return [
            self.lose,
            self.come_back,
            self.kill,
            self.kill_twice,
            self.join,
            self.remove,
            self.take_over,
            self.abort,
            self.durable,
        ]

    def present(self) -> list[str]:
        return [name for name in self.rig.workers if name not in self.away]

    def submit(self) -> None:
        if not self.knows_largest():
            return
        for _ in range(self.random.randint(1, 4)):
            self.number += 1
            prompt = self.random.choice(PREFIXES) + [self.random.randint(30, 60) for _ in range(self.random.randint(1, 9))]
            self.rig.submit(self.number, prompt, max_tokens=self.random.randint(1, 16), seed=self.number)

    def turns(self) -> None:
        workers = self.rig.workers
        for _ in range(self.random.randint(1, 4)):
            self.rig.workers = {name: workers[name] for name in self.present()}
            self.rig.turn(self.random.choice((1, 2)))
            self.rig.workers = workers

    def lose(self) -> None:
        if self.present():
            name = self.random.choice(self.present())
            self.rig.lose(name, self.random.choice((LEFT, BROKEN, BROKEN)))
            self.away.add(name)

    def come_back(self) -> None:
        for name in sorted(self.away):
            self.rig.attach(name)
            self.away.discard(name)

    def kill(self) -> None:
        if self.present():
            name = self.random.choice(self.present())
            self.rig.kill(name)
            self.away.add(name)

    def kill_twice(self) -> None:
        """In the first batch of each boot, so that everybody in it has to be tried alone."""
        for name in self.present()[:1]:
            for _ in range(2):
                self.rig.schedule(name)
                self.rig.kill(name)
                self.rig.attach(name)
        for _ in range(20):  # who is killed four times in a row at one position ends
            self.turns()

    def join(self) -> None:
        if len(self.rig.workers) < 4:
            self.num_joined += 1
            self.rig.join(f"joined:{self.num_joined}", self.random.choice((6, 16, 30)))

    def remove(self) -> None:
        name = self.random.choice(sorted(self.rig.workers))
        if name != self.largest():  # else nobody may hold what was promised
            self.rig.scheduler.remove_worker(name, self.rig.now_us)
            self.rig.check()
            del self.rig.workers[name]
            self.away.discard(name)

    def knows_largest(self) -> bool:
        """Else less is promised than a request would get alone."""
        return self.rig.scheduler.replica(self.largest()) is not None

    def largest(self) -> str:
        return max(sorted(self.rig.workers), key=lambda name: self.rig.workers[name].geometry.num_blocks)

    def abort(self) -> None:
        live = [sequence for sequence in self.rig.scheduler.requests() if sequence.finish is None]
        if live:
            self.rig.scheduler.abort(self.random.choice(live).request_id, self.rig.now_us)
            self.rig.check()

    def durable(self) -> None:
        for name in self.present():
            replica = self.rig.scheduler.replica(name)
            if replica is not None:
                self.rig.scheduler.set_durable_step(name, replica.boot_id, replica.applied_step)

    def take_over(self) -> None:
        """The next leader, which not every worker answers in time."""
        rig = self.rig
        live = [sequence for sequence in rig.scheduler.requests() if sequence.finish is None]
        claims = [GatewayClaim(sequence.request_id, 0, sequence.output_token_ids()) for sequence in live]
        rig.epoch = Epoch(rig.epoch.number + 1, b"leader")
        names = sorted(rig.workers)
        there = self.random.sample(names, self.random.randint(1, len(names)))
        reports = {}
        for name in sorted(there):
            rig.nonce += 1
            reports[name] = rig.workers[name].attach(rig.epoch, rig.nonce)
        self.away = set(names) - set(there)
        rig.scheduler = Scheduler(rig.config, rig.epoch)
        rig.scheduler.restore(join(rig.state, reports, claims, own_stop), reports, rig.now_us)
        rig.state = StoredState()
        rig.check()
        if self.random.random() < 0.5:
            self.come_back()
        rig.scheduler.expire_orphans()
        rig.check()

    def end(self) -> None:
        self.come_back()
        self.rig.finish_all(turns_max=2000)
        assert not any(worker.slots for worker in self.rig.workers.values())
        for sequence in self.rig.scheduler.requests():
            finish = sequence.finish
            assert finish is not None and finish.reason is not FinishReason.ERROR, finish
            if finish.reason is not FinishReason.ABORTED:
                self.as_alone(sequence)

    def as_alone(self, sequence: Sequence) -> None:
        self.rig.assert_as_alone(int.from_bytes(sequence.request_id, "big"))


class ServedLife(FleetLife):
    """In which gateways and operators have their say as well: forks, stops, contradictions, departures, drains, pauses and emptied caches. Of an
    output that somebody has cut or replaced only the journal and the parts of the scheduler are compared."""

    def __init__(self, seed: int, **given: object) -> None:
        super().__init__(seed, **given)
        self.altered: set[bytes] = set()

    def rare_events(self) -> list[Callable[[], None]]:
        own = [
            self.fork,
            self.fork,
            self.stop,
            self.contradict,
            self.leave,
            self.pause,
            self.resume,
            self.resume,
            self.empty,
            self.drain,
            self.undrain,
        ]
        return super().rare_events() + own + own

    def live(self) -> list[Sequence]:
        return [sequence for sequence in self.rig.scheduler.requests() if sequence.finish is None]

    def fork(self) -> None:
        if self.live() and self.knows_largest():
            parent = self.random.choice(self.live()).submission
            self.number += 1
            prompt = parent.prompt_token_ids.tolist()
            self.rig.submit(
                self.number, prompt, max_tokens=self.random.randint(1, 16), seed=self.number, fork_of=parent.request_id
            )

    def stop(self) -> None:
        found = [sequence for sequence in self.rig.scheduler.requests() if sequence.output_len]
        if found:
            sequence = self.random.choice(found)
            self.altered.add(sequence.request_id)
            output_len = self.random.randint(1, sequence.output_len)
            self.rig.scheduler.stop_found(sequence.request_id, output_len, "stop", self.rig.now_us)
            self.rig.check()

    def contradict(self) -> None:
        """A gateway comes with fewer, more or other tokens than are known."""
        if self.live():
            sequence = self.random.choice(self.live())
            received = sequence.output_token_ids()[: self.random.randint(0, sequence.output_len)]
            received += tuple(self.random.choices(range(10, 60), k=self.random.randint(0, 2)))
            received = received[: sequence.submission.sampling.max_tokens]
            if sequence.output_token_ids()[: len(received)] != received:
                self.altered.add(sequence.request_id)
            self.rig.scheduler.claim(sequence.request_id, sequence.subscriber, received, self.rig.now_us)
            self.rig.check()

    def leave(self) -> None:
        for name in self.present()[:1]:
            self.rig.scheduler.worker_leaves(name)

    def pause(self) -> None:
        self.rig.scheduler.pause()

    def resume(self) -> None:
        self.rig.scheduler.resume()

    def empty(self) -> None:
        self.rig.scheduler.admin.reset_prefix_cache()
        self.rig.check()

    def drain(self) -> None:
        for name in self.present()[:1]:
            answer = self.rig.scheduler.admin.set_drain(SetDrain(name, True))
            assert answer == WorkerDrained(self.rig.scheduler.replica(name).num_requests)

    def undrain(self) -> None:
        for name in self.present():
            assert self.rig.scheduler.admin.set_drain(SetDrain(name, False)) == WorkerUndrained()

    def end(self) -> None:
        self.resume()
        for name in self.rig.workers:  # who was to leave has come back
            self.rig.attach(name)
        self.undrain()
        super().end()

    def as_alone(self, sequence: Sequence) -> None:
        if sequence.request_id not in self.altered:
            super().as_alone(sequence)


@pytest.mark.parametrize("seed", range(24))
def test_a_life(seed: int) -> None:
    life = FleetLife(seed)
    life.run(60)
    life.end()


@pytest.mark.parametrize("seed", range(100, 110))
def test_a_life_with_drafts(seed: int) -> None:
    life = FleetLife(seed, max_num_seqs=4, num_speculative_tokens=1 + seed % 3)
    life.run(60)
    life.end()


@pytest.mark.parametrize("seed", range(200, 212))
def test_a_life_with_swaps(seed: int) -> None:
    life = FleetLife(
        seed,
        num_host_blocks=8 + 8 * (seed % 3),
        preemption_mode="swap",
        preemption_policy=PREEMPTION_POLICIES[seed % len(PREEMPTION_POLICIES)],
    )
    life.run(60)
    life.end()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(300, 308))
def test_a_life_with_gateways_and_operators(seed: int, policy: str) -> None:
    life = ServedLife(
        seed,
        num_host_blocks=16 * (seed % 2),
        preemption_mode="swap",
        policy=policy,
        enable_prefix_caching=seed % 3 > 0,
        lockstep=seed % 4 == 3,
    )
    life.run(60)
    life.end()
