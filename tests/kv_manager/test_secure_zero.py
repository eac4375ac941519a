"""Blocks that must be zeroed before another tenant gets them. Blocks of 4 tokens."""

from collections.abc import Callable
from typing import Any

from kv_manager.block_manager import BlockManager
from kv_manager.block_table import BlockTable, HeldTable

Serve = Callable[..., Any]
ANNA, BERT = b"anna", b"bert"


def ids(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


def used(serve: Serve, **options: Any) -> Any:
    """A pool of four blocks, all of which ANNA had, and whose content is known."""
    serving = serve(num_blocks=4, secure_zero=True, **options)
    serving.run(ids(1, 16), ANNA)
    assert serving.manager.seal_batch() == [0, 1, 2, 3], "nobody knows what a worker's memory held before"
    return serving


def to_fork(serve: Serve, num_blocks: int) -> tuple[Any, Any, Any]:
    """A pool that ANNA had all of; BERT's computed prompt of six tokens in two of its blocks, and a child with an empty table."""
    serving = serve(num_blocks=num_blocks, secure_zero=True)
    serving.run(ids(1, 4 * num_blocks), ANNA)
    parent = serving.admit(ids(101, 106), namespace=BERT)
    serving.compute(parent)
    serving.manager.seal_batch()
    return serving, parent, serving.track(parent.token_ids, BERT)


def test_a_block_of_another_tenant_is_named_once_when_it_is_handed_out(serve: Serve) -> None:
    serving = used(serve)
    bert = serving.admit(ids(101, 108), namespace=BERT)
    assert serving.manager.seal_batch() == bert.table.block_ids.tolist()
    assert serving.manager.seal_batch() == []


def test_a_tenants_own_blocks_need_no_zeroing(serve: Serve) -> None:
    serving = used(serve)
    serving.run(ids(101, 116), ANNA)
    assert serving.manager.seal_batch() == []


def test_a_hit_is_not_zeroed_even_where_nobody_knows_whose_it_was(serve: Serve) -> None:
    """After a takeover the journal tells what free blocks hold, not who held them last."""
    manager = BlockManager(4, 4, secure_zero=True)
    manager.adopt([], used(serve).manager.published(), 9)
    table = BlockTable(namespace=ANNA)
    match = manager.match(table, ids(1, 16))
    assert match.num_cached_tokens == 12
    fresh = manager.allocate(table, match, 16)
    assert manager.seal_batch() == fresh


def test_growth_names_its_blocks_too(serve: Serve) -> None:
    serving = used(serve)
    bert = serving.admit(ids(101, 104), namespace=BERT)
    serving.manager.seal_batch()
    grown = serving.manager.append(bert.table, 5)
    assert serving.manager.seal_batch() == grown


def test_what_a_batch_copies_whole_is_not_zeroed_after_it(serve: Serve) -> None:
    """A batch zeroes after it copies: the copy would be gone."""
    serving, parent, child = to_fork(serve, num_blocks=8)
    ((_, copied),) = serving.manager.fork(parent.table, child.table, 5, 9)
    assert serving.manager.seal_batch() == [block_id for block_id in child.table.block_ids[1:] if block_id != copied]


def test_a_copy_that_never_left_is_still_zeroed(serve: Serve) -> None:
    serving, parent, child = to_fork(serve, num_blocks=3)
    serving.manager.fork(parent.table, child.table, 5, 6)
    copied = child.table.block_ids[1]
    serving.free(child)
    assert serving.manager.append(parent.table, 12) == [copied]
    assert serving.manager.seal_batch() == [copied], "its last holder was of the same tenant, but has written nothing"


def test_a_swap_in_overwrites_what_it_takes(serve: Serve) -> None:
    serving = serve(num_blocks=4, num_host_blocks=4, secure_zero=True)
    anna = serving.admit(ids(1, 8), namespace=ANNA)
    serving.compute(anna, num_tokens=7)
    serving.manager.swap_out(anna.table, 7)
    serving.run(ids(101, 116), BERT)
    serving.manager.seal_batch()
    match = serving.manager.match(anna.table, ids(1, 8))
    serving.manager.swap_in(anna.table, match, 9)
    assert serving.manager.seal_batch() == anna.table.block_ids[2:].tolist()


def test_after_a_takeover_only_held_blocks_are_known(serve: Serve) -> None:
    serving = used(serve)
    anna = serving.admit(ids(1, 4), namespace=ANNA)
    table = BlockTable(anna.table.block_ids[:], namespace=ANNA)
    manager = BlockManager(4, 4, secure_zero=True)
    manager.adopt([HeldTable(table, anna.token_ids, 4)], serving.manager.published(), 9)
    (held,) = table.block_ids
    manager.free(table)
    again = BlockTable(namespace=ANNA)
    manager.allocate(again, manager.match(again, ids(201, 216)), 16)
    assert set(manager.seal_batch()) == {0, 1, 2, 3} - {held}


def test_it_is_off_unless_asked_for(serve: Serve) -> None:
    serving = serve(num_blocks=4)
    serving.run(ids(1, 16), ANNA)
    serving.run(ids(101, 116), BERT)
    assert serving.manager.seal_batch() == []
