"""With the kernels of batch-invariant workers a request has the same bits alone and among others on several ranks too."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from random_llama import build, config
from torch import Tensor

from model_worker.batch import Batch
from model_worker.group import Group
from model_worker.input_batch import build_dummy_batch
from model_worker.kernels.cpu.backend import CpuKernels
from model_worker.kernels.cpu.library import cpu_library
from model_worker.kernels.interface import Kernels
from model_worker.kernels.invariant_backend import InvariantKernels
from tests.parity.rank_threads import Held, RankThreads

SHAPE = config(num_layers=2, num_kv_heads=4, vocab_size=200, hidden_size=96)
IDS = [5, 17, 3, 88, 41, 9, 120]


def batch_of(held: Held, lens: list[int], tables: list[list[int]]) -> Batch:
    """Whole prompts of these lengths, the last of which is IDS."""
    size = held.kv.block_size
    batch = build_dummy_batch(np.array(lens), np.array(lens), 0, held.kv)
    positions = batch.positions.numpy()
    rows = np.repeat(np.arange(len(lens)), lens)
    slots = [tables[row][at // size] * size + at % size for row, at in zip(rows, positions, strict=True)]
    batch.slot_mapping.copy_(torch.tensor(slots))
    batch.block_tables[:] = torch.tensor([(table + [0] * 8)[: batch.block_tables.shape[1]] for table in tables])
    batch.input_ids.copy_((torch.arange(len(positions)) * 7 + 1) % SHAPE.vocab_size)
    batch.input_ids[-len(IDS) :] = torch.tensor(IDS)
    return batch


def ours(group: Group) -> Kernels:
    return CpuKernels(cpu_library(1), torch.float16, group)  # of one thread, so that the ranks of a test do not share a team


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("kernels", "block_size"), [(InvariantKernels, 4), (ours, 16)], ids=["torch", "cpu"])
def test_a_prompt_has_the_same_logits_alone_and_behind_others(
    kernels: Callable[[Group], Kernels], block_size: int, size: int
) -> None:
    ranks = RankThreads(size, lambda kernels: build(SHAPE, kernels), kernels)
    found: list[Tensor] = []
    for lens, tables in (([7], [[0, 1]]), ([3, 21, 7], [[2], [3, 4, 5, 6, 7, 8], [9, 10]]), ([30, 7], [[*range(8)], [11, 12]])):
        with ranks.held(block_size, 16) as held:
            found.append(held.model.forward(batch_of(held, lens, tables), held.kv)[-1])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
