"""Random lives of a scheduler group: leaders, workers, stores and gateways come and go in any order, and no client can tell."""

import random

import pytest
from recovery_rig import OTHER_WORKER, WORKER, Call, House

from services.scheduler.core.worker_loss import LEFT
from services.scheduler.store.memory import MemoryStore
from tessera.values.config import POLICIES, PREEMPTION_POLICIES, PREFIX_INDEXES, QUEUE_ORDERS
from tessera.values.finish import FinishReason

GATEWAYS = ("g1", "g2", "g3")
LOGPROBS: tuple[dict[str, object], ...] = (
    {"logprobs": 2, "prompt_logprobs": 1},
    {"logprobs": 0},
    {},
    {"prompt_logprobs": 0},
    {"logprob_token_ids": (3, 60)},
)


class Life:
    """One random history. `calls` are the latest call of every client; what was aborted is not compared. Clients are in turn of the
    tenants with these salts, and have in turn these priorities, and ask for up to `outputs_max` outputs of one prompt. `given` is what is not drawn of the house."""

    def __init__(
        self,
        seed: int,
        salts: tuple[str, ...] = ("",),
        priorities: tuple[int, ...] = (0,),
        outputs_max: int = 1,
        wants_logprobs: bool = False,
        **given: object,
    ) -> None:
        self.wants_logprobs = wants_logprobs
        self.salts, self.priorities, self.outputs_max = salts, priorities, outputs_max
        self.rng = rng = random.Random(seed)
        drawn = {
            "num_blocks": rng.choice((7, 9, 16, 64)),
            "num_workers": rng.choice((1, 2, 2)),
            "max_num_seqs": rng.randint(1, 4),
            "max_num_batched_tokens": rng.choice((6, 16)),
            "max_batches_in_flight": rng.choice((1, 2)),
        }
        self.house = House(**drawn | given)
        self.saved = self.house.store.save()
        self.calls: list[Call] = []
        self.aborted: set[int] = set()
        self.away: set[str] = set()
        self.is_excused = False  # this leader may compute again what was held as it took over: somebody came too late
        self.number = 0

    def live(self) -> list[int]:
        return [index for index, call in enumerate(self.calls) if not call.ends and index not in self.aborted]

    def begin(self) -> None:
        if len(self.calls) < 16:
            self.number += 1
            start = self.rng.choice((10, 10, 30))
            prompt = list(range(start, start + self.rng.choice((5, 9, 13, 14))))
            gateway = self.rng.choice([name for name in GATEWAYS if name not in self.away] or ["g4"])
            sampling = {"max_tokens": self.rng.randint(1, 14), "seed": self.number, "ignore_eos": self.rng.random() < 0.7}
            if self.wants_logprobs:
                sampling |= LOGPROBS[self.number % len(LOGPROBS)]
            salt = self.salts[self.number % len(self.salts)]
            priority = self.priorities[self.number % len(self.priorities)]
            own = {"cache_salt": salt, "priority": priority}
            call = self.house.call(self.number, prompt, gateway, name=f"client {self.number}", **own, **sampling)
            self.calls.append(call)
            for _ in range(self.rng.randrange(self.outputs_max) if self.outputs_max > 1 else 0):
                self.number += 1
                own["fork_of"], sampling["seed"] = call.submission.request_id, self.number
                self.calls.append(
                    self.house.call(self.number, prompt, gateway, name=f"client {self.number}", **own, **sampling)
                )

    def resume(self) -> None:
        """A client goes to a gateway that has a session; its request may live, have ended, or be unknown."""
        present = [name for name in GATEWAYS if name not in self.away]
        if self.live() and present:
            index = self.rng.choice(self.live())
            call, self.number = self.calls[index], self.number + 1
            count = self.rng.randint(0, len(call.tokens))
            again = self.house.resume(call, self.number, self.rng.choice(present), call.subscriber + 1, call.received[:count])
            self.forget(call)
            self.calls[index] = again

    def forget(self, call: Call) -> None:
        """A gateway that has no session yet learns that its client has left."""
        if call.gateway.name in self.away:
            call.gateway.calls.pop(call.submission.request_id, None)

    def abort(self) -> None:
        if self.live() and self.rng.random() < 0.3:
            index = self.rng.choice(self.live())
            if self.calls[index].gateway.name not in self.away:
                self.house.abort(self.calls[index])
                self.aborted.add(index)

    def turn(self) -> None:
        self.house.turn(self.rng.randint(1, 4), writes=self.rng.random() < 0.5)

    def work(self) -> None:
        """One thing happens of what a turn does."""
        name = self.rng.choice(list(self.house.workers))
        what = self.rng.randrange(6)
        if what == 0 and self.house.workers[name].queue:
            self.house.execute(name)
        elif what == 1 and self.house.outputs[name]:
            self.house.hear(name)
        elif what == 2:
            self.house.write(self.rng.randint(1, 3))
        elif what == 3:
            self.house.write_unheard()
        elif what == 4:
            self.house.now_us += self.rng.choice((1_000, 300_000, 300_000))
            self.house.lead.release()
        self.house.read()

    def worker_goes(self) -> None:
        name = self.rng.choice(list(self.house.workers))
        if name in self.house.lead.nonces:
            if self.rng.random() < 0.5:
                self.house.workers[name].restart()
            else:
                while self.house.workers[name].queue and self.rng.random() < 0.5:
                    self.house.execute(name)
            self.house.workers[name].queue.clear()
            self.house.outputs[name].clear()
            self.house.lead.lose(name, LEFT)

    def worker_comes(self) -> None:
        for name in self.house.workers:
            replica = self.house.lead.scheduler.replica(name)
            if (replica is None or not replica.is_attached) and self.rng.random() < 0.7:
                self.house.outputs[name].clear()
                self.house.lead.attach(name)

    def gateway_comes(self) -> None:
        if self.away:
            name = self.rng.choice(sorted(self.away))
            self.away.remove(name)
            self.is_excused = True
            self.house.say_hello(name)

    def keep(self) -> None:
        self.saved = self.house.store.save()

    def check_counter(self) -> None:
        assert self.is_excused or self.wants_logprobs or self.house.lead.scheduler.load().recomputed_positions == 0
        self.is_excused = False

    def leader_dies(self) -> None:
        self.check_counter()
        store = self.rng.random()
        if store < 0.15:
            self.house.store = self.saved.save()
        elif store < 0.25:
            self.house.store = MemoryStore()
        if self.rng.random() < 0.2:
            self.house.workers[self.rng.choice(list(self.house.workers))].restart()
        late_workers = (self.rng.choice((WORKER, OTHER_WORKER)),) if len(self.house.workers) == 2 else ()
        if self.rng.random() < 0.6:
            late_workers = ()
        known = [name for name in GATEWAYS if name in self.house.gateways]
        self.away = {name for name in known if self.rng.random() < 0.4}
        self.house.take_over(tuple(self.away), late_workers)

    def grace_ends(self) -> None:
        if self.rng.random() < 0.3:
            self.is_excused = True
            self.house.lead.scheduler.expire_orphans()
            self.house.lead.settle()

    def run(self) -> None:
        weighted = [(self.begin, 3), (self.turn, 5), (self.work, 14), (self.resume, 2), (self.abort, 1), (self.keep, 1)]
        weighted += [(self.worker_goes, 1), (self.worker_comes, 2), (self.gateway_comes, 2), (self.leader_dies, 1)]
        weighted += [(self.grace_ends, 1)]
        actions, weights = zip(*weighted, strict=True)
        for _ in range(150):
            self.rng.choices(actions, weights)[0]()
        self.end()

    def end(self) -> None:
        """Everybody comes back, and everything ends."""
        while self.away:
            self.gateway_comes()
        for name in self.house.workers:
            replica = self.house.lead.scheduler.replica(name)
            if replica is None or not replica.is_attached:
                self.house.outputs[name].clear()
                self.house.lead.attach(name)
        for name in self.house.workers:
            while self.house.outputs[name]:
                self.house.hear(name)
        self.house.lead.scheduler.expire_orphans()
        self.house.lead.settle()
        self.house.now_us += 2_000_000
        self.house.run()
        self.check_counter()
        compared = [call for index, call in enumerate(self.calls) if index not in self.aborted]
        self.house.assert_as_undisturbed(*compared)
        for index in self.aborted:
            call = self.calls[index]
            assert len(call.ends) <= 1
            assert not call.ends or call.ends[0].reason is not FinishReason.ERROR


class UnequalLife(Life):
    """The second worker is smaller than many requests, and a new leader may find it alone. The store has heard of every request."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        num_blocks, other_blocks, num_host_blocks = rng.choice((7, 9, 16)), rng.choice((4, 5, 6)), rng.choice((0, 8))
        super().__init__(
            seed,
            num_workers=2,
            num_blocks=num_blocks,
            other_blocks=other_blocks,
            num_host_blocks=num_host_blocks,
            preemption_mode="swap",
        )

    def begin(self) -> None:
        if self.house.lead.scheduler.replica(WORKER) is not None:  # else less is promised
            super().begin()

    def leader_dies(self) -> None:
        self.house.write()
        if self.rng.random() < 0.2:
            self.house.workers[self.rng.choice(list(self.house.workers))].restart()
        self.is_excused = True
        self.house.take_over((), self.rng.choice(((), (WORKER,), (WORKER,), (OTHER_WORKER,))))


@pytest.mark.parametrize("seed", range(600, 640))
def test_no_client_can_tell_though_the_larger_worker_is_away_at_a_takeover(seed: int) -> None:
    UnequalLife(seed).run()


@pytest.mark.parametrize("seed", range(60))
def test_no_client_can_tell(seed: int) -> None:
    Life(seed).run()


@pytest.mark.parametrize("seed", range(100, 120))
def test_no_client_of_several_tenants_can_tell(seed: int) -> None:
    """The worker's KV is each tenant's own, and is compared whenever it is read: nobody is ever given another's."""
    Life(seed, ("", "anna", "bert")).run()


@pytest.mark.parametrize("seed", [*range(200, 240), 20673])
def test_no_client_can_tell_though_blocks_are_short_and_swapped(seed: int) -> None:
    """Few blocks in the pool and in host memory, every victim policy, and requests of several priorities. 239 swapped a slot out and in by one
    batch; 20673 cut what a client had by an abort that a worker told late."""
    rng = random.Random(seed)
    life = Life(
        seed,
        priorities=(0, 1, -1),
        num_blocks=rng.choice((7, 9)),
        num_host_blocks=rng.choice((0, 4, 16, 16)),
        max_num_seqs=4,
        queue_order=rng.choice(QUEUE_ORDERS),
        preemption_mode="swap",
        preemption_policy=PREEMPTION_POLICIES[seed % len(PREEMPTION_POLICIES)],
    )
    life.run()


@pytest.mark.parametrize("seed", range(300, 340))
def test_no_client_of_several_outputs_can_tell(seed: int) -> None:
    """Outputs of one prompt, which fork from the first of them as it comes: with and without a prefix cache, under each policy."""
    life = Life(
        seed,
        outputs_max=4,
        enable_prefix_caching=seed % 2 == 0,
        policy=POLICIES[seed // 2 % 2],
        num_host_blocks=8,
        preemption_mode="swap" if seed % 3 else "recompute",
    )
    life.run()


@pytest.mark.parametrize("seed", range(400, 440))
def test_no_client_can_tell_though_drafts_are_in_flight(seed: int) -> None:
    """Whoever dies, with positions of drafts in flight that nobody has heard of: what a worker reports counts accepted ones alone."""
    rng = random.Random(seed)
    life = Life(
        seed,
        outputs_max=rng.choice((1, 3)),
        max_num_seqs=rng.randint(1, 4),
        max_num_batched_tokens=16,
        max_batches_in_flight=2,
        num_speculative_tokens=rng.randint(1, 3),
        num_host_blocks=rng.choice((0, 8)),
        preemption_mode="swap",
    )
    life.run()


@pytest.mark.parametrize("seed", range(700, 740))
def test_no_client_that_wants_log_probabilities_can_tell(seed: int) -> None:
    """Of each token the right ones come, or none where nobody holds them any more; beside clients that want none."""
    rng = random.Random(seed)
    life = Life(
        seed,
        outputs_max=rng.choice((1, 3)),
        wants_logprobs=True,
        max_num_seqs=rng.randint(1, 4),
        max_num_batched_tokens=16,
        num_speculative_tokens=rng.choice((0, 0, 2)),
        num_host_blocks=rng.choice((0, 8)),
        preemption_mode=rng.choice(("swap", "recompute")),
        enable_prefix_caching=rng.random() < 0.7,
    )
    life.run()


@pytest.mark.parametrize("seed", range(500, 520))
def test_no_tenant_can_tell_though_blocks_are_zeroed_forked_and_swapped(seed: int) -> None:
    """Prefixes are found by either index."""
    life = Life(
        seed,
        ("", "anna", "bert"),
        outputs_max=3,
        num_blocks=random.Random(seed).choice((7, 9, 16)),
        num_host_blocks=8,
        preemption_mode="swap",
        secure_zero=True,
        prefix_index=PREFIX_INDEXES[seed % len(PREFIX_INDEXES)],
    )
    life.run()
