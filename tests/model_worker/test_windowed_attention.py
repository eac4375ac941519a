"""Attention over a paged pool, with sinks and windows and without, against the formula written out for one query."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_driver import PagedDriver, build_batch

from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kv_pool import KVPool

KV_HEADS, SHARED, HEAD_DIM = 2, 3, 8


def expected_output(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor, window: int | None
) -> torch.Tensor:
    """One query `[heads, head_dim]` at the last of `keys`; returns `[heads * head_dim]`."""
    first = 0 if window is None else max(0, len(keys) - window)
    outputs = []
    for head in range(KV_HEADS * SHARED):
        scores = keys[first:, head // SHARED] @ query[head] / math.sqrt(HEAD_DIM)
        weights = scores.exp() / (scores.exp().sum() + sinks[head].exp())
        outputs.append(weights @ values[first:, head // SHARED])
    return torch.cat(outputs)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    lens=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    window=st.one_of(st.none(), st.integers(1, 45)),
    block_size=st.sampled_from([1, 4, 16]),
    data=st.data(),
)
def test_any_rows_any_window(lens: list[int], window: int | None, block_size: int, data: st.DataObject) -> None:
    """Rows compute any number of last positions; what others left in the pool, NaN too, does not show."""
    generator = torch.Generator().manual_seed(len(lens))
    counts = sorted(data.draw(st.integers(1, length)) for length in lens)
    lens = [max(length, count) for length, count in zip(lens, counts, strict=True)]
    kv = KVPool(1, sum(-(-length // block_size) for length in lens), block_size, KV_HEADS, HEAD_DIM)
    kv.keys(0)[: kv.num_blocks] = kv.values(0)[: kv.num_blocks] = float("nan")
    driver, kernels, runs = PagedDriver(None, kv), TorchKernels(), []
    keys, values = ([torch.randn(length, KV_HEADS, HEAD_DIM, generator=generator) for length in lens] for _ in range(2))
    for row, (length, count) in enumerate(zip(lens, counts, strict=True)):
        run = driver.start([0] * length)
        run.table = [driver._free.pop() for _ in range(-(-length // block_size))]
        if length > count:  # earlier steps
            batch = build_batch([(run, length - count)], block_size)
            kernels.windowed_attention(batch, kv).store(0, keys[row][: length - count], values[row][: length - count])
            run.computed = length - count
        runs.append((run, count))
    attention = kernels.windowed_attention(build_batch(runs, block_size), kv)
    query = torch.randn(sum(counts), KV_HEADS * SHARED, HEAD_DIM, generator=generator)
    sinks = torch.randn(KV_HEADS * SHARED, generator=generator)
    new_keys = torch.cat([tensor[-count:] for tensor, count in zip(keys, counts, strict=True)])
    new_values = torch.cat([tensor[-count:] for tensor, count in zip(values, counts, strict=True)])
    attention.store(0, new_keys, new_values)
    found = attention.attend_window(0, query, sinks, window)
    plain = attention.attend(0, query, new_keys, new_values)
    no_sinks, token = torch.full_like(sinks, -math.inf), 0
    for row, (length, count) in enumerate(zip(lens, counts, strict=True)):
        for stop in range(length - count + 1, length + 1):
            wanted = expected_output(query[token], keys[row][:stop], values[row][:stop], sinks, window)
            torch.testing.assert_close(found[token], wanted, rtol=1e-4, atol=1e-5)
            wanted = expected_output(query[token], keys[row][:stop], values[row][:stop], no_sinks, None)
            torch.testing.assert_close(plain[token], wanted, rtol=1e-4, atol=1e-5)
            token += 1


@pytest.mark.parametrize("window", [None, 10])
def test_long_chunks_are_cut_into_tiles(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    kv = KVPool(1, 10, 4, KV_HEADS, HEAD_DIM)
    driver, kernels = PagedDriver(None, kv), TorchKernels()
    run = driver.start([0] * 39)
    run.table = list(range(10))
    batch = build_batch([(run, 39)], 4)
    query = torch.randn(39, KV_HEADS * SHARED, HEAD_DIM, generator=generator)
    key, value = torch.randn(2, 39, KV_HEADS, HEAD_DIM, generator=generator)
    sinks = torch.zeros(KV_HEADS * SHARED)
    outputs = []
    for tile in (64, 7):
        monkeypatch.setattr("model_worker.kernels.windowed_attention.QUERY_TILE", tile)
        attention = kernels.windowed_attention(batch, kv)
        attention.store(0, key, value)
        outputs.append(attention.attend_window(0, query, sinks, window))
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)


def test_a_sink_far_above_all_scores_takes_everything() -> None:
    kv = KVPool(1, 1, 4, KV_HEADS, HEAD_DIM)
    run = PagedDriver(None, kv).start([0] * 3)
    run.table = [0]
    attention = TorchKernels().windowed_attention(build_batch([(run, 3)], 4), kv)
    attention.store(0, torch.ones(3, KV_HEADS, HEAD_DIM), torch.ones(3, KV_HEADS, HEAD_DIM))
    query = torch.ones(3, KV_HEADS * SHARED, HEAD_DIM)
    for sink, share in ((1000.0, 0.0), (-1000.0, 1.0)):
        found = attention.attend_window(0, query, torch.full((KV_HEADS * SHARED,), sink), None)
        torch.testing.assert_close(found, torch.full_like(found, share))
