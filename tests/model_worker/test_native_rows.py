"""How batches are cut for AITER's compiled attention, against a walk over their rows. Needs no AITER."""

import pytest
import torch

from model_worker.batch import Batch
from model_worker.kernels.aiter import native_rows
from model_worker.kernels.aiter.native_rows import LOOKED_UP, SingleRows, chunk_rows, context_slots, single_rows
from model_worker.kv_pool import KVPool
from model_worker.placement import ON_CPU

BLOCK = 4
KV = KVPool(1, 10, BLOCK, 1, 8)
NULL = KV.null_block
TABLES = torch.tensor([[7, -1, -1, -1], [2, 9, 4, -1], [1, 3, -1, -1], [5, 6, 8, 0]], dtype=torch.int32)


def batch_of(counts: list[int], lens: list[int], num_decodes: int) -> Batch:
    ends = torch.tensor([0, *counts]).cumsum(0)
    size = int(ends[-1])
    zeros = torch.zeros(size, dtype=torch.int64)
    context_lens = torch.tensor(lens, dtype=torch.int32)
    return Batch(zeros, zeros, zeros, ends.int(), context_lens, TABLES[: len(counts)], num_decodes, zeros[:0])


def slots_of(row: int, length: int) -> list[int]:
    return [int(TABLES[row, position // BLOCK]) * BLOCK + position % BLOCK for position in range(length)]


def test_each_query_of_a_short_row_is_a_row_whose_context_ends_at_itself() -> None:
    """A decode, a chunk, two drafts behind a token, and a chunk."""
    batch = batch_of([1, 9, 3, 12], [2, 11, 7, 12], num_decodes=1)
    singles = single_rows(batch, KV, ON_CPU)
    assert singles is not None and singles.tokens is not None
    assert singles.tokens.tolist() == [0, 10, 11, 12]
    assert singles.context_lens.tolist() == [2, 5, 6, 7] and singles.positions_max == 20
    assert (
        singles.tables[:, :4].tolist() == [[7, NULL, NULL, NULL], *[[1, 3, NULL, NULL]] * 3] and singles.tables.is_contiguous()
    )
    assert singles.tables.dtype == torch.int32 and singles.tables[:, 4:].tolist() == [[NULL] * LOOKED_UP] * 4
    starts, slots = context_slots(singles, BLOCK)
    assert starts.tolist() == [0, 2, 7, 13, 20]
    assert slots.tolist() == slots_of(0, 2) + slots_of(2, 5) + slots_of(2, 6) + slots_of(2, 7)


def test_long_rows_are_cut_with_where_their_contexts_lie() -> None:
    (chunk,) = chunk_rows(batch_of([1, 9, 3, 12], [2, 11, 7, 12], num_decodes=1), BLOCK, ON_CPU)
    assert chunk.tokens.tolist() == [*range(1, 10), *range(13, 25)]
    assert (chunk.starts.tolist(), chunk.context_starts.tolist()) == ([0, 9, 21], [0, 11, 23])
    assert (chunk.queries_max, chunk.context_max, chunk.are_new) == (12, 12, False)
    assert chunk.slots.tolist() == slots_of(1, 11) + slots_of(3, 12)


def test_only_so_many_positions_are_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_rows, "COPIED_MAX", 12)
    chunks = chunk_rows(batch_of([9, 9, 9, 12], [4, 11, 1, 12], num_decodes=0), BLOCK, ON_CPU)
    assert [chunk.context_starts.diff().tolist() for chunk in chunks] == [[4], [11, 1], [12]]
    assert [chunk.are_new for chunk in chunks] == [False, False, True]


def test_rows_of_one_kind_need_the_other_not() -> None:
    decodes, prompts = batch_of([1, 1], [3, 9], num_decodes=2), batch_of([9, 9], [9, 9], num_decodes=0)
    assert chunk_rows(decodes, BLOCK, ON_CPU) == [] and single_rows(prompts, KV, ON_CPU) is None
    singles = single_rows(decodes, KV, ON_CPU)
    assert singles is not None and singles.tokens is None and singles.context_lens is decodes.context_lens


def test_slots_are_listed_where_only_a_bound_of_their_number_is_known() -> None:
    """As in a graph: what lies behind the contexts is never read, but must be there."""
    rows = SingleRows(None, TABLES[1:3], torch.tensor([9, 3], dtype=torch.int32), positions_max=40)
    starts, slots = context_slots(rows, BLOCK)
    assert starts.tolist() == [0, 9, 12] and slots.dtype == starts.dtype == torch.int32
    assert len(slots) == 40 and slots[:12].tolist() == slots_of(1, 9) + slots_of(2, 3)
