"""With batch-invariant kernels a request has the same bits alone and among others on several ranks too."""

import numpy as np
import pytest
import torch
from random_llama import build, config
from torch import Tensor

from model_worker.batch import Batch
from model_worker.input_batch import build_dummy_batch
from model_worker.kernels.invariant_backend import InvariantKernels
from tests.parity.rank_threads import Held, RankThreads

SHAPE = config(num_layers=2, num_kv_heads=4, vocab_size=200, hidden_size=96)
IDS = [5, 17, 3, 88, 41, 9, 120]


def batch_of(held: Held, lens: list[int], tables: list[list[int]]) -> Batch:
    """Whole prompts of these lengths, the last of which is IDS."""
    batch = build_dummy_batch(np.array(lens), np.array(lens), 0, held.kv)
    positions = batch.positions.numpy()
    rows = np.repeat(np.arange(len(lens)), lens)
    batch.slot_mapping.copy_(torch.tensor([tables[row][at // 4] * 4 + at % 4 for row, at in zip(rows, positions, strict=True)]))
    batch.block_tables[:] = torch.tensor([(table + [0] * 8)[: batch.block_tables.shape[1]] for table in tables])
    batch.input_ids.copy_((torch.arange(len(positions)) * 7 + 1) % SHAPE.vocab_size)
    batch.input_ids[-len(IDS) :] = torch.tensor(IDS)
    return batch


@pytest.mark.parametrize("size", [2, 4])
def test_a_prompt_has_the_same_logits_alone_and_behind_others(size: int) -> None:
    ranks = RankThreads(size, lambda kernels: build(SHAPE, kernels), InvariantKernels)
    found: list[Tensor] = []
    for lens, tables in (([7], [[0, 1]]), ([3, 21, 7], [[2], [3, 4, 5, 6, 7, 8], [9, 10]]), ([30, 7], [[*range(8)], [11, 12]])):
        with ranks.held(4, 16) as held:
            found.append(held.model.forward(batch_of(held, lens, tables), held.kv)[-1])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
