"""What is let in, what is refused at once, and what has to wait."""

from typing import Any

import numpy as np
import pytest
from fake_worker import MODEL, FakeWorker
from scheduler_rig import CONFIG, Rig, submission

from services.scheduler.core.admission import (
    RESUMES_QUEUED_FACTOR,
    Admitted,
    Known,
    RefusalReason,
    Refused,
    positions_reserved,
    request_len_max,
)
from tessera.values.config import Config
from tessera.values.finish import FinishReason
from tessera.values.model import KVGeometry, WorkerLimits
from tessera.values.request import TimeLimits


def numbers(count: int, first: int = 10) -> list[int]:
    return list(range(first, first + count))


def small_pool(num_blocks: int = 4, **config: object) -> Rig:
    return Rig(Config(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, **config}), FakeWorker(num_blocks, 4))


@pytest.mark.parametrize(
    ("num_tokens", "tokens_max", "positions"),
    [(7, 12, 8), (8, 12, 9), (16, 17, 16), (1, 2, 1)],
)
def test_the_prompt_and_the_first_decode_position_are_reserved(num_tokens: int, tokens_max: int, positions: int) -> None:
    assert positions_reserved(num_tokens, tokens_max) == positions


def test_the_longest_request_leaves_its_last_token_without_kv() -> None:
    assert request_len_max(MODEL, KVGeometry(4, 4, 8, "f")) == 17
    assert request_len_max(MODEL, KVGeometry(400, 4, 8, "f")) == MODEL.max_model_len


def test_a_prompt_that_never_fits_is_refused_at_once_and_blocks_nobody() -> None:
    """Case 24."""
    rig = small_pool()
    refused = rig.try_submit(1, numbers(17), max_tokens=5)
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.TOO_LONG and refused.retry_after_ms == 0
    assert "17" in refused.message and "16" in refused.message
    rig.submit(2, numbers(3), max_tokens=2)
    rig.finish_all()
    rig.assert_as_alone(2)


def test_a_prompt_as_large_as_the_pool_gets_one_token() -> None:
    """Case 24, boundary: the sampled token needs no KV."""
    rig = small_pool()
    rig.submit(1, numbers(16), max_tokens=1)
    rig.submit(2, numbers(16, 30), max_tokens=5)
    rig.finish_all()
    assert (rig.reason(1), len(rig.output(1))) == (FinishReason.MAX_TOKENS, 1)
    assert (rig.reason(2), len(rig.output(2))) == (FinishReason.MAX_MODEL_LEN, 1)


def test_a_cached_block_that_is_free_costs_a_block() -> None:
    """Case 8."""
    rig = small_pool()
    rig.submit(1, numbers(16), max_tokens=1)
    rig.finish_all()
    assert rig.free_blocks == 4
    assert isinstance(rig.try_submit(2, numbers(8) + numbers(12, 40), max_tokens=1), Refused)
    rig.submit(3, numbers(8) + numbers(8, 40), max_tokens=1)
    rig.step()
    assert rig.sequence(3).num_cached_tokens == 8
    rig.assert_as_alone(3)


def test_a_cached_block_that_is_held_costs_nothing() -> None:
    """Case 8, while the first one runs: 3 blocks are its own, 2 of them shared, so one more is enough."""
    rig = small_pool()
    rig.submit(1, numbers(9), max_tokens=3)
    rig.step()
    rig.submit(2, [*numbers(8), 60], max_tokens=3)
    rig.step()
    assert rig.scheduler.load().num_running == 2
    rig.finish_all()
    rig.assert_as_alone(1)
    rig.assert_as_alone(2)


def test_lengths_around_the_models_limit() -> None:
    """Case 56: limit 64."""
    rig = Rig(worker=FakeWorker(40, 4))
    rig.submit(1, [11] * 63, max_tokens=5)
    for number, length in ((2, 64), (3, 65)):
        refused = rig.try_submit(number, [11] * length, max_tokens=5)
        assert isinstance(refused, Refused) and refused.reason is RefusalReason.TOO_LONG and "63" in refused.message
    rig.finish_all()
    assert (rig.reason(1), len(rig.output(1))) == (FinishReason.MAX_MODEL_LEN, 1)


def test_lengths_around_a_requests_own_cap() -> None:
    """Case 56 with the request's own limit, 12."""
    rig = small_pool(20)
    for number, length in ((1, 12), (2, 13)):
        refused = rig.try_submit(number, numbers(length), max_tokens=5, max_model_length=12)
        assert isinstance(refused, Refused) and refused.reason is RefusalReason.TOO_LONG and refused.retry_after_ms == 0
        assert f"{length} tokens" in refused.message and "max_model_length of 12" in refused.message
    rig.submit(3, numbers(11), max_tokens=5, max_model_length=12)
    rig.submit(4, numbers(8, 30), max_tokens=9, min_tokens=9, max_model_length=12)
    batch = rig.schedule()
    assert batch is not None and [len(entry.block_table) for entry in batch.entries] == [3, 3], "no block beyond the cap"
    rig.finish_all(in_flight=2)
    assert (rig.reason(3), len(rig.output(3))) == (FinishReason.MAX_MODEL_LEN, 1)
    assert (rig.reason(4), len(rig.output(4))) == (FinishReason.MAX_MODEL_LEN, 4), "caps beat min_tokens"
    rig.assert_as_alone(3)
    rig.assert_as_alone(4)


def test_a_resume_beyond_its_own_cap_ends_at_the_cap() -> None:
    """Case 84: tokens that a client received are no reason to refuse it."""
    rig = small_pool(20)
    resumed = submission(1, numbers(5), max_model_length=8)
    assert isinstance(rig.scheduler.submit(resumed, 1, (40, 41, 42, 43), rig.now_us), Admitted)
    rig.check()
    assert (rig.reason(1), rig.output(1)) == (FinishReason.MAX_MODEL_LEN, [40, 41, 42])


def test_one_token_takes_no_decode_block() -> None:
    """Case 55: max_tokens 1, the prompt a multiple of the block size."""
    rig = small_pool(8)
    rig.submit(1, numbers(8), max_tokens=1)
    batch = rig.schedule()
    assert batch is not None and len(batch.entries[0].block_table) == 2
    assert rig.schedule() is None, "nothing is computed behind the last token"
    rig.post(rig.execute())
    assert rig.reason(1) is FinishReason.MAX_TOKENS


def test_without_a_worker_nobody_knows_what_fits() -> None:
    rig = Rig(attach=False)
    refused = rig.try_submit(1, [10])
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.NO_WORKER and refused.retry_after_ms > 0
    rig.attach()
    rig.submit(1, [10], max_tokens=1)


def test_the_queue_is_bounded_in_requests() -> None:
    rig = small_pool(max_queued_requests=2)
    rig.submit(1, [10])
    rig.submit(2, [10])
    refused = rig.try_submit(3, [10])
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.OVERLOADED and refused.retry_after_ms > 0
    assert "2" in refused.message
    rig.step()
    rig.submit(3, [10])


def test_the_queue_is_bounded_in_tokens() -> None:
    rig = small_pool(max_queued_tokens=8)
    rig.submit(1, numbers(9), max_tokens=1)  # an empty queue takes one of any length
    refused = rig.try_submit(2, [10])
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.OVERLOADED
    assert "9 tokens" in refused.message and "8" in refused.message


def test_a_resume_is_taken_in_though_the_queue_is_full() -> None:
    rig = small_pool(max_queued_requests=1)
    rig.submit(1, numbers(3), max_tokens=4)
    rig.finish_all()
    output = tuple(rig.output(1))
    rig.submit(2, [10])
    result = rig.scheduler.submit(submission(3, numbers(3), rig.sequence(1).submission.sampling), 1, output[:2], rig.now_us)
    assert isinstance(result, Admitted)
    rig.finish_all()
    assert rig.sequence(3).output_token_ids() == output


def test_resumes_of_what_nobody_knows_are_bounded_too() -> None:
    """A client can say that it had begun whatever it likes."""
    rig = small_pool(max_queued_requests=1)
    for number in range(1, 1 + RESUMES_QUEUED_FACTOR):
        assert rig.scheduler.submit(submission(number, [10]), 1, (), rig.now_us) == Admitted(number.to_bytes(16, "big"))
    refused = rig.scheduler.submit(submission(9, [10]), 1, (), rig.now_us)
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.OVERLOADED and refused.retry_after_ms > 0


def test_a_submit_is_idempotent_on_its_id() -> None:
    rig = small_pool()
    rig.submit(1, numbers(5), max_tokens=3)
    rig.step()
    before = rig.output(1)
    assert rig.try_submit(1, numbers(5), max_tokens=3) == Known((1).to_bytes(16, "big"), 0)
    assert rig.output(1) == before and rig.scheduler.load().num_running == 1
    rig.finish_all()
    rig.assert_as_alone(1)


def test_another_principal_cannot_reach_a_request_by_its_id() -> None:
    rig = small_pool()
    rig.submit(1, numbers(5))
    stranger = submission(1, numbers(5))
    object.__setattr__(stranger, "principal", "somebody else")
    refused = rig.scheduler.submit(stranger, 5, (), rig.now_us)
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.ALREADY_EXISTS
    assert rig.sequence(1).subscriber == 0


def test_a_clients_id_is_unique_while_it_lives() -> None:
    """Case 67: a second body is refused, the same one leads to the first, and an abort frees the name without touching the next."""
    rig = small_pool(20)
    rig.submit(1, numbers(5), client_request_id="x", max_tokens=4)
    refused = rig.try_submit(2, numbers(6), client_request_id="x", max_tokens=4)
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.ALREADY_EXISTS and "'x'" in refused.message
    assert rig.try_submit(3, numbers(5), client_request_id="x", max_tokens=4, seed=99) == Known((1).to_bytes(16, "big"), 0)
    own = {"client_request_id": "x", "max_tokens": 4, "is_seed_given": True}
    assert isinstance(rig.try_submit(4, numbers(5), seed=99, **own), Known), "the known one was drawn"
    rig.schedule()
    rig.scheduler.abort((1).to_bytes(16, "big"), rig.now_us)
    rig.submit(4, numbers(6), client_request_id="x", max_tokens=4)
    rig.scheduler.abort((1).to_bytes(16, "big"), rig.now_us)
    rig.finish_all()
    assert rig.reason(1) is FinishReason.ABORTED and rig.output(1) == []
    rig.assert_as_alone(4)


@pytest.mark.parametrize("other", [{"priority": 2}, {"cache_salt": "b"}, {"max_model_length": 31}, {"limits": TimeLimits(6)}])
def test_another_order_namespace_or_cap_is_another_body(other: dict[str, Any]) -> None:
    rig = small_pool(20)
    asked: dict[str, Any] = {"max_tokens": 4, "priority": 1, "cache_salt": "a", "max_model_length": 30}
    asked["limits"] = TimeLimits(5, deadline_ms=100)
    rig.submit(1, numbers(5), client_request_id="x", **asked)
    refused = rig.try_submit(2, numbers(5), client_request_id="x", **(asked | other))
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.ALREADY_EXISTS
    asked["limits"] = TimeLimits(5, deadline_ms=50)
    again = rig.try_submit(3, numbers(5), client_request_id="x", **asked)
    assert again == Known((1).to_bytes(16, "big"), 0), "its call has another deadline"


@pytest.mark.parametrize(("known", "again"), [(1, 2), (1, 0), (0, 2)])
def test_several_answers_are_not_gone_on_with(known: int, again: int) -> None:
    """Taken over one by one they would end each other's calls. 0: one that is alone; else of which request it is."""
    rig = small_pool(20)
    asked: dict[str, Any] = {"max_tokens": 4, "client_request_id": "x"}
    first = asked | {"fork_of": known.to_bytes(16, "big") if known else b""}
    rig.submit(1, numbers(5), **first)
    own = asked | {"fork_of": again.to_bytes(16, "big") if again else b""}
    refused = rig.try_submit(2, numbers(5), **own)
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.ALREADY_EXISTS
    assert rig.try_submit(1, numbers(5), **first) == Known((1).to_bytes(16, "big"), 0), "its gateway says it again"
    rig.finish_all()
    rig.assert_as_alone(1)
    assert isinstance(rig.try_submit(2, numbers(5), **own), Admitted), "the name is free"


def test_the_head_of_the_queue_is_never_passed() -> None:
    """Case 33: running use 4 of 6 blocks, the head needs 3, the next 1: both wait, the head goes first."""
    rig = small_pool(6, enable_prefix_caching=False)
    rig.submit(1, numbers(12), max_tokens=3)
    rig.step()
    assert rig.free_blocks == 2
    rig.submit(2, numbers(9, 30), max_tokens=3)
    rig.submit(3, [60], max_tokens=2)
    rig.step()
    assert rig.scheduler.load().num_waiting == 2
    rig.finish_all()
    entered = [entry.request_id[-1] for batch in rig.batches for entry in batch.entries]
    assert entered == [1, 2, 3]


def test_without_chunking_a_prompt_must_fit_one_step() -> None:
    rig = Rig(
        Config(max_num_seqs=4, max_num_batched_tokens=10, enable_chunked_prefill=False, long_prefill_token_threshold=3),
        FakeWorker(20, 4),
    )
    refused = rig.try_submit(1, numbers(11))
    assert isinstance(refused, Refused) and "11" in refused.message and "10" in refused.message
    rig.submit(2, numbers(6), max_tokens=3)
    rig.submit(3, numbers(6, 30), max_tokens=3)
    first, _ = rig.schedule(), rig.post(rig.execute())
    assert first is not None and first.num_scheduled_tokens.tolist() == [6], "the second does not fit whole"
    second = rig.schedule()
    assert second is not None and second.num_scheduled_tokens.tolist() == [1, 6]


def test_columns_of_a_submission_are_not_changed() -> None:
    rig = small_pool(8)
    request = submission(1, numbers(6))
    rig.scheduler.submit(request, 0, (), rig.now_us)
    rig.finish_all()
    assert np.array_equal(request.prompt_token_ids, numbers(6))


def test_a_worker_can_lower_the_limits() -> None:
    rig = Rig(CONFIG, FakeWorker(20, 4, WorkerLimits(max_num_seqs=2, max_num_batched_tokens=5, max_batches_in_flight=1)))
    for number in (1, 2, 3):
        rig.submit(number, numbers(4, 20 + number), max_tokens=4)
    first = rig.schedule()
    assert first is not None and first.num_scheduled_tokens.tolist() == [4, 1]
    assert rig.schedule() is None
    rig.finish_all()
