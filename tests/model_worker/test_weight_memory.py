"""Where packed weights lie."""

import pytest
import torch

from model_worker.kernels.cpu.weight_memory import CACHE_LINE, PIECE_BYTES, WeightMemory


def test_what_is_taken_follows_what_was_taken_before_and_overlaps_nothing() -> None:
    memory = WeightMemory()
    taken = [memory.take(size) for size in (1, 64, 65, 1000)]
    starts = [each.data_ptr() for each in taken]
    assert [start - starts[0] for start in starts] == [0, 64, 128, 256]
    assert all(start % CACHE_LINE == 0 for start in starts)
    for value, each in enumerate(taken):
        each.fill_(value)
    assert all((each == value).all() for value, each in enumerate(taken))


def test_a_weight_lies_in_one_piece_however_large_it_is() -> None:
    memory = WeightMemory()
    small, large, next_to_it = memory.take(10), memory.take(PIECE_BYTES + 1), memory.take(10)
    assert [len(each) for each in (small, large, next_to_it)] == [10, PIECE_BYTES + 1, 10]
    large[-1] = 1
    assert not small.any() and not next_to_it.any()


def test_memory_outlives_whoever_cut_it() -> None:
    taken = WeightMemory().take(100)
    assert torch.equal(taken.fill_(7), torch.full((100,), 7, dtype=torch.uint8))


def test_memory_that_is_given_back_is_taken_next() -> None:
    memory = WeightMemory()
    first = memory.take(100)
    second = memory.take(PIECE_BYTES)
    memory.give_back(second)
    third = memory.take(64)
    assert third.data_ptr() == second.data_ptr() != first.data_ptr()
    with pytest.raises(AssertionError, match="something else"):
        memory.give_back(second[64:])
