"""The prefix cache as requests see it: what is computed once, what is told, and what must never be hit."""

from dataclasses import replace

import pytest
from fake_worker import FakeWorker
from scheduler_rig import WORKER, Rig

from kv_manager.prefix_cache_stats import PrefixCacheStats
from services.scheduler.core.held_blocks import held_blocks
from tessera.values.admin import PrefixCacheReset
from tessera.values.config import PREFIX_INDEXES, Config
from tessera.values.finish import FinishReason


def numbers(count: int, first: int = 10) -> list[int]:
    return list(range(first, first + count))


def rig_of(num_blocks: int = 20, budget: int = 64, **config: object) -> Rig:
    return Rig(Config(**{"max_num_seqs": 8, "max_num_batched_tokens": budget, **config}), FakeWorker(num_blocks, 4))


def stats(rig: Rig) -> PrefixCacheStats:
    replica = rig.scheduler.replica(WORKER)
    assert replica is not None
    return replica.manager.stats


def published(rig: Rig) -> set[int]:
    return set(next(iter(rig.state.blocks.values())))


def test_a_prompt_that_is_cached_whole_still_computes_its_last_block() -> None:
    """Case 1: B=4, P=[1..8], three times."""
    rig = rig_of()
    for number in (1, 2, 3):
        rig.submit(number, numbers(8), max_tokens=3)
        rig.finish_all()
        rig.assert_as_alone(number)
    assert [rig.sequence(number).num_cached_tokens for number in (1, 2, 3)] == [0, 4, 4]
    assert rig.output(1) == rig.output(2) == rig.output(3)


def test_a_hit_leaves_only_the_rest_to_compute() -> None:
    """Case 2: B=4, P=[1..9], then P=[1..8, 20]."""
    rig = rig_of()
    rig.submit(1, numbers(9), max_tokens=1)
    rig.finish_all()
    rig.submit(2, [*numbers(8), 60], max_tokens=1)
    batch = rig.schedule()
    assert batch is not None and batch.num_scheduled_tokens.tolist() == [1] and batch.context_lens.tolist() == [9]
    assert batch.entries[0].num_cached_tokens == 8 and len(batch.entries[0].token_ids) == 9


def test_a_resume_onto_its_own_blocks_computes_only_the_rest() -> None:
    """Case 2 after a preemption, and case 17: that is no cache hit, it has its own counter."""
    rig = rig_of(num_blocks=6)
    rig.submit(1, numbers(7), max_tokens=12)
    rig.submit(2, numbers(7, 40), max_tokens=12)
    rig.finish_all()
    resumed = [entry for batch in rig.batches for entry in batch.entries if entry.attempt > 1]
    assert resumed and all(entry.num_cached_tokens >= 4 for entry in resumed)
    assert all(entry.num_cached_tokens < len(entry.token_ids) for entry in resumed)
    assert [rig.sequence(number).num_cached_tokens for number in (1, 2)] == [0, 0]
    assert stats(rig).hit_tokens == 0 and stats(rig).query_tokens == 14
    assert stats(rig).resume_cached_tokens == sum(entry.num_cached_tokens for entry in resumed)
    rig.assert_as_alone(2)


def test_the_same_prefix_is_no_hit_where_its_step_failed() -> None:
    """Case 3: nothing is published before its output has come, and nothing if the step fails: who has waited for it computes it."""
    rig = rig_of()
    rig.submit(1, [*numbers(8), 61], max_tokens=3)
    rig.submit(2, [*numbers(8), 62], max_tokens=3)
    for number in (1, 2):
        batch = rig.schedule()
        assert batch is not None and [entry.num_cached_tokens for entry in batch.entries] == [0]
        rig.worker.fail_next_row(number.to_bytes(16, "big"))
        rig.post(rig.execute())
    assert rig.reason(1) is rig.reason(2) is FinishReason.ERROR
    assert published(rig) == set()
    rig.submit(3, [*numbers(8), 63], max_tokens=3)
    rig.finish_all()
    assert rig.sequence(3).num_cached_tokens == 0
    rig.assert_as_alone(3)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_hits_come_with_and_without_deferred_outputs(in_flight: int) -> None:
    """Case 4."""
    rig = rig_of()
    for number in (1, 2):
        rig.submit(number, numbers(9), max_tokens=6)
        rig.finish_all(in_flight)
    assert rig.sequence(2).num_cached_tokens == 8
    rig.assert_as_alone(2)


def test_a_block_is_published_when_its_last_position_is_computed() -> None:
    """Case 5 without drafts: the token at position 7 is known one step before its KV is written; placeholders count for nothing."""
    rig = rig_of()
    rig.submit(1, numbers(6), max_tokens=8)
    seen = []
    for _ in range(5):
        rig.step(in_flight=2)
        seen.append((rig.sequence(1).ledger.num_tokens, len(published(rig))))
    assert seen == [(7, 1), (8, 1), (9, 2), (10, 2), (11, 2)]


def test_generated_tokens_are_hit_too() -> None:
    rig = rig_of()
    rig.submit(1, numbers(5), max_tokens=8)
    rig.finish_all()
    rig.submit(2, numbers(5) + rig.output(1), max_tokens=2)
    rig.finish_all()
    assert rig.sequence(2).num_cached_tokens == 12
    rig.assert_as_alone(2)


def test_an_evicted_block_is_not_hit() -> None:
    """Case 10: N=4, B=4."""
    rig = rig_of(num_blocks=4)
    for number, first in ((1, 10), (2, 30), (3, 10)):
        rig.submit(number, numbers(16, first), max_tokens=1)
        rig.finish_all()
        rig.assert_as_alone(number)
    assert rig.sequence(3).num_cached_tokens == 0
    assert len(published(rig)) == 4


def test_an_aborted_chunk_in_flight_is_not_cached() -> None:
    """Case 62: B=4, budget 8, 24 ids; aborted after the second chunk was issued."""
    rig = rig_of(budget=8)
    rig.submit(1, numbers(24), max_tokens=3)
    rig.schedule()
    rig.schedule()
    rig.post(rig.execute())
    rig.scheduler.abort((1).to_bytes(16, "big"), rig.now_us)
    rig.post(rig.execute())
    assert rig.reason(1) is FinishReason.ABORTED
    assert rig.free_blocks == 20 and len(published(rig)) == 2
    rig.finish_all()
    rig.submit(2, numbers(24), max_tokens=3)
    rig.finish_all()
    assert rig.sequence(2).num_cached_tokens == 8
    rig.assert_as_alone(2)


def test_a_request_that_ends_gives_everything_back() -> None:
    """Case 63."""
    rig = rig_of()
    rig.submit(1, numbers(9), max_tokens=4)
    rig.finish_all(in_flight=2)
    assert rig.free_blocks == 20 and not rig.worker.slots


def test_looking_up_without_admitting_holds_nothing() -> None:
    """Case 64: a request that does not fit yet is looked up every step, then aborted."""
    rig = rig_of(num_blocks=5)
    rig.submit(1, numbers(8), max_tokens=1)
    rig.finish_all()
    rig.submit(2, numbers(12, 40), max_tokens=6)
    rig.step()
    rig.submit(3, [*numbers(8), 60], max_tokens=1)
    for _ in range(3):
        rig.step()
    assert rig.scheduler.load().num_waiting == 1
    rig.scheduler.abort((3).to_bytes(16, "big"), rig.now_us)
    rig.finish_all()
    assert rig.free_blocks == 5


def test_caching_can_be_switched_off() -> None:
    rig = rig_of(enable_prefix_caching=False)
    for number in (1, 2):
        rig.submit(number, numbers(9), max_tokens=3)
        rig.finish_all()
    assert rig.sequence(2).num_cached_tokens == 0 and published(rig) == set()


@pytest.mark.parametrize("field", ["weights_digest", "kv_format"])
def test_other_weights_or_formats_share_nothing(field: str) -> None:
    """Digests fold in what made the KV, so that entries of one cannot be taken for entries of the other (case 13)."""
    digests = []
    for value in ("a", "b"):
        worker = FakeWorker(20, 4)
        if field == "kv_format":
            worker.geometry = replace(worker.geometry, kv_format=value)
        else:
            worker.model = replace(worker.model, weights_digest=value)
        worker.restart()
        rig = Rig(worker=worker)
        rig.submit(1, numbers(9), max_tokens=1)
        rig.finish_all()
        digests.append({entry.digest for entries in rig.state.blocks.values() for entry in entries.values()})
    assert len(digests[0]) == len(digests[1]) == 2 and not digests[0] & digests[1]


def test_tenants_with_different_salts_share_nothing() -> None:
    rig = rig_of()
    for number, salt in enumerate(("anna", "bert", "", "anna"), 1):
        rig.submit(number, numbers(9), max_tokens=3, cache_salt=salt)
        rig.finish_all()
        rig.assert_as_alone(number)
    assert [rig.sequence(number).num_cached_tokens for number in (1, 2, 3, 4)] == [0, 0, 0, 8]


def test_a_tenants_blocks_are_its_own_after_an_attach() -> None:
    """The journal is empty, so that the entries come from the report: of a live slot, and of a dropped one."""
    rig = rig_of()
    rig.submit(1, numbers(9), max_tokens=1, cache_salt="anna")
    rig.submit(2, numbers(9, 50), max_tokens=20, cache_salt="bert")
    rig.step()
    rig.submit(3, numbers(3), max_tokens=1)
    rig.step()
    report = rig.worker.report()
    assert {slot.cache_salt for slot in report.slots} == {"", "bert"}
    assert {slot.cache_salt for slot in report.dropped} == {"anna"}
    replica = rig.scheduler.replica(WORKER)
    assert replica is not None
    assert set(held_blocks(report, ())) == set(replica.manager.published()) != set()


def test_a_slot_of_another_tenant_is_not_gone_on_with() -> None:
    rig = rig_of()
    rig.submit(1, numbers(9), max_tokens=20, cache_salt="anna")
    rig.step()
    (slot,) = rig.worker.report().slots
    assert rig.sequence(1).agrees_with(slot)
    assert not rig.sequence(1).agrees_with(replace(slot, cache_salt="bert"))


def test_a_reset_cache_is_hit_no_more_and_the_store_knows() -> None:
    rig = rig_of()
    rig.submit(1, numbers(9), max_tokens=3)
    rig.finish_all()
    rig.submit(2, numbers(9, 50), max_tokens=8)
    rig.step()
    rig.step()
    held = set(rig.sequence(2).table.block_ids[:2])
    assert rig.scheduler.admin.reset_prefix_cache() == PrefixCacheReset(2, 2)
    rig.submit(3, numbers(9), max_tokens=3)
    rig.step()
    assert published(rig) == held | set(rig.sequence(3).table.block_ids[:2])
    rig.finish_all()
    rig.submit(4, numbers(9), max_tokens=3)
    rig.finish_all()
    assert [rig.sequence(number).num_cached_tokens for number in (3, 4)] == [0, 8]
    for number in (1, 2, 3, 4):
        rig.assert_as_alone(number)


def test_either_index_gives_the_same_batches() -> None:
    told = []
    for prefix_index in PREFIX_INDEXES:
        rig = rig_of(num_blocks=12, prefix_index=prefix_index)
        for number, salt in enumerate(("", "", "anna", "", "anna"), 1):
            rig.submit(number, [*numbers(8), 40 + number % 2], max_tokens=6, cache_salt=salt)
            rig.step()
        rig.finish_all()
        told.append(
            [(batch.slots.tolist(), batch.context_lens.tolist(), batch.new_block_ids.tolist()) for batch in rig.batches]
        )
        assert rig.scheduler.load().prefix_cache.hit_tokens == 24
    assert told[0] == told[1]


def test_who_wants_the_prompts_logprobs_has_every_position_computed() -> None:
    rig = rig_of()
    rig.submit(1, numbers(12), max_tokens=3)
    rig.finish_all()
    rig.submit(2, numbers(12), max_tokens=3, prompt_logprobs=0)
    batch = rig.schedule()
    assert batch is not None
    assert [entry.num_cached_tokens for entry in batch.entries] == [0] and batch.num_scheduled_tokens.tolist() == [12]
    rig.finish_all()
    rig.submit(3, numbers(12), max_tokens=3)
    rig.finish_all()
    for number in (1, 2, 3):
        rig.assert_as_alone(number)
    assert [rig.sequence(number).num_cached_tokens for number in (1, 2, 3)] == [0, 0, 8]


def test_a_fork_that_wants_the_prompts_logprobs_computes_it_itself() -> None:
    rig = rig_of()
    parent = rig.submit(1, numbers(12), max_tokens=8)
    rig.try_submit(2, numbers(12), max_tokens=3, fork_of=parent, prompt_logprobs=1)
    rig.finish_all()
    rig.assert_as_alone(1)
    rig.assert_as_alone(2)
    assert rig.sequence(2).num_cached_tokens == 0
