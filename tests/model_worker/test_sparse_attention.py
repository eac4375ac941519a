"""Attention over the positions that an index chooses, over a paged pool, against the formulas written out for one query."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_driver import PagedDriver, build_batch
from torch import Tensor

from model_worker.kernels.interface import IndexQueries
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kv_pool import KVPool
from model_worker.kv_shape import KVShape

HEADS, KEPT, INDEX_HEADS, INDEX_DIM = 3, 8, 4, 6


def chosen_positions(index_query: Tensor, weights: Tensor, index_keys: Tensor, num_chosen: int) -> list[int]:
    """For one query `[INDEX_HEADS, INDEX_DIM]` at the last of `index_keys`: the best positions, the earlier of equal ones."""
    scores = [float((weights * (index_query @ key).relu()).sum()) for key in index_keys]
    return sorted(sorted(range(len(scores)), key=lambda position: (-scores[position], position))[:num_chosen])


def expected_output(query: Tensor, keys: Tensor, positions: list[int]) -> Tensor:
    """One query `[HEADS, KEPT]` over `positions` of `keys`, which are the values too; returns `[HEADS * KEPT]`."""
    seen = keys[positions]
    return ((query @ seen.T * KEPT**-0.5).softmax(dim=1) @ seen).flatten()


class Rows:
    """Rows whose last `counts` positions are computed in one batch, the ones before in an earlier one; the pool was full of NaN."""

    def __init__(self, lens: list[int], counts: list[int], block_size: int) -> None:
        generator = torch.Generator().manual_seed(len(lens))
        self.kv = KVPool.of_shape(
            KVShape(1, 1, KEPT + INDEX_DIM, 1), sum(-(-length // block_size) for length in lens), block_size
        )
        self.kv.keys(0)[: self.kv.num_blocks] = float("nan")
        self.kernels = TorchKernels()
        self.stored = [torch.randn(length, 1, KEPT + INDEX_DIM, generator=generator, dtype=torch.float64) for length in lens]
        driver, runs = PagedDriver(None, self.kv), []
        for row, (length, count) in enumerate(zip(lens, counts, strict=True)):
            run = driver.start([0] * length)
            run.table = driver.take_blocks(-(-length // block_size))
            if length > count:
                batch = build_batch([(run, length - count)], block_size)
                earlier = self.stored[row][: length - count].float()
                self.kernels.sparse_attention(batch, self.kv).store(0, earlier, earlier)
                run.computed = length - count
            runs.append((run, count))
        self.batch = build_batch(runs, block_size)
        self.seen = [
            (row, stop) for row, (n, count) in enumerate(zip(lens, counts, strict=True)) for stop in range(n - count + 1, n + 1)
        ]
        self.query = torch.randn(len(self.seen), HEADS, KEPT, generator=generator, dtype=torch.float64)
        self.index_query = torch.randn(len(self.seen), INDEX_HEADS, INDEX_DIM, generator=generator, dtype=torch.float64)
        self.weights = torch.randn(len(self.seen), INDEX_HEADS, generator=generator, dtype=torch.float64)

    def attend(self, num_chosen: int) -> Tensor:
        attention = self.kernels.sparse_attention(self.batch, self.kv)
        new = torch.cat([self.stored[row][stop - 1] for row, stop in self.seen]).float().unsqueeze(1)
        attention.store(0, new, new)
        index = IndexQueries(self.index_query.float(), self.weights.float(), num_chosen)
        return attention.attend_chosen(0, self.query.float(), index, KEPT).flatten(1)

    def expected(self, num_chosen: int) -> Tensor:
        outputs = []
        for token, (row, stop) in enumerate(self.seen):
            keys, index_keys = self.stored[row][:stop, 0].split((KEPT, INDEX_DIM), dim=1)
            positions = chosen_positions(self.index_query[token], self.weights[token], index_keys, num_chosen)
            outputs.append(expected_output(self.query[token], keys, positions))
        return torch.stack(outputs).float()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lens=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    num_chosen=st.sampled_from([1, 3, 8, 20, 64]),
    block_size=st.sampled_from([1, 4, 16]),
    data=st.data(),
)
def test_any_rows_any_number_of_positions(lens: list[int], num_chosen: int, block_size: int, data: st.DataObject) -> None:
    """Rows compute any number of last positions, some shorter than `num_chosen` and some longer; what others left in the pool, NaN too,
    does not show."""
    counts = sorted(data.draw(st.integers(1, length)) for length in lens)
    rows = Rows([max(length, count) for length, count in zip(lens, counts, strict=True)], counts, block_size)
    torch.testing.assert_close(rows.attend(num_chosen), rows.expected(num_chosen), rtol=1e-4, atol=1e-5)


def test_of_equal_scores_the_earlier_positions_are_chosen() -> None:
    """Here all scores are zero: no product is positive."""
    rows = Rows([30], [30], 4)
    rows.index_query.fill_(1.0)
    rows.stored[0][..., KEPT:] = -1.0
    wanted = [
        expected_output(rows.query[token], rows.stored[0][: token + 1, 0, :KEPT], list(range(min(5, token + 1))))
        for token in range(30)
    ]
    torch.testing.assert_close(rows.attend(5), torch.stack(wanted).float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("limit", ["GROUP_TOKENS_MAX", "SCORES_MAX"])
def test_a_chunk_may_go_query_by_query(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows([39], [39], 4)
    whole = rows.attend(6)
    monkeypatch.setattr(f"model_worker.kernels.sparse_attention.{limit}", 1)
    torch.testing.assert_close(rows.attend(6), whole, rtol=1e-5, atol=1e-6)


def test_a_row_of_nan_leaves_its_neighbours_alone() -> None:
    rows = Rows([20, 20, 20], [1, 1, 7], 4)
    sound = rows.attend(6)
    rows.stored[1][-1] = float("nan")
    rows.query[1] = rows.index_query[1] = float("nan")
    found = rows.attend(6)
    assert found[1].isnan().all()
    assert torch.equal(found[0], sound[0]) and torch.equal(found[2:], sound[2:])


@pytest.mark.parametrize("num_chosen", [6, 64])
def test_nan_at_a_later_position_does_not_show(num_chosen: int) -> None:
    """A wrong draft may bring it."""
    rows = Rows([20, 20], [5, 12], 4)
    sound = rows.attend(num_chosen)
    for stored in rows.stored:
        stored[-1] = float("nan")
    found = rows.attend(num_chosen)
    is_last = torch.tensor([stop == 20 for _, stop in rows.seen])
    assert found[is_last].isnan().all() and torch.equal(found[~is_last], sound[~is_last])


def test_layer_norm() -> None:
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weight, bias = torch.arange(1.0, 6.0), torch.arange(5.0)
    wanted = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-6).sqrt() * weight + bias
    torch.testing.assert_close(TorchKernels().layer_norm(x.float(), weight, bias, 1e-6), wanted.float())
