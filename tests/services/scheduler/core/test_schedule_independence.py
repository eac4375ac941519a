"""Outputs do not depend on the schedule: whatever the policies, budgets and pools, each request gets the tokens that it gets alone."""

from dataclasses import dataclass, replace

import hypothesis.strategies as st
import pytest
from fake_worker import FakeWorker
from hypothesis import given, settings
from scheduler_rig import Rig, submission

from services.scheduler.core.admission import Admitted
from tessera.values.config import POLICIES, PREEMPTION_MODES, PREEMPTION_POLICIES, QUEUE_ORDERS, Config
from tessera.values.finish import Finish
from tessera.values.model import WorkerLimits
from tessera.values.request import Submission
from tessera.values.sampling import SamplingParams

LEN_MAX = 36  # prompt and output: every pool holds it, so that no pool ends a request
SEQS_MAX = 6


@dataclass(frozen=True)
class Arrival:
    """A request, and after how many steps it comes."""

    request: Submission
    step: int


@dataclass(frozen=True)
class House:
    """One way to run them."""

    config: Config
    num_blocks: int
    block_size: int
    num_host_blocks: int
    in_flight: int


PREFIXES = ([], [10, 11, 12, 13], [10, 11, 12, 13, 14, 15, 16, 17])
prompts = st.builds(
    lambda prefix, tail: prefix + tail, st.sampled_from(PREFIXES), st.lists(st.integers(30, 32), min_size=1, max_size=10)
)
samplings = st.builds(
    SamplingParams,
    seed=st.integers(0, 5),
    max_tokens=st.integers(1, LEN_MAX - 18),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(st.integers(0, 63), max_size=3).map(tuple),
)


@st.composite
def workloads(draw: st.DrawFn) -> list[Arrival]:
    """Up to eight requests, some of them further outputs of the one before."""
    arrivals: list[Arrival] = []
    for number in range(1, draw(st.integers(2, 8)) + 1):
        prompt, own = draw(prompts), {"priority": draw(st.integers(0, 2))}
        if arrivals and draw(st.integers(0, 2)) == 0:
            parent = arrivals[-1].request
            prompt, own["fork_of"] = parent.prompt_token_ids.tolist(), parent.request_id
        step = draw(st.integers(0, 6))
        arrivals.append(Arrival(submission(number, prompt, draw(samplings), **own), step))
    return arrivals


@st.composite
def houses(draw: st.DrawFn) -> House:
    num_speculative_tokens = draw(st.sampled_from((0, 0, 1, 3)))
    num_seqs, chunks = draw(st.integers(1, SEQS_MAX)), draw(st.booleans())
    least = max(num_seqs * (1 + num_speculative_tokens), 1 if chunks else LEN_MAX)
    block_size = draw(st.sampled_from((1, 2, 3, 4, 16)))
    config = Config(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=least + draw(st.integers(0, 30)),
        enable_prefix_caching=draw(st.booleans()),
        enable_chunked_prefill=chunks,
        long_prefill_token_threshold=draw(st.sampled_from((0, 1, 5))),
        policy=draw(st.sampled_from(POLICIES)),
        scheduler_delay_factor=draw(st.sampled_from((0.0, 2.5))),
        itl_target_ms=draw(st.sampled_from((0, 1))),
        num_speculative_tokens=num_speculative_tokens,
        max_batches_in_flight=draw(st.sampled_from((1, 2))),
        queue_order=draw(st.sampled_from(QUEUE_ORDERS)),
        preemption_mode=draw(st.sampled_from(PREEMPTION_MODES)),
        preemption_policy=draw(st.sampled_from(PREEMPTION_POLICIES)),
        secure_zero=draw(st.booleans()),
    )
    num_blocks = -(-LEN_MAX // block_size) + draw(st.sampled_from((0, 1, 3, 100)))
    return House(config, num_blocks, block_size, draw(st.sampled_from((0, 4, 40))), draw(st.integers(1, 2)))


def run(arrivals: list[Arrival], house: House) -> dict[bytes, tuple[tuple[int, ...], Finish | None]]:
    """What each request gets."""
    limits = WorkerLimits(SEQS_MAX, 128, num_speculative_tokens=3)
    rig = Rig(house.config, FakeWorker(house.num_blocks, house.block_size, limits, num_host_blocks=house.num_host_blocks))
    rig.take_every = 1000
    for step in range(max(arrival.step for arrival in arrivals) + 1):
        for arrival in arrivals:
            if arrival.step == step:
                assert isinstance(rig.scheduler.submit(arrival.request, 0, (), rig.now_us), Admitted)
        rig.step(house.in_flight)
    rig.finish_all(house.in_flight, steps_max=2000)
    assert rig.free_blocks == house.num_blocks
    budget, num_seqs = house.config.max_num_batched_tokens, house.config.max_num_seqs
    assert all(batch.total_tokens <= budget and batch.num_rows <= num_seqs for batch in rig.batches), "a step beyond its limits"
    is_all_one = [not batch.num_decodes or batch.num_decodes == batch.num_rows for batch in rig.batches]
    assert house.config.policy == "mixed" or all(is_all_one), "decodes and prefills in one step"
    ended = [rig.scheduler.request(arrival.request.request_id) for arrival in arrivals]
    return {sequence.request_id: (sequence.output_token_ids(), sequence.finish) for sequence in ended if sequence is not None}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(arrivals=workloads(), house=houses())
def test_each_request_gets_what_it_gets_alone(arrivals: list[Arrival], house: House) -> None:
    together = run(arrivals, house)
    plain = House(Config(max_num_seqs=1, max_num_batched_tokens=128, max_batches_in_flight=1), 100, 4, 0, 1)
    for arrival in arrivals:
        request = arrival.request
        alone = run([Arrival(replace(request, fork_of=b""), 0)], plain)
        assert together[request.request_id] == alone[request.request_id]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(arrivals=workloads(), one=houses(), other=houses())
def test_two_ways_to_run_the_same_requests_give_the_same(arrivals: list[Arrival], one: House, other: House) -> None:
    """And when they come does not matter either."""
    at_once = [replace(arrival, step=0) for arrival in arrivals]
    assert run(arrivals, one) == run(at_once, other)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("mode", PREEMPTION_MODES)
def test_a_crowded_pool_changes_no_token(policy: str, caching: bool, in_flight: int, mode: str) -> None:
    """Twelve long outputs in a pool for two of them, so that everybody is preempted again and again."""
    sampling = SamplingParams(seed=3, ignore_eos=True, max_tokens=20)
    prompt = [10, 11, 12, 13, 14, 15, 16]
    arrivals = [Arrival(submission(n, [*prompt, 20 + n % 5], replace(sampling, seed=n)), n % 4) for n in range(1, 13)]
    roomy = House(Config(max_num_seqs=6, max_num_batched_tokens=64), 200, 4, 0, 2)
    config = Config(
        max_num_seqs=6,
        max_num_batched_tokens=16,
        enable_prefix_caching=caching,
        policy=policy,
        max_batches_in_flight=in_flight,
        preemption_mode=mode,
    )
    assert run(arrivals, House(config, 14, 4, 16, in_flight)) == run(arrivals, roomy)
