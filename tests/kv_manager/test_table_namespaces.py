"""Sequences of several tenants and adapters in one pool: equal prompts of two namespaces never share. Blocks of 4 tokens."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kv_manager import adoption, prefix_cache
from kv_manager.adoption import EntriesByBlock, table_entries
from kv_manager.block_manager import BlockManager
from kv_manager.block_table import BlockTable, HeldTable
from kv_manager.hash_chain import chain_digests, join_namespace, namespace_link, namespace_root
from kv_manager.published_blocks import PublishedBlocks

Serve = Callable[..., Any]
ANNA, BERT = join_namespace("anna"), join_namespace("bert")


def ids(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


def rebuilt(serving: Any, sequences: list[Any]) -> tuple[BlockManager, list[BlockTable]]:
    """What a takeover makes of the same pool with these sequences running."""
    tables = [BlockTable(item.table.block_ids[:], namespace=item.table.namespace) for item in sequences]
    held = [HeldTable(t, item.token_ids, len(item.token_ids)) for t, item in zip(tables, sequences, strict=True)]
    manager = BlockManager(serving.manager.num_blocks, serving.manager.block_size, b"weights")
    manager.adopt(held, serving.manager.published(), 99)
    manager.check_integrity(tables)
    return manager, tables


def hit(manager: BlockManager, namespace: bytes, token_ids: list[int]) -> list[int]:
    return manager.match(BlockTable(namespace=namespace), token_ids).block_ids


def test_equal_prompts_of_two_tenants_share_nothing(serve: Serve) -> None:
    serving = serve(namespace=b"weights")
    for namespace in (b"", ANNA, BERT):
        assert serving.run(ids(1, 9), namespace).num_cached_tokens == 0
    blocks = [set(hit(serving.manager, namespace, ids(1, 9))) for namespace in (b"", ANNA, BERT)]
    assert [len(found) for found in blocks] == [2, 2, 2]
    assert not (blocks[0] & blocks[1] or blocks[0] & blocks[2] or blocks[1] & blocks[2])


def test_an_adapter_of_the_same_name_in_another_version_shares_nothing(serve: Serve) -> None:
    serving = serve()
    serving.run(ids(1, 9), join_namespace("t", "1"))
    assert serving.run(ids(1, 9), join_namespace("t", "2")).num_cached_tokens == 0
    assert serving.run(ids(1, 9), join_namespace("t", "1")).num_cached_tokens == 8


def test_tenants_share_nothing_however_digests_collide(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "chain_digests", lambda rows, parent=None: [7] * len(rows))
    serving = serve()
    serving.run([1, 2, 3, 4, 9], ANNA)
    assert serving.run([1, 2, 3, 4, 9], BERT).num_cached_tokens == 0
    assert serving.run([1, 2, 3, 4, 9]).num_cached_tokens == 0
    assert serving.run([1, 2, 3, 4, 9], ANNA).num_cached_tokens == 4


def test_the_first_link_folds_in_both_namespaces(serve: Serve) -> None:
    serving = serve(namespace=b"weights")
    serving.run(ids(1, 9), ANNA)
    root = namespace_root(b"weights" + ANNA)
    rows = np.array([ids(1, 4), ids(5, 8)], np.int32)
    assert [entry.digest for entry in serving.manager.published()] == chain_digests(rows, root)
    assert [entry.namespace for entry in serving.manager.published()] == [namespace_link(b"weights" + ANNA), None]


def test_a_root_is_never_a_digest() -> None:
    root = namespace_root(b"x")
    assert root is not None and root < 0 and ~root == namespace_link(b"x")
    assert namespace_root(b"") is None
    rows = np.array([[1, 2]], np.int32)
    assert chain_digests(rows, root) == chain_digests(rows, ~root), "both name the same link"


def test_each_tenant_goes_on_with_its_own_after_a_takeover(serve: Serve) -> None:
    serving = serve(namespace=b"weights")
    serving.run(ids(1, 9), BERT)
    running = [serving.admit([*ids(1, 8), 20], namespace=namespace) for namespace in (ANNA, b"")]
    for sequence in running:
        serving.compute(sequence)
    manager, tables = rebuilt(serving, running)
    assert manager.published() == serving.manager.published()
    assert manager.take_changes().published == () == manager.take_changes().unpublished
    for namespace in (b"", ANNA, BERT):
        assert hit(manager, namespace, ids(1, 9)) == hit(serving.manager, namespace, ids(1, 9)) != []
    assert hit(manager, join_namespace("cecil"), ids(1, 9)) == []
    for table, sequence in zip(tables, running, strict=True):
        manager.free(table)
        serving.free(sequence)
    assert [table.digests for table in tables] == [item.table.digests for item in running]
    assert [len(table.digests) for table in tables] == [2, 2]


def test_entries_of_another_tenant_do_not_name_a_tables_blocks(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal is behind: it has BERT's entry for a block that ANNA holds now, with the same tokens."""
    monkeypatch.setattr(adoption, "chain_digests", lambda rows, parent=None: pytest.fail("nothing to compute here"))
    serving = serve(num_blocks=2, namespace=b"weights")
    serving.run(ids(1, 8), BERT)
    stale = serving.manager.published()
    rows = np.array([ids(1, 4), ids(5, 8)], np.int32)
    by_block = EntriesByBlock(stale, 2)
    assert by_block.digests_of(np.array([0, 1]), rows, namespace_root(b"weights" + ANNA)) == []
    assert by_block.digests_of(np.array([0, 1]), rows, namespace_root(b"weights" + BERT)) == [e.digest for e in stale]
    anna = serving.admit(ids(1, 8), namespace=ANNA)
    serving.compute(anna)
    table = BlockTable(anna.table.block_ids[:], namespace=ANNA)
    manager = BlockManager(2, 4, b"weights")
    manager.adopt([HeldTable(table, ids(1, 8), 8)], stale, 99)
    assert hit(manager, BERT, ids(1, 9)) == []
    assert hit(manager, ANNA, ids(1, 9)) == table.block_ids.tolist()


def test_entries_from_a_report_are_those_of_the_tables_own_namespace(serve: Serve) -> None:
    serving = serve(namespace=b"weights")
    anna = serving.admit(ids(1, 9), namespace=ANNA)
    serving.compute(anna)
    table = BlockTable(anna.table.block_ids[:], namespace=ANNA)
    entries = table_entries(HeldTable(table, anna.token_ids, 9), 4, b"weights", np.full(16, 1))
    assert entries == serving.manager.published()


def test_a_namespace_survives_the_packed_form() -> None:
    manager = BlockManager(4, 2, b"weights")
    table = BlockTable(namespace=ANNA)
    manager.allocate(table, manager.match(table, [1, 2, 3, 4]), 4)
    manager.publish(table, [1, 2, 3, 4], 4, 1)
    entries = manager.published()
    assert PublishedBlocks.of(list(entries)).rows.tobytes() == entries.rows.tobytes()
    assert entries != PublishedBlocks.of([replace(entries[0], namespace=None), entries[1]])


def test_a_child_of_another_tenant_is_our_bug(serve: Serve) -> None:
    serving = serve()
    parent = serving.admit(ids(1, 8), namespace=ANNA)
    with pytest.raises(AssertionError, match="parent's namespace"):
        serving.manager.fork(parent.table, BlockTable(namespace=BERT), 7, 9)
