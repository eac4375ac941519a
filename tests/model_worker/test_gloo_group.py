"""Ranks that gloo joins: each gets the same sums, the order of adding depends on nothing but the ranks, and nobody waits for one that left."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from model_worker.group import ALONE, Group, GroupBroken
from model_worker.ranks.gloo_group import GlooGroup


def on_ranks(size: int, do: Callable[[GlooGroup], Any]) -> list[Any]:
    """What `do` gives on each of `size` ranks that have all joined, by rank; each is a thread."""
    store, results, all_joined = HashStore(), [None] * size, threading.Barrier(size)

    def run(rank: int) -> None:
        group = GlooGroup(store, rank, size)
        group.join(0)
        all_joined.wait()  # a rank that left at once would end the others' join
        results[rank] = do(group)
        group.leave()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def random(rank: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


def sum_in_order(size: int, *shape: int) -> Tensor:
    total = random(0, *shape)
    for rank in range(1, size):
        total = total + random(rank, *shape)
    return total


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_sum_has_the_same_bits_on_every_rank_and_in_every_shape(size: int) -> None:
    for shape in ((7, 33), (1, 33), (7, 1)):
        for result in on_ranks(size, lambda group, shape=shape: group.all_reduce(random(group.rank, *shape))):
            assert torch.equal(result, sum_in_order(size, *shape))


@pytest.mark.parametrize("size", [2, 4])
def test_everyone_or_rank_0_gets_everything(size: int) -> None:
    expected = torch.stack([random(rank, 5, 3) for rank in range(size)])
    assert all(
        torch.equal(all_of_them, expected) for all_of_them in on_ranks(size, lambda g: g.all_gather(random(g.rank, 5, 3)))
    )
    first, *others = on_ranks(size, lambda g: g.gather(random(g.rank, 5, 3)))
    assert torch.equal(first, expected) and others == [None] * (size - 1)


def test_tensors_that_lie_otherwise_are_taken_too() -> None:
    both = on_ranks(2, lambda group: group.all_reduce(random(group.rank, 3, 4).t()))
    assert all(torch.equal(each, sum_in_order(2, 3, 4).t()) for each in both)


@pytest.mark.parametrize("leaver", [0, 1, 3])
def test_who_waits_for_a_rank_that_left_is_told_and_all_meet_again(leaver: int) -> None:
    def do(group: GlooGroup) -> tuple[bool, float]:
        told = group.rank == leaver
        try:
            if group.rank == leaver:
                group.leave()
            group.all_reduce(torch.ones(1000))
        except GroupBroken:
            told = True
            group.leave()
        group.join(1)
        return told, float(group.all_reduce(torch.ones(1)))

    assert on_ranks(4, do) == [(True, 4.0)] * 4


def test_alone_costs_nothing() -> None:
    x = torch.ones(2, 3)
    group: Group = ALONE
    assert (group.rank, group.size) == (0, 1)
    assert group.all_reduce(x) is x
    assert group.all_gather(x).data_ptr() == x.data_ptr() and group.all_gather(x).shape == (1, 2, 3)
    gathered = group.gather(x)
    assert gathered is not None and gathered.shape == (1, 2, 3)
