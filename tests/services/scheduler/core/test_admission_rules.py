"""One formula says what can run and what is admitted; what is admitted has its blocks; and the prefix hits that ATOM has, through whole schedules.

Unless said: blocks of 4, 10 of them, at most 4 requests, 64 positions a step.
"""

import hypothesis.strategies as st
import pytest
from fake_worker import MODEL, FakeWorker
from hypothesis import given, settings
from scheduler_rig import WORKER, Rig

from services.scheduler.core.admission import Admitted, RefusalReason, Refused, positions_reserved
from services.scheduler.core.sequence_status import SequenceStatus
from tessera.values.config import POLICIES, Config
from tessera.values.finish import FinishReason


def numbers(count: int, first: int = 1) -> list[int]:
    return list(range(first, first + count))


def rig_of(num_blocks: int = 10, **config: object) -> Rig:
    return Rig(Config(**{"max_num_seqs": 4, "max_num_batched_tokens": 64, **config}), FakeWorker(num_blocks, 4))


def run(rig: Rig, number: int, prompt: list[int], max_tokens: int = 1) -> int:
    """Run a request to its end; returns how many of its prompt tokens were cached."""
    rig.submit(number, prompt, max_tokens=max_tokens)
    rig.finish_all()
    return rig.sequence(number).num_cached_tokens


# -- one formula


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    num_blocks=st.integers(1, 8),
    block_size=st.integers(1, 5),
    prompt_len=st.integers(1, 45),
    max_tokens=st.integers(1, 20),
    own_max=st.sampled_from((0, 0, 5, 20)),
    budget=st.sampled_from((4, 16, 64)),
    chunks=st.booleans(),
)
def test_what_is_taken_in_is_admitted_into_an_empty_pool_and_ends(
    num_blocks: int, block_size: int, prompt_len: int, max_tokens: int, own_max: int, budget: int, chunks: bool
) -> None:
    """And what is refused could not have given one token."""
    config = Config(max_num_seqs=4, max_num_batched_tokens=budget, enable_chunked_prefill=chunks)
    rig = Rig(config, FakeWorker(num_blocks, block_size))
    answer = rig.try_submit(1, [10 + n % 50 for n in range(prompt_len)], max_tokens=max_tokens, max_model_length=own_max)
    room = min(num_blocks * block_size, (own_max or MODEL.max_model_len) - 1, prompt_len if chunks else budget)
    if isinstance(answer, Refused):
        assert answer.reason is RefusalReason.TOO_LONG and answer.retry_after_ms == 0
        assert prompt_len > room
        return
    assert isinstance(answer, Admitted) and prompt_len <= room
    batch = rig.schedule()
    assert batch is not None and len(batch.entries) == 1, "nothing else runs: it cannot have to wait"
    rig.post(rig.execute())
    rig.finish_all()
    assert rig.scheduler.load().num_preemptions == 0, "what it can need, it has"
    rig.assert_as_alone(1)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(prompt_len=st.integers(1, 500), max_tokens=st.integers(1, 500), len_max=st.integers(2, 500))
def test_no_more_is_reserved_than_a_request_can_use(prompt_len: int, max_tokens: int, len_max: int) -> None:
    tokens_max = min(prompt_len + max_tokens, len_max)
    if prompt_len < tokens_max:
        positions = positions_reserved(prompt_len, tokens_max)
        assert prompt_len <= positions <= min(prompt_len + 1, tokens_max - 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_blocks_of_a_prompt_in_progress_are_nobody_elses(policy: str) -> None:
    """36 + 1 positions in chunks of 8: all ten blocks are its own from the first chunk on, so that no other request gets in between."""
    rig = rig_of(max_num_batched_tokens=8, policy=policy, max_batches_in_flight=1)
    rig.submit(1, numbers(36), max_tokens=3)
    rig.submit(2, [50], max_tokens=3)
    for _ in range(4):
        rig.step()
        assert rig.free_blocks == 0 and rig.sequence(2).status is SequenceStatus.WAITING
    rig.finish_all()
    assert rig.scheduler.load().num_preemptions == 0
    rig.assert_as_alone(1)
    rig.assert_as_alone(2)


def test_the_first_decode_position_of_every_prompt_in_progress_is_reserved() -> None:
    """Two prompts of 8 in 6 blocks: each has a third one for its ninth position, so neither is sent away when it gets there."""
    rig = rig_of(num_blocks=6, max_num_batched_tokens=8, enable_prefix_caching=False)
    rig.submit(1, numbers(8), max_tokens=5)
    rig.submit(2, numbers(8, 20), max_tokens=5)
    rig.step()
    rig.step()
    assert rig.free_blocks == 0
    rig.finish_all(in_flight=2)
    assert rig.scheduler.load().num_preemptions == 0
    rig.assert_as_alone(2)


@pytest.mark.parametrize("own", [{}, {"scheduler_delay_factor": 3.0}, {"itl_target_ms": 5}, {"policy": "prefill_first"}])
def test_after_doing_nothing_for_long_a_request_starts_at_once(own: dict[str, object]) -> None:
    rig = rig_of(**own)
    assert rig.schedule() is None
    rig.now_us += 3_600_000_000
    assert rig.schedule() is None
    assert run(rig, 1, numbers(5), max_tokens=3) == 0
    rig.now_us += 3_600_000_000
    assert rig.schedule() is None
    rig.submit(2, numbers(5, 30), max_tokens=3)
    batch = rig.schedule()
    assert batch is not None and batch.total_tokens == 5
    rig.post(rig.execute())
    rig.finish_all()
    rig.assert_as_alone(2)


# -- hits


@pytest.mark.parametrize(
    ("first", "second", "num_cached"),
    [
        (numbers(8), [1, 2, 3, 4, 9, 10, 11, 12], 4),
        (numbers(8), numbers(8, 9), 0),
        (numbers(4), numbers(4), 0),
        (numbers(8), numbers(8), 4),
        ([42], [42], 0),
    ],
    ids=["half", "nothing in common", "its only block", "all but its last block", "part of a block"],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_finished_prompt_is_hit_in_whole_blocks_but_for_the_last(
    first: list[int], second: list[int], num_cached: int, policy: str
) -> None:
    rig = rig_of(policy=policy)
    run(rig, 1, first)
    assert run(rig, 2, second) == num_cached
    rig.assert_as_alone(2)


def test_a_prompt_that_was_never_computed_is_not_hit() -> None:
    """Its blocks were its own when it was aborted, but the worker had not begun."""
    rig = rig_of()
    rig.submit(1, numbers(8))
    rig.schedule()
    rig.scheduler.abort((1).to_bytes(16, "big"), rig.now_us)
    rig.submit(2, [1, 2, 3, 4, 9, 10, 11, 12], max_tokens=1)
    batch = rig.schedule()
    assert batch is not None and batch.entries[0].num_cached_tokens == 0


def test_a_hit_in_the_free_list_and_a_fresh_block_are_two() -> None:
    """4 blocks, 2 of them held: the hit and one more are just there."""
    rig = rig_of(num_blocks=4)
    run(rig, 1, numbers(8))
    rig.submit(2, numbers(6, 40), max_tokens=2)
    rig.step()
    assert rig.free_blocks == 2
    rig.submit(3, [1, 2, 3, 4, 9, 10, 11, 12], max_tokens=1)
    batch = rig.schedule()
    assert batch is not None and [entry.num_cached_tokens for entry in batch.entries] == [4]


def test_a_shared_hit_without_a_fresh_block_is_not_enough() -> None:
    """2 blocks, both held by the request whose first one is hit."""
    rig = rig_of(num_blocks=2, max_batches_in_flight=1)
    rig.submit(1, numbers(7), max_tokens=2)
    rig.step()
    rig.submit(2, [1, 2, 3, 4, 9, 10, 11], max_tokens=1)
    batch = rig.schedule()
    assert batch is not None and not batch.entries
    rig.post(rig.execute())
    rig.finish_all()
    rig.assert_as_alone(2)


def test_a_full_pool_admits_as_soon_as_a_block_is_free() -> None:
    rig = rig_of(max_batches_in_flight=1)
    rig.submit(1, numbers(32), max_tokens=1)
    rig.submit(2, numbers(7, 40), max_tokens=9)
    rig.submit(3, [50], max_tokens=2)
    batch = rig.schedule()
    assert batch is not None and len(batch.entries) == 2 and rig.free_blocks == 0
    rig.post(rig.execute())
    assert rig.reason(1) is FinishReason.MAX_TOKENS
    batch = rig.schedule()
    assert batch is not None and [entry.request_id[-1] for entry in batch.entries] == [3]


def test_blocks_handed_out_again_are_hit_no_more() -> None:
    rig = rig_of(num_blocks=2)
    run(rig, 1, numbers(8))
    run(rig, 2, numbers(8, 40))
    assert run(rig, 3, numbers(8)) == 0


def test_the_cache_holds_no_more_blocks_than_the_pool() -> None:
    rig = rig_of(num_blocks=4)
    for number in range(1, 21):
        run(rig, number, numbers(4, number))
    replica = rig.scheduler.replica(WORKER)
    assert replica is not None and len(replica.manager.published().block_ids) <= 4


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize(("prompt_len", "output_len", "num_cached"), [(8, 12, 16), (10, 6, 12), (8, 13, 20), (8, 4, 8)])
def test_generated_tokens_are_hit_in_whole_computed_blocks(
    prompt_len: int, output_len: int, num_cached: int, in_flight: int
) -> None:
    """The next turn of a talk. The last token of an answer was never computed, so a block that ends with it is none."""
    rig = rig_of(max_batches_in_flight=in_flight)
    rig.submit(1, numbers(prompt_len), max_tokens=output_len)
    rig.finish_all(in_flight)
    talk = numbers(prompt_len) + rig.output(1)
    assert run(rig, 2, [*talk, 60]) == num_cached
    rig.assert_as_alone(2)
