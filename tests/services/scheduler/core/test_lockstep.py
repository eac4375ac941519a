"""A group in lockstep: every round is a batch for each member, and whoever has nothing to compute runs as much for nobody."""

import random
from dataclasses import replace

import pytest
from fake_worker import FakeWorker
from fleet_rig import BROKEN, FleetRig

from services.scheduler.core.step_times import GROWTH_MAX
from services.scheduler.core.worker_loss import LEFT
from tessera.values.batch import ScheduledBatch
from tessera.values.config import PREEMPTION_MODES
from tessera.values.finish import FinishReason
from tessera.values.model import WorkerLimits


def numbers(count: int, first: int = 10) -> list[int]:
    return list(range(first, first + count))


class GroupRig(FleetRig):
    """Keeps the batches of every member that compute anything: their n-th ones are of one round."""

    def __init__(self, num_workers: int = 3, num_blocks: int = 40, num_host_blocks: int = 0, **config: object) -> None:
        self.rounds: dict[str, list[ScheduledBatch]] = {}
        super().__init__(num_workers, num_blocks, num_host_blocks, lockstep=True, worker_choice="round_robin", **config)

    def attach(self, name: str) -> None:
        self.rounds.setdefault(name, [])
        super().attach(name)

    def schedule(self, name: str) -> ScheduledBatch | None:
        batch = super().schedule(name)
        if batch is not None and batch.num_rows:
            self.rounds[name].append(batch)
        return batch

    def assert_in_step(self, is_over: bool = True) -> None:
        """What was sent: each round went to everybody, and had somebody who needed it, after whom the dummies are cut. While it goes on, of
        the last rounds somebody may not have asked for his yet."""
        lens = {len(batches) for batches in self.rounds.values()}
        assert len(lens) == 1 or not is_over
        for members in zip(*self.rounds.values(), strict=False):
            real = [batch for batch in members if not batch.is_dummy_run]
            assert real, "a round for nobody"
            largest = max(real, key=lambda batch: (batch.num_decodes < batch.num_rows, batch.total_tokens))
            for batch in members:
                if batch.is_dummy_run:
                    assert batch.num_scheduled_tokens.tolist() == largest.num_scheduled_tokens.tolist()
                    assert batch.num_decodes == largest.num_decodes


def test_idle_members_compute_as_much_for_nobody() -> None:
    rig = GroupRig()
    rig.submit(1, numbers(6), max_tokens=4)
    rig.finish_all()
    rig.assert_in_step()
    rig.assert_as_alone(1)
    busy, *idle = rig.rounds.values()
    assert [batch.is_dummy_run for batch in busy] == [False] * 4
    for batches in idle:
        assert [batch.is_dummy_run for batch in batches] == [True] * 4
        assert [batch.num_scheduled_tokens.tolist() for batch in batches] == [[6], [1], [1], [1]]
        assert [batch.num_decodes for batch in batches] == [0, 1, 1, 1]


def test_a_dummy_run_takes_the_path_of_prefills_where_anybody_has_one() -> None:
    rig = GroupRig()
    rig.submit(1, numbers(20), max_tokens=9)
    rig.turn(1)
    rig.submit(2, numbers(3, 40), max_tokens=9)
    rig.turn(1)
    decode, prefill, nobody = (batches[1] for batches in rig.rounds.values())
    assert (decode.num_decodes, prefill.num_decodes) == (1, 0)
    assert nobody.is_dummy_run and nobody.num_decodes == 0 and nobody.num_scheduled_tokens.tolist() == [3]


def test_where_nobody_has_rows_nobody_runs() -> None:
    rig = GroupRig()
    assert [rig.schedule(name) for name in rig.workers] == [None] * 3
    rig.submit(1, numbers(6), max_tokens=1)
    rig.turn(1)
    batches = [rig.schedule(name) for name in rig.workers]
    assert batches[0] is not None and batches[0].drops and not batches[0].num_rows, "only told to give up the slot"
    assert batches[1:] == [None, None]


def test_a_dummy_run_says_nothing_of_how_long_decodes_take() -> None:
    """It takes as long as the prefill of the member that needs the round: what that member learns it has learned of its own rows."""
    rig = GroupRig(2, itl_target_ms=100)
    rig.submit(1, numbers(6), max_tokens=20)
    rig.turn(1)
    rig.submit(2, numbers(6, 30), max_tokens=1)
    rig.turn(1)
    rig.submit(3, numbers(16, 60), max_tokens=1)
    mixed = {name: rig.schedule(name) for name in rig.workers}
    idle = mixed["worker:1"]
    assert idle is not None and idle.is_dummy_run and 0 < idle.num_decodes < idle.num_rows
    output = replace(rig.workers["worker:1"].step(), compute_us=99_000)
    rig.scheduler.postprocess("worker:1", output, rig.now_us)
    replica = rig.scheduler.replica("worker:1")
    assert replica is not None
    replica.step_times.restart()  # the steps before had no times: those of a fake worker
    replica.step_times.answered(0, 16, 16_000, 16_000)
    assert replica.step_times.prefill_positions_max(100_000) == GROWTH_MAX * 16


def test_slots_are_dropped_with_a_dummy_run() -> None:
    rig = GroupRig(2)
    rig.submit(1, numbers(6), max_tokens=1)
    rig.submit(2, numbers(6, 30), max_tokens=5)
    rig.turn(1)
    first = rig.schedule("worker:0")
    assert first is not None and first.is_dummy_run and len(first.drops) == 1


def test_a_round_waits_for_the_slowest_member_and_no_longer() -> None:
    """Each may have two batches in flight; nobody has a third before all have room."""
    rig = GroupRig(2)
    rig.submit(1, numbers(6), max_tokens=9)
    for name in rig.workers:
        assert [rig.schedule(name) is None for _ in range(3)] == [False, False, True]
    rig.execute("worker:0")
    assert rig.schedule("worker:0") is None, "the other has no room"
    rig.execute("worker:1")
    assert rig.schedule("worker:1") is not None and rig.schedule("worker:0") is not None
    rig.finish_all()
    rig.assert_in_step()


def test_a_member_that_asks_late_gets_every_round() -> None:
    rig = GroupRig(2)
    rig.submit(1, numbers(6), max_tokens=9)
    first = [rig.schedule("worker:0"), rig.schedule("worker:0")]
    second = [rig.schedule("worker:1"), rig.schedule("worker:1")]
    assert all(first) and all(batch is not None and batch.is_dummy_run for batch in second)
    rig.assert_in_step()


def test_while_a_member_is_away_the_others_wait_and_then_begin_together() -> None:
    rig = GroupRig(2)
    rig.submit(1, numbers(6), max_tokens=9)
    rig.turn(1)
    for name in rig.workers:
        rig.schedule(name)
    rig.lose("worker:1")
    assert rig.schedule("worker:0") is None
    rig.attach("worker:1")
    assert rig.schedule("worker:1") is None and rig.schedule("worker:0") is None, "a batch of a round without it is in flight"
    rig.execute("worker:0")
    rig.rounds = {name: [] for name in rig.workers}
    rig.finish_all()
    rig.assert_in_step()
    rig.assert_as_alone(1)


def test_nobody_begins_without_a_member_that_is_away() -> None:
    rig = GroupRig(2)
    rig.lose("worker:1")
    rig.submit(1, numbers(6), max_tokens=2)
    assert rig.schedule("worker:0") is None
    rig.attach("worker:1")
    rig.finish_all()
    rig.assert_in_step()


def test_what_was_issued_to_a_member_and_not_asked_for_is_void_once_it_comes_back() -> None:
    rig = GroupRig(2)
    rig.submit(1, numbers(6), max_tokens=9)
    rig.schedule("worker:0")
    rig.attach("worker:1")
    assert rig.schedule("worker:1") is None
    rig.execute("worker:0")
    rig.rounds = {name: [] for name in rig.workers}
    rig.finish_all()
    rig.assert_in_step()


def test_a_member_that_is_removed_holds_up_nobody() -> None:
    rig = GroupRig(2)
    rig.submit(1, numbers(6), max_tokens=9)
    rig.turn(1)
    rig.lose("worker:1", LEFT)
    rig.scheduler.remove_worker("worker:1", rig.now_us)
    del rig.workers["worker:1"]
    rig.finish_all()
    rig.assert_as_alone(1)


@pytest.mark.parametrize(("rows_max", "tokens_max", "counts"), [(4, 8, [5, 3]), (2, 64, [5, 5]), (1, 3, [3])])
def test_a_dummy_run_keeps_to_the_limits_of_its_member(rows_max: int, tokens_max: int, counts: list[int]) -> None:
    rig = GroupRig(1)
    small = rig.workers["small"] = FakeWorker(40, 4, WorkerLimits(max_num_seqs=rows_max, max_num_batched_tokens=tokens_max))
    small.boots = 900
    small.restart()
    rig.attach("small")
    for number in (1, 2, 3):
        rig.submit(number, numbers(5, 10 * number), max_tokens=3)
    rig.scheduler.worker_leaves("small")
    batch = rig.schedule("worker:0")
    assert batch is not None and batch.num_scheduled_tokens.tolist() == [5, 5, 5]
    dummy = rig.schedule("small")
    assert dummy is not None and dummy.is_dummy_run and dummy.num_scheduled_tokens.tolist() == counts


def test_who_brings_workers_down_is_found_in_a_group_too() -> None:
    rig = GroupRig(2)
    poison = rig.submit(1, numbers(6), max_tokens=9)
    rig.poison[poison.request_id] = 8
    other = rig.submit(2, numbers(6, 30), max_tokens=50)
    neighbour = rig.submit(3, numbers(6, 20), max_tokens=9)
    rig.finish_all()
    assert poison.finish is not None and poison.finish.reason is FinishReason.ERROR
    assert max(poison.finished_us, neighbour.finished_us) < other.finished_us, (
        "dummy runs keep no suspect from being tried alone"
    )
    rig.assert_as_alone(3)
    rig.assert_as_alone(2)


def live(rig: GroupRig, rng: random.Random) -> None:
    """Requests come, are aborted, and members are lost and found; in the end everybody has his tokens."""
    number, names = 0, list(rig.workers)
    for _ in range(60):
        for _ in range(rng.choice((0, 0, 1, 3))):
            number += 1
            prompt = numbers(rng.randint(1, 12), rng.randint(10, 30))
            rig.submit(number, prompt, max_tokens=rng.randint(1, 12), seed=number)
        if number and rng.random() < 0.1:
            rig.scheduler.abort(rng.randint(1, number).to_bytes(16, "big"), rig.now_us)
            rig.check()
        if rng.random() < 0.05:
            name = rng.choice(names)
            rig.lose(name, BROKEN)
            for other in names:  # what was issued before is asked for, and computed
                while other != name and (rig.schedule(other) is not None or rig.workers[other].queue):
                    rig.execute(other)
            rig.attach(name)
            rig.rounds = {name: [] for name in rig.workers}
        rig.turn(rng.randint(1, 2))
        rig.assert_in_step(is_over=False)
    rig.finish_all()
    rig.assert_in_step()
    for one in range(1, number + 1):
        finish = rig.sequence(one).finish
        if finish is not None and finish.reason is not FinishReason.ABORTED:
            rig.assert_as_alone(one)


@pytest.mark.parametrize("seed", range(12))
def test_random_lives_of_a_group_stay_in_step(seed: int) -> None:
    rng = random.Random(seed)
    rig = GroupRig(
        rng.randint(2, 4),
        rng.choice((8, 12, 40)),
        num_host_blocks=rng.choice((0, 6, 20)),
        max_num_batched_tokens=rng.choice((64, 128)),
        num_speculative_tokens=rng.choice((0, 3)),
        preemption_mode=rng.choice(PREEMPTION_MODES),
    )
    live(rig, rng)


@pytest.mark.parametrize("seed", range(6))
def test_a_group_whose_requests_are_swapped_stays_in_step(seed: int) -> None:
    rig = GroupRig(2, num_blocks=7, num_host_blocks=20, preemption_mode="swap")
    live(rig, random.Random(seed))
    assert rig.scheduler.load().num_swap_outs > 0
