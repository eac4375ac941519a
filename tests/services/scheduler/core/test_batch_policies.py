"""What a step is made of under each policy, when prompts have to wait, and how they are cut."""

import random
from dataclasses import replace

import pytest
from fake_worker import FakeWorker
from scheduler_rig import Rig

from services.scheduler.core.batch_policy import BATCH_POLICIES, mixed, prefill_first
from services.scheduler.core.step_times import CHUNK_MIN
from tessera.values.batch import ScheduledBatch
from tessera.values.config import POLICIES, Config
from tessera.values.model import WorkerLimits

MODEL_LEN = 2048


def numbers(count: int, first: int = 10) -> list[int]:
    return [10 + (first + index) % 50 for index in range(count)]


def rig_of(budget: int, num_blocks: int = 200, max_num_seqs: int = 8, **config: object) -> Rig:
    limits = WorkerLimits(max_num_seqs=max_num_seqs, max_num_batched_tokens=1024)
    worker = FakeWorker(num_blocks, 4, limits, replace(FakeWorker().model, max_model_len=MODEL_LEN))
    return Rig(Config(**{"max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget, **config}), worker)


class Rows:
    """Records what a strategy adds; `decodes` and `prefills` say what there is."""

    def __init__(self, decodes: bool, prefills: bool) -> None:
        self.decodes, self.prefills = decodes, prefills
        self.calls: list[str] = []

    def add_decodes(self) -> bool:
        self.calls.append("decodes")
        return self.decodes

    def add_prefills(self) -> bool:
        self.calls.append("prefills")
        return self.prefills


def test_every_policy_of_the_config_is_one() -> None:
    assert set(BATCH_POLICIES) == set(POLICIES)


@pytest.mark.parametrize("decodes", [False, True])
@pytest.mark.parametrize("prefills", [False, True])
def test_mixed_adds_decodes_then_prefills(decodes: bool, prefills: bool) -> None:
    rows = Rows(decodes, prefills)
    mixed(rows)
    assert rows.calls == ["decodes", "prefills"]


@pytest.mark.parametrize("decodes", [False, True])
def test_prefill_first_decodes_only_where_there_is_no_prefill(decodes: bool) -> None:
    rows = Rows(decodes, True)
    prefill_first(rows)
    assert rows.calls == ["prefills"]
    rows = Rows(decodes, False)
    prefill_first(rows)
    assert rows.calls == ["prefills", "decodes"]


# -- prefill first


def kinds(batch: ScheduledBatch) -> tuple[int, int]:
    """Decodes and prefills of a batch."""
    return batch.num_decodes, batch.num_rows - batch.num_decodes


def test_a_step_is_all_prefill_or_all_decode() -> None:
    rig = rig_of(128, policy="prefill_first")
    for number in range(1, 5):
        rig.submit(number, numbers(20 + number, number), max_tokens=6)
        rig.step(in_flight=2)
    rig.submit(5, numbers(150, 5), max_tokens=6)
    rig.finish_all(in_flight=2)
    mixture = [kinds(batch) for batch in rig.batches if batch.num_rows]
    assert all(not decodes or not prefills for decodes, prefills in mixture), mixture
    assert any(prefills for _, prefills in mixture) and any(decodes >= 4 for decodes, _ in mixture)
    for number in range(1, 6):
        rig.assert_as_alone(number)


def test_waiting_prompts_go_before_running_decodes() -> None:
    rig = rig_of(64, policy="prefill_first")
    rig.submit(1, numbers(5), max_tokens=6)
    rig.step()
    rig.submit(2, numbers(7, 3), max_tokens=6)
    batch = rig.schedule()
    assert batch is not None and kinds(batch) == (0, 1) and batch.num_scheduled_tokens.tolist() == [7]
    rig.post(rig.execute())
    batch = rig.schedule()
    assert batch is not None and kinds(batch) == (2, 0)


def test_running_chunks_go_before_waiting_prompts_and_decodes() -> None:
    rig = rig_of(64, policy="prefill_first")
    rig.submit(1, numbers(3), max_tokens=6)
    rig.step()
    rig.submit(2, numbers(100, 3), max_tokens=6)
    rig.submit(3, numbers(10, 7), max_tokens=6)
    first, second, third = (rig.step() and rig.batches[-1] for _ in range(3))
    assert first and first.num_scheduled_tokens.tolist() == [64]
    assert second and second.num_scheduled_tokens.tolist() == [36, 10]
    assert third and kinds(third) == (3, 0)


def test_prompts_are_admitted_in_order_up_to_the_first_that_does_not_fit() -> None:
    """A later one that would fit waits behind it."""
    rig = rig_of(64, num_blocks=12, policy="prefill_first", enable_prefix_caching=False)
    rig.submit(1, numbers(16), max_tokens=4)
    rig.submit(2, numbers(36, 5), max_tokens=4)  # 10 blocks of the 7 that are left
    rig.submit(3, numbers(4, 9), max_tokens=4)
    batch = rig.schedule()
    assert batch is not None and [entry.request_id[-1] for entry in batch.entries] == [1]
    rig.finish_all()
    assert [entry.request_id[-1] for batch in rig.batches for entry in batch.entries] == [1, 2, 3]


def test_a_chunk_that_the_budget_cuts_is_a_multiple_of_64_positions() -> None:
    """What is left of the budget behind another prompt is not filled with crumbs, and a crumb alone is computed."""
    rig = rig_of(200, policy="prefill_first")
    rig.submit(1, numbers(20), max_tokens=2)
    rig.submit(2, numbers(400, 3), max_tokens=2)
    counts = [rig.step() and rig.batches[-1].num_scheduled_tokens.tolist() for _ in range(3)]
    assert counts == [[20, 128], [192], [80]]
    rig = rig_of(100, policy="prefill_first")
    rig.submit(1, numbers(80), max_tokens=2)
    rig.submit(2, numbers(90, 3), max_tokens=2)
    counts = [rig.step() and rig.batches[-1].num_scheduled_tokens.tolist() for _ in range(2)]
    assert counts == [[80], [90]], "20 positions of the second beside the first would be a crumb"
    rig = rig_of(40, policy="prefill_first")
    rig.submit(1, numbers(70), max_tokens=2)
    counts = [rig.step() and rig.batches[-1].num_scheduled_tokens.tolist() for _ in range(2)]
    assert counts == [[40], [30]], "a budget below the grain is used as it is"


def test_the_last_position_of_a_prompt_is_a_prefill() -> None:
    rig = rig_of(64, policy="prefill_first")
    rig.submit(1, numbers(3), max_tokens=9)
    rig.step()
    rig.submit(2, numbers(65, 3), max_tokens=3)
    rig.step()
    rig.submit(3, numbers(5, 9), max_tokens=3)
    batch = rig.schedule()
    assert batch is not None and kinds(batch) == (0, 2) and batch.num_scheduled_tokens.tolist() == [1, 5]


def test_without_chunks_a_prompt_that_does_not_fit_the_step_waits_for_the_next() -> None:
    rig = rig_of(64, policy="prefill_first", enable_chunked_prefill=False)
    rig.submit(1, numbers(40), max_tokens=3)
    rig.submit(2, numbers(40, 3), max_tokens=3)
    rig.submit(3, numbers(4, 9), max_tokens=3)
    counts = [rig.step() and rig.batches[-1].num_scheduled_tokens.tolist() for _ in range(3)]
    assert counts == [[40], [40, 4], [1, 1, 1]]


def test_a_preempted_request_is_prefilled_before_anybody_decodes() -> None:
    """As long as it fits: with nothing to spare it waits for the others' blocks, and everybody ends."""
    rig = rig_of(64, num_blocks=8, policy="prefill_first", enable_prefix_caching=False)
    for number in range(1, 4):
        rig.submit(number, numbers(7, 5 * number), max_tokens=12)
    rig.finish_all(in_flight=2, steps_max=150)
    assert rig.scheduler.load().num_preemptions >= 1
    for number in range(1, 4):
        rig.assert_as_alone(number)


# -- a prompt's own share of a step


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_prompt_gets_no_more_than_the_threshold(policy: str) -> None:
    """Also when it goes on, and when it comes back; others use what it leaves."""
    rig = rig_of(64, policy=policy, long_prefill_token_threshold=10)
    rig.submit(1, numbers(25), max_tokens=2)
    rig.submit(2, numbers(9, 5), max_tokens=2)
    counts = [rig.step() and rig.batches[-1].num_scheduled_tokens.tolist() for _ in range(2)]
    assert counts[0] == [10, 9] and 10 in counts[1]
    rig.finish_all()
    assert all(batch.num_scheduled_tokens.max(initial=0) <= 10 for batch in rig.batches)
    rig.assert_as_alone(1)


def test_the_threshold_is_ignored_where_prompts_are_not_cut() -> None:
    rig = rig_of(64, long_prefill_token_threshold=10, enable_chunked_prefill=False)
    rig.submit(1, numbers(25), max_tokens=2)
    batch = rig.schedule()
    assert batch is not None and batch.num_scheduled_tokens.tolist() == [25]


def test_a_resumed_sequence_is_cut_at_the_threshold_as_well() -> None:
    rig = rig_of(64, num_blocks=10, long_prefill_token_threshold=6, enable_prefix_caching=False)
    rig.submit(1, numbers(14), max_tokens=14)
    rig.submit(2, numbers(14, 5), max_tokens=14)
    rig.finish_all(in_flight=2, steps_max=100)
    assert rig.scheduler.load().num_preemptions >= 1
    assert all(batch.num_scheduled_tokens.max(initial=0) <= 6 for batch in rig.batches)
    rig.assert_as_alone(1)
    rig.assert_as_alone(2)


# -- the delay factor


class AtomGate:
    """ATOM's `_passed_delay` for a loop that schedules as soon as the last step is done."""

    def __init__(self, factor: float) -> None:
        self.factor, self.last_latency, self.previous, self.was_prompt = factor, 0, 0, False

    def begin(self, now: int) -> None:
        if self.was_prompt:
            self.last_latency = now - self.previous
        self.previous, self.was_prompt = now, False

    def passes(self, now: int, arrivals: list[int], num_running: int) -> bool:
        return self.factor <= 0 or now - min(arrivals) > self.factor * self.last_latency or not num_running


@pytest.mark.parametrize("order", ["fcfs", "priority"])
@pytest.mark.parametrize("policy", POLICIES)
def test_prompts_wait_exactly_as_long_as_atom_lets_them(policy: str, order: str) -> None:
    """Random arrivals and step times, factors and priorities: who is admitted in each step is what ATOM's rule says."""
    for seed in range(25):
        draw = random.Random(seed)
        factor = draw.choice((0.0, 0.5, 1.0, 2.5))
        rig = rig_of(
            1024, num_blocks=400, policy=policy, scheduler_delay_factor=factor, queue_order=order, enable_chunked_prefill=False
        )
        gate = AtomGate(factor)
        arrivals: dict[int, int] = {}
        priorities: dict[int, int] = {}
        number = 0
        for _ in range(40):
            gate.begin(rig.now_us)
            running, expected = rig.scheduler.load().num_running, []
            queue = sorted(arrivals, key=lambda n: (priorities[n] if order == "priority" else 0, n))
            while queue and running < 8 and gate.passes(rig.now_us, [arrivals[n] for n in queue], running):
                expected.append(queue.pop(0))
                running += 1
            batch = rig.schedule()
            admitted = [entry.request_id[-1] for entry in batch.entries] if batch is not None else []
            assert admitted == expected, f"seed {seed}"
            for n in admitted:
                del arrivals[n]
            gate.was_prompt = bool(admitted)
            for _ in range(draw.choice((0, 0, 1, 3))):  # while the step is computed
                number += 1
                rig.now_us += draw.randrange(900)
                priorities[number] = draw.randrange(3)
                rig.submit(
                    number, numbers(5 + number % 7, number), priority=priorities[number], max_tokens=draw.randrange(1, 9)
                )
                arrivals[number] = rig.now_us
            if batch is not None:
                rig.post(rig.execute())


def test_a_prompt_waits_for_the_factor_times_the_last_prompt_step() -> None:
    rig = rig_of(64, scheduler_delay_factor=2.0)
    rig.submit(1, numbers(5), max_tokens=20)
    rig.step()  # takes 1,000 us
    rig.submit(2, numbers(5, 3), max_tokens=20)
    arrived_us = rig.now_us
    waits = 0
    while rig.scheduler.load().num_waiting:
        rig.step()
        waits += 1
    assert waits == 4 and rig.now_us - 1000 - arrived_us == 3000, "after 2,000 us it has not waited longer than that"


def test_a_prompt_that_finds_nothing_running_does_not_wait() -> None:
    rig = rig_of(64, scheduler_delay_factor=1000.0)
    rig.submit(1, numbers(5), max_tokens=2)
    rig.finish_all()
    rig.submit(2, numbers(5, 3), max_tokens=2)
    batch = rig.schedule()
    assert batch is not None and batch.num_rows == 1


def test_the_oldest_lets_in_whoever_is_foremost() -> None:
    """By priority the head of the queue came later; that somebody has waited long enough opens the gate to it."""
    rig = rig_of(64, scheduler_delay_factor=1.0, queue_order="priority", max_num_seqs=2)
    rig.submit(1, numbers(5), max_tokens=20)
    rig.step()
    rig.submit(2, numbers(5, 3), priority=5, max_tokens=20)
    rig.step()
    rig.now_us += 5
    rig.submit(3, numbers(5, 9), priority=1, max_tokens=20)
    batch = rig.schedule()
    assert batch is not None and [entry.request_id[-1] for entry in batch.entries] == [3]


# -- the pace of prefills


def timed_step(rig: Rig, decode_us: int, position_us: int) -> tuple[ScheduledBatch, int]:
    """One step on a device that takes so long for a step's decodes and for each prefill position."""
    batch = rig.schedule()
    assert batch is not None
    prefill_positions = int(batch.num_scheduled_tokens[batch.num_decodes :].sum())
    us = (decode_us if batch.num_decodes else 0) + position_us * prefill_positions
    output = replace(rig.execute(), compute_us=us)
    rig.now_us += us
    rig.post(output)
    return batch, us


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_prompt_does_not_stall_decodes_on_a_slow_device(policy: str) -> None:
    """2 ms a position: uncapped, a step of 512 positions would hold every decode up for a second."""
    rig = rig_of(512, num_blocks=600, policy=policy, itl_target_ms=100)
    rig.submit(1, numbers(40), max_tokens=200, ignore_eos=True)
    timed_step(rig, 20_000, 2000)
    timed_step(rig, 20_000, 2000)
    rig.submit(2, numbers(800, 3), max_tokens=3)
    taken = []
    while not rig.output(2):
        _, us = timed_step(rig, 20_000, 2000)
        taken.append(us)
    assert max(taken) <= 110_000, taken
    assert sum(taken) <= 1.6 * (800 * 2000) + 200_000, "the prompt itself must not crawl"


def test_of_prompts_that_came_together_none_is_held_back_by_who_is_answered_first() -> None:
    """A burst: the first answer began after the other prompts came, so it waits for them; a prompt that comes later waits for it."""
    rig = rig_of(512, num_blocks=600, itl_target_ms=100)
    for number in (1, 2, 3):
        rig.submit(number, numbers(500, number), max_tokens=100, ignore_eos=True)
    chunks = []
    while not (rig.output(1) and rig.output(2) and rig.output(3)):
        batch, _ = timed_step(rig, 20_000, 2000)
        chunks.append(int(batch.num_scheduled_tokens[batch.num_decodes :].sum()))
    assert max(chunks[1:]) >= 500, chunks
    rig.submit(4, numbers(800, 9), max_tokens=2)
    batch, us = timed_step(rig, 20_000, 2000)
    assert batch.num_decodes == 3 and us <= 130_000, "512 positions would take a second"


def test_nothing_is_capped_before_a_prompt_was_timed() -> None:
    """Outputs of a worker that does not tell its times, or has told none yet."""
    rig = rig_of(512, num_blocks=600, itl_target_ms=100)
    rig.submit(1, numbers(40), max_tokens=100)
    rig.step()
    rig.step()
    rig.submit(2, numbers(800, 3), max_tokens=2)
    batch = rig.schedule()
    assert batch is not None and batch.num_scheduled_tokens.tolist() == [1, 511]


def test_nothing_is_capped_while_nobody_decodes() -> None:
    rig = rig_of(512, num_blocks=600, itl_target_ms=1)
    rig.submit(1, numbers(800), max_tokens=2)
    batch, _ = timed_step(rig, 20_000, 2000)
    assert batch.num_scheduled_tokens.tolist() == [512]


def test_with_a_target_that_cannot_be_met_prompts_still_get_on() -> None:
    rig = rig_of(512, num_blocks=600, itl_target_ms=1)
    rig.submit(1, numbers(5), max_tokens=100)
    timed_step(rig, 20_000, 2000)
    timed_step(rig, 20_000, 2000)
    rig.submit(2, numbers(80, 3), max_tokens=2)
    steps = 0
    while not rig.output(2):
        batch, _ = timed_step(rig, 20_000, 2000)
        assert batch.num_scheduled_tokens.tolist() == [1, CHUNK_MIN]
        steps += 1
    assert steps == 80 // CHUNK_MIN


def test_a_prompt_that_may_not_be_cut_is_not_capped() -> None:
    rig = rig_of(512, num_blocks=600, itl_target_ms=1, enable_chunked_prefill=False)
    rig.submit(1, numbers(5), max_tokens=100)
    timed_step(rig, 20_000, 2000)
    rig.submit(2, numbers(80, 3), max_tokens=2)
    batch, _ = timed_step(rig, 20_000, 2000)
    assert batch.num_scheduled_tokens.tolist() == [1, 80]


def test_what_steps_take_is_remembered_over_an_attach() -> None:
    rig = rig_of(512, num_blocks=600, itl_target_ms=100)
    rig.submit(1, numbers(40), max_tokens=100)
    timed_step(rig, 20_000, 500)
    timed_step(rig, 20_000, 500)
    rig.attach()
    rig.submit(2, numbers(800, 3), max_tokens=2)
    batch, us = timed_step(rig, 20_000, 500)
    assert batch.num_scheduled_tokens.tolist() == [1, 160] and us == 100_000
