"""The block manager's rules, each as the smallest case that once broke an engine. Blocks of 4 tokens unless said."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kv_manager import prefix_cache
from kv_manager.allocation import PoolExhausted
from kv_manager.block_manager import BlockManager
from kv_manager.block_table import BlockTable

Serve = Callable[..., Any]


def ids(first: int, last: int) -> list[int]:
    """The token ids first..last, both included."""
    return list(range(first, last + 1))


def digests(serving: Any) -> set[int]:
    return {entry.digest for entry in serving.manager.published()}


class TestHits:
    def test_a_full_prompt_hit_leaves_the_last_block_to_compute(self, serve: Serve) -> None:
        serving = serve()
        assert serving.run(ids(1, 8)).num_cached_tokens == 0
        second = serving.run(ids(1, 8))
        assert second.num_cached_tokens == 4
        third = serving.run(ids(1, 8))
        assert third.num_cached_tokens == 4
        assert len(digests(serving)) == 2, "the recomputed block is published under the same digest"

    def test_a_hit_covers_whole_blocks_and_only_the_common_prefix(self, serve: Serve) -> None:
        serving = serve()
        serving.run(ids(1, 9))
        assert serving.run([*ids(1, 8), 20]).num_cached_tokens == 8
        assert serving.run([*ids(1, 7), 20, 21]).num_cached_tokens == 4
        assert serving.run([2, *ids(2, 8), 20]).num_cached_tokens == 0

    @pytest.mark.parametrize("num_tokens", [1, 3, 4])
    def test_a_prompt_within_one_block_is_never_cached(self, serve: Serve, num_tokens: int) -> None:
        serving = serve()
        serving.run(ids(1, num_tokens))
        assert serving.run(ids(1, num_tokens)).num_cached_tokens == 0

    def test_blocks_not_computed_yet_are_not_hit(self, serve: Serve) -> None:
        serving = serve()
        first = serving.admit([*ids(1, 8), 21])
        second = serving.admit([*ids(1, 8), 22])
        assert second.num_cached_tokens == 0
        serving.free(first)
        serving.free(second)
        assert digests(serving) == set(), "a step that failed leaves nothing behind"

    def test_a_running_sequence_shares_what_it_has_computed(self, serve: Serve) -> None:
        serving = serve()
        first = serving.admit([*ids(1, 8), 21])
        serving.compute(first, num_tokens=8)
        second = serving.admit([*ids(1, 8), 22])
        assert second.table.block_ids[:2] == first.table.block_ids[:2]
        assert second.table.block_ids[2] != first.table.block_ids[2]

    def test_generated_tokens_are_hit_too(self, serve: Serve) -> None:
        serving = serve()
        first = serving.admit(ids(1, 3), num_tokens=8)
        first.token_ids += [50, 51, 52, 53, 54]
        serving.compute(first, num_tokens=8)
        serving.free(first)
        assert serving.run([1, 2, 3, 50, 51, 52, 53, 54, 9]).num_cached_tokens == 8

    def test_a_digest_that_collides_is_no_hit(self, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prefix_cache, "chain_digests", lambda rows, parent=None: [7] * len(rows))
        serving = serve()
        serving.run([1, 2, 3, 4, 9])
        assert serving.run([5, 6, 7, 8, 9]).num_cached_tokens == 0
        assert serving.run([1, 2, 3, 4, 9]).num_cached_tokens == 4

    def test_equal_blocks_behind_colliding_prefixes_are_told_apart(self, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
        """All first blocks get one digest, all second blocks another: only the whole prefix tells them apart."""
        monkeypatch.setattr(
            prefix_cache, "chain_digests", lambda rows, parent=None: list(range(parent or 100, (parent or 100) + len(rows)))
        )
        serving = serve()
        serving.run([1, 2, 3, 4, 9, 9, 9, 9, 5])
        other = serving.run([5, 6, 7, 8, 9, 9, 9, 9, 5])
        assert other.num_cached_tokens == 0
        assert serving.run([5, 6, 7, 8, 9, 9, 9, 9, 5]).num_cached_tokens == 0
        assert serving.run([1, 2, 3, 4, 9, 9, 9, 9, 5]).num_cached_tokens == 8

    def test_namespaces_do_not_share(self, serve: Serve) -> None:
        """Another version of an adapter of the same name is another namespace: its entries are not even comparable."""
        entries = []
        for namespace in (b"", b"adapter t, version 1", b"adapter t, version 2"):
            serving = serve(namespace=namespace)
            serving.run(ids(1, 9))
            assert serving.run(ids(1, 9)).num_cached_tokens == 8
            entries.append(digests(serving))
        assert not (entries[0] & entries[1] or entries[0] & entries[2] or entries[1] & entries[2])

    def test_caching_off_publishes_and_hits_nothing(self, serve: Serve) -> None:
        serving = serve(enable_prefix_caching=False)
        serving.run(ids(1, 9))
        assert serving.run(ids(1, 9)).num_cached_tokens == 0
        assert serving.manager.published() == ()

    def test_arrays_and_lists_are_one_prompt(self, serve: Serve) -> None:
        serving = serve()
        serving.run(ids(1, 9))
        for token_ids in (np.arange(1, 10, dtype=np.int32), np.arange(1, 10, dtype=np.int64), tuple(ids(1, 9))):
            assert serving.manager.match(BlockTable(), token_ids).num_cached_tokens == 8


class TestPublishing:
    def test_placeholders_and_drafts_are_never_published(self, serve: Serve) -> None:
        """T=6 with 3 drafts: rejected but for the bonus token, block 1 waits; all accepted, blocks 0 and 1 appear."""
        rejected = serve()
        sequence = rejected.admit(ids(1, 6), num_tokens=9)
        rejected.compute(sequence)
        assert len(digests(rejected)) == 1
        sequence.token_ids += [70]
        rejected.compute(sequence, num_tokens=6)
        assert len(digests(rejected)) == 1
        sequence.token_ids += [71]
        rejected.compute(sequence, num_tokens=7)
        assert len(digests(rejected)) == 1, "position 7 is committed, its KV is not written"
        rejected.compute(sequence, num_tokens=8)
        assert {entry.token_ids for entry in rejected.manager.published()} == {(1, 2, 3, 4), (5, 6, 70, 71)}

        accepted = serve()
        sequence = accepted.admit(ids(1, 6), num_tokens=9)
        sequence.token_ids += [70, 71, 72, 73]
        accepted.compute(sequence, num_tokens=9)
        assert {entry.token_ids for entry in accepted.manager.published()} == {(1, 2, 3, 4), (5, 6, 70, 71)}

    def test_a_chunked_prefill_publishes_chunk_by_chunk(self, serve: Serve) -> None:
        serving = serve()
        sequence = serving.admit(ids(1, 10))
        for num_tokens, num_published in ((3, 0), (4, 1), (7, 1), (10, 2)):
            serving.compute(sequence, num_tokens)
            assert sequence.table.num_published == num_published
        assert [entry.published_step for entry in serving.manager.published()] == [2, 4]

    def test_chunks_give_the_digests_of_the_whole(self, serve: Serve) -> None:
        chunked, whole = serve(), serve()
        sequence = chunked.admit(ids(1, 12))
        for num_tokens in range(1, 13):
            chunked.compute(sequence, num_tokens)
        whole.compute(whole.admit(ids(1, 12)))
        assert digests(chunked) == digests(whole)

    def test_an_aborted_prefill_keeps_only_what_it_computed(self, serve: Serve) -> None:
        serving = serve()
        sequence = serving.admit(ids(1, 24))
        serving.compute(sequence, num_tokens=8)
        serving.free(sequence)
        assert serving.manager.num_free_blocks == 16
        assert {entry.token_ids for entry in serving.manager.published()} == {(1, 2, 3, 4), (5, 6, 7, 8)}

    def test_publishing_again_changes_nothing(self, serve: Serve) -> None:
        serving = serve()
        sequence = serving.admit(ids(1, 8))
        serving.compute(sequence)
        before = serving.manager.published()
        serving.compute(sequence)
        assert serving.manager.published() == before

    def test_more_computed_than_the_table_covers_is_our_bug(self, serve: Serve) -> None:
        serving = serve()
        sequence = serving.admit(ids(1, 4))
        with pytest.raises(AssertionError, match="more tokens computed"):
            serving.manager.publish(sequence.table, ids(1, 8), 8, 1)


class TestGrowth:
    @pytest.mark.parametrize(("num_tokens", "new_blocks"), [(4, 0), (5, 1), (8, 0), (9, 1)])
    def test_a_decode_needs_a_block_when_its_position_opens_one(self, serve: Serve, num_tokens: int, new_blocks: int) -> None:
        """A decode of a sequence of T tokens writes position T-1; the table covered T-1 tokens before."""
        serving = serve()
        sequence = serving.admit(ids(1, num_tokens - 1))
        assert len(serving.manager.append(sequence.table, num_tokens)) == new_blocks
        assert len(sequence.table.block_ids) == -(-num_tokens // 4)
        serving.check()

    @pytest.mark.parametrize(
        ("block_size", "num_tokens", "drafts", "new_blocks"),
        [(4, 8, 3, 1), (4, 8, 5, 2), (1, 8, 3, 4), (16, 16, 1, 1), (16, 17, 15, 1), (16, 17, 16, 2)],
    )
    def test_drafts_can_open_several_blocks(
        self, serve: Serve, block_size: int, num_tokens: int, drafts: int, new_blocks: int
    ) -> None:
        """A step with k drafts writes positions T-1 .. T-1+k; the table covered T-1 tokens before."""
        serving = serve(block_size=block_size)
        sequence = serving.admit(ids(1, num_tokens - 1))
        assert len(serving.manager.append(sequence.table, num_tokens + drafts)) == new_blocks

    def test_drafts_shrink_to_what_is_free(self, serve: Serve) -> None:
        """T=8 with one free block: 6 slots do not fit, 5 do."""
        serving = serve(num_blocks=3)
        sequence = serving.admit(ids(1, 8))
        assert serving.manager.append(sequence.table, 8 + 5) == PoolExhausted(needed=2, free=1)
        assert len(sequence.table.block_ids) == 2
        assert len(serving.manager.append(sequence.table, 8 + 4)) == 1

    def test_a_table_that_is_long_enough_does_not_grow(self, serve: Serve) -> None:
        serving = serve()
        sequence = serving.admit(ids(1, 4), num_tokens=9)
        assert serving.manager.append(sequence.table, 9) == []
        assert len(sequence.table.block_ids) == 3


class TestAdmission:
    def test_cached_blocks_in_the_free_list_cost_one_each(self, serve: Serve) -> None:
        serving = serve(num_blocks=4)
        serving.run(ids(1, 16))
        assert serving.manager.num_free_blocks == 4
        assert serving.admit([*ids(1, 8), *ids(101, 112)]) == PoolExhausted(needed=5, free=4)
        assert len(serving.admit([*ids(1, 8), *ids(101, 108)]).table.block_ids) == 4

    def test_cached_blocks_that_are_held_cost_nothing(self, serve: Serve) -> None:
        serving = serve(num_blocks=6)
        first = serving.admit(ids(1, 16))
        serving.compute(first)
        match = serving.manager.match(BlockTable(), [*ids(1, 8), *ids(101, 108)])
        assert serving.manager.blocks_needed(match, 16) == 2
        assert len(serving.admit([*ids(1, 8), *ids(101, 108)]).table.block_ids) == 4
        assert serving.manager.num_free_blocks == 0

    def test_what_is_needed_is_what_leaves_the_free_list(self, serve: Serve) -> None:
        serving = serve()
        serving.run(ids(1, 8))
        held = serving.admit(ids(1, 5))
        serving.compute(held)
        match = serving.manager.match(BlockTable(), ids(1, 13))
        assert (len(match.block_ids), len(match.free_block_ids)) == (2, 1)
        before = serving.manager.num_free_blocks
        needed = serving.manager.blocks_needed(match, 13 + 1)
        serving.admit(ids(1, 13), num_tokens=14)
        assert before - serving.manager.num_free_blocks == needed == 3

    def test_a_failed_admission_changes_nothing_however_often(self, serve: Serve) -> None:
        serving = serve(num_blocks=4)
        serving.run(ids(1, 8))
        order, entries = list(serving.manager._free), serving.manager.published()
        for _ in range(3):
            assert isinstance(serving.admit([*ids(1, 8), *ids(101, 112)]), PoolExhausted)
        assert list(serving.manager._free) == order
        assert serving.manager.published() == entries
        assert serving.manager.stats.query_tokens == 8, "only the run that was admitted counts"

    def test_a_look_takes_nothing(self, serve: Serve) -> None:
        serving = serve()
        serving.run(ids(1, 8))
        order = list(serving.manager._free)
        serving.manager.match(BlockTable(), ids(1, 9))
        assert list(serving.manager._free) == order

    def test_a_match_is_not_used_after_the_pool_changed(self, serve: Serve) -> None:
        """Otherwise its blocks could have been handed to somebody else meanwhile."""
        serving = serve(num_blocks=2)
        serving.run(ids(1, 4))
        table = BlockTable()
        match = serving.manager.match(table, ids(1, 5))
        assert match.num_cached_tokens == 4
        serving.admit(ids(50, 57))
        with pytest.raises(AssertionError, match="the pool changed since the match"):
            serving.manager.allocate(table, match, 5)

    def test_blocks_spanned_rounds_up(self) -> None:
        manager = BlockManager(num_blocks=1, block_size=4)
        assert [manager.blocks_spanned(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


class TestFreeing:
    def test_after_a_normal_finish_everything_is_free(self, serve: Serve) -> None:
        serving = serve(num_blocks=5)
        serving.run(ids(1, 18))
        assert serving.manager.num_free_blocks == 5
        assert serving.manager._blocks.ref_counts.tolist() == [0] * 5

    def test_freeing_an_empty_table_is_a_no_op(self, serve: Serve) -> None:
        serving = serve()
        sequence = serving.admit(ids(1, 8))
        serving.compute(sequence)
        serving.free(sequence)
        serving.manager.free(sequence.table)
        serving.manager.free(BlockTable())
        serving.check()
        assert (sequence.table.block_ids.tolist(), sequence.table.num_published) == ([], 0)
        assert serving.manager.num_free_blocks == 16

    def test_a_shared_block_stays_until_its_last_holder_goes(self, serve: Serve) -> None:
        serving = serve()
        first = serving.admit(ids(1, 5))
        serving.compute(first)
        second = serving.admit([*ids(1, 4), 6])
        shared = first.table.block_ids[0]
        serving.free(first)
        assert shared not in list(serving.manager._free)
        serving.free(second)
        assert shared in list(serving.manager._free)

    def test_a_block_freed_more_often_than_held_is_our_bug(self, serve: Serve) -> None:
        serving = serve()
        sequence = serving.admit(ids(1, 4))
        stolen = BlockTable(block_ids=sequence.table.block_ids[:])
        serving.free(sequence)
        with pytest.raises(AssertionError, match="freed more often than held"):
            serving.manager.free(stolen)


class TestEviction:
    def test_an_evicted_block_loses_its_digest(self, serve: Serve) -> None:
        serving = serve(num_blocks=4)
        serving.run(ids(1, 16))
        serving.run(ids(101, 116))
        remaining = {entry.token_ids[0] for entry in serving.manager.published()}
        assert remaining == {101, 105, 109, 113}
        assert serving.admit(ids(1, 16)).num_cached_tokens == 0

    def test_a_digest_stays_until_its_block_is_handed_out(self, serve: Serve) -> None:
        serving = serve(num_blocks=4)
        serving.run(ids(1, 8))
        serving.admit(ids(101, 108))
        assert len(digests(serving)) == 2, "two blocks without content went first"
        serving.admit(ids(201, 204))
        assert len(digests(serving)) == 1

    def test_blocks_without_content_go_first_by_lowest_id(self, serve: Serve) -> None:
        serving = serve(num_blocks=6)
        first = serving.admit(ids(1, 6))
        serving.compute(first)
        second = serving.admit(ids(51, 53))
        serving.free(second)
        serving.free(first)
        assert first.table.block_ids.tolist() == []
        assert list(serving.manager._free) == [1, 2, 3, 4, 5, 0]

    def test_the_tail_of_a_sequence_goes_before_its_head(self, serve: Serve) -> None:
        serving = serve(num_blocks=4)
        serving.run(ids(1, 16))
        assert list(serving.manager._free) == [3, 2, 1, 0]
        serving.admit(ids(101, 108))
        assert serving.manager.match(BlockTable(), ids(1, 16)).num_cached_tokens == 8

    def test_the_least_recently_released_goes_first(self, serve: Serve) -> None:
        serving = serve(num_blocks=3)
        held = [serving.admit(ids(first, first + 3)) for first in (1, 11, 21)]
        for sequence in held:
            serving.compute(sequence)
        for sequence in (held[1], held[0], held[2]):
            serving.free(sequence)
        left = []
        for first in (101, 201, 301):
            serving.admit(ids(first, first + 3))
            left.append({entry.token_ids[0] for entry in serving.manager.published()})
        assert left == [{1, 21}, {21}, set()]

    def test_a_hit_makes_a_block_recent(self, serve: Serve) -> None:
        serving = serve(num_blocks=5)
        serving.run(ids(1, 4))
        serving.run(ids(11, 14))
        assert serving.run([*ids(1, 4), 5]).num_cached_tokens == 4
        serving.admit(ids(101, 116))
        assert [entry.token_ids for entry in serving.manager.published()] == [(1, 2, 3, 4)]


class TestStatistics:
    def test_queries_and_hits_are_counted_in_tokens_at_admission(self, serve: Serve) -> None:
        serving = serve()
        serving.run(ids(1, 9))
        serving.run(ids(1, 9))
        stats = serving.manager.stats
        assert (stats.query_tokens, stats.hit_tokens, stats.resume_cached_tokens) == (18, 8, 0)

    def test_a_resume_is_no_cache_hit(self, serve: Serve) -> None:
        serving = serve()
        sequence = serving.admit(ids(1, 16))
        serving.compute(sequence)
        serving.free(sequence)
        resumed = serving.admit([*sequence.token_ids, 17], resumed=sequence)
        assert resumed.num_cached_tokens == 16
        stats = serving.manager.stats
        assert (stats.query_tokens, stats.hit_tokens, stats.resume_cached_tokens) == (16, 0, 16)

    def test_a_resumed_sequence_computes_only_what_is_not_cached(self, serve: Serve) -> None:
        serving = serve()
        sequence = serving.admit(ids(1, 9))
        serving.compute(sequence)
        blocks = list(sequence.table.block_ids)
        serving.free(sequence)
        resumed = serving.admit(sequence.token_ids, resumed=sequence)
        assert resumed.num_cached_tokens == 8
        assert resumed.table.block_ids[:2].tolist() == blocks[:2]


class TestIntegrity:
    def test_a_leaked_block_is_found(self, serve: Serve) -> None:
        serving = serve()
        sequence = serving.admit(ids(1, 8))
        sequence.table.block_ids.pop()
        with pytest.raises(AssertionError, match="reference counts differ"):
            serving.check()

    def test_a_forgotten_table_is_found(self, serve: Serve) -> None:
        serving = serve()
        serving.running.remove(serving.admit(ids(1, 8)))
        with pytest.raises(AssertionError, match="reference counts differ"):
            serving.check()

    def test_a_block_free_and_held_is_found(self, serve: Serve) -> None:
        serving = serve()
        sequence = serving.admit(ids(1, 8))
        serving.manager._free.release_plain(sequence.table.block_ids[0])
        with pytest.raises(AssertionError, match="not the whole pool"):
            serving.check()
