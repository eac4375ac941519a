"""A pass that fails on one rank fails for all, the group goes on with the next, and a rank that is gone is never waited for."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from random_llama import build, config
from torch import Tensor

from model_worker.batch import Batch
from model_worker.group import Group
from model_worker.input_batch import build_dummy_batch
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kv_blocks import Moves
from model_worker.kv_pool import KVPool
from model_worker.layers.weight_slot import WeightSlot
from model_worker.models.causal_lm import CausalLM
from model_worker.models.model_config import ModelConfig
from model_worker.ranks.crew import RankFailed, RankLost
from model_worker.speculation.ngram import NgramProposer
from services.worker.drafter import Drafter
from tessera.values.config import Config
from tessera.values.model import ModelInfo
from tests.parity.in_process import InProcess
from tests.parity.rank_threads import Held, RankThreads

SHAPE = config(num_layers=2, num_kv_heads=4)
INFO = ModelInfo("m", SHAPE.architecture, SHAPE.vocab_size, 256, (), None, "", "")


class FailingKernels(TorchKernels):
    """Raises in the product number `fails_at` from now on, in the middle of a pass."""

    fails_at = -1

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.fails_at -= 1
        if self.fails_at == 0:
            raise MemoryError("no room for a product")
        return super().linear(x, weight, bias)


@dataclass
class Watched:
    """A rank's model that tells of each pass before it runs it."""

    model: CausalLM
    tell: Callable[[Batch], None]
    config: ModelConfig = field(init=False)

    def __post_init__(self) -> None:
        self.config = self.model.config

    def slots(self) -> dict[str, WeightSlot]:
        return self.model.slots()

    def forward(self, batch: Batch, kv: KVPool) -> Tensor:
        self.tell(batch)
        return self.model.forward(batch, kv)


class Ranks:
    """A random Llama over several ranks, each of which can be made to fail."""

    def __init__(self, size: int) -> None:
        self.kernels: list[FailingKernels] = []
        self.threads = RankThreads(size, lambda kernels: build(SHAPE, kernels), self._kernels)

    def _kernels(self, group: Group) -> FailingKernels:
        self.kernels.append(FailingKernels(group))
        return self.kernels[-1]

    def watch(self, rank: int, tell: Callable[[Batch], None]) -> None:
        self.threads.models[rank] = Watched(self.threads.models[rank], tell)

    def held(self, num_blocks: int = 8, num_host_blocks: int = 0) -> AbstractContextManager[Held]:
        return self.threads.held(4, num_blocks, num_host_blocks)


def dummy(held: Held) -> Batch:
    return build_dummy_batch(np.array([3, 2]), np.array([3, 2]), 0, held.kv)


def system(held: Held, **options: Any) -> InProcess:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64} | options
    return InProcess(held.model, INFO, Config(**limits), 4, held.kv.num_blocks, held=(held.kv, held.blocks))


@pytest.mark.parametrize("failing", [(0,), (1,), (3,), (0, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("product", [1, 4])
def test_a_failure_on_some_ranks_is_one_failure_and_the_next_pass_is_right(failing: tuple[int, ...], product: int) -> None:
    ranks = Ranks(4)
    with ranks.held() as held:
        expected = held.model.forward(dummy(held), held.kv)
        for _ in range(2):
            for rank in failing:
                ranks.kernels[rank].fails_at = product
            with pytest.raises((MemoryError, RankFailed), match="no room for a product"):
                held.model.forward(dummy(held), held.kv)
            assert torch.equal(held.model.forward(dummy(held), held.kv), expected)


def test_who_fails_is_named_with_the_reason_and_not_those_who_fail_with_it() -> None:
    ranks = Ranks(4)
    with ranks.held() as held:
        ranks.kernels[2].fails_at = 2
        with pytest.raises(RankFailed, match=r"^rank 2: MemoryError: no room for a product$"):
            held.model.forward(dummy(held), held.kv)


def test_a_request_that_one_rank_cannot_compute_fails_alone() -> None:
    poison = 66

    def refuse(batch: Batch) -> None:
        if poison in batch.input_ids:
            raise ValueError("poison")

    ranks = Ranks(2)
    ranks.watch(1, refuse)
    prompts = [[5, 17, 3, 88, 41], [7, poison, 9], [12] * 9]
    with ranks.held(64) as held:
        outputs = system(held).generate(prompts, [12] * 3)
    with Ranks(1).held(64) as held:
        expected = system(held).generate([prompts[0], prompts[2]], [12] * 2)
    assert outputs == [expected[0], [], expected[1]]


def test_blocks_are_moved_and_read_as_if_one_rank_held_them() -> None:
    moves = [
        Moves(copies=np.array([[1, 5]], np.int32)),
        Moves(swap_outs=np.array([[0, 2], [1, 0]], np.int32)),
        Moves(swap_ins=np.array([[2, 6]], np.int32), zero_blocks=np.array([0], np.int32)),
    ]

    def contents(size: int) -> list[np.ndarray]:
        with Ranks(size).held(8, 3) as held:
            ids = torch.arange(8)
            batch = build_dummy_batch(np.array([8]), np.array([8]), 0, held.kv)
            batch.slot_mapping.copy_(ids)
            batch.input_ids.copy_(ids)
            held.model.forward(batch, held.kv)
            for each in moves:
                held.blocks.move(each)
            return [*held.blocks.read(range(8), is_host=False), *held.blocks.read(range(3), is_host=True)]

    whole = contents(1)
    assert any(block.any() for block in whole[8:]) and whole[1].any() and not whole[0].any()
    for size in (2, 4, 8):
        for block, expected in zip(contents(size), whole, strict=True):
            assert block.shape == expected.shape == (2, 2, 4, 4, 16)
            assert np.allclose(block, expected, atol=1e-5), size


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_rank_that_is_gone_ends_the_engine_and_no_row_is_told_to_have_failed() -> None:
    ranks = Ranks(4)
    passes = 0

    def leave(batch: Batch) -> None:
        nonlocal passes
        passes += 1
        if passes == 3:
            ranks.threads.groups[2].leave()  # as when the process is killed: its sockets close
            raise SystemExit

    ranks.watch(2, leave)
    with pytest.raises(RankLost, match="rank 2 of 4 is gone"), ranks.held(64) as held:
        system(held).generate([[5, 17, 3, 88, 41]], [12])


def test_every_rank_computes_as_many_accepted_drafts_as_rank_0_says() -> None:
    """Drawn at temperature 0.8 with up to three drafts a step: the number of tokens accepted shows in where the next step begins."""
    ranks = Ranks(2)
    seen: list[list[tuple[list[int], list[int]]]] = [[], []]
    for rank in (0, 1):
        ranks.watch(rank, lambda batch, rank=rank: seen[rank].append((batch.positions.tolist(), batch.input_ids.tolist())))
    with ranks.held(200) as held:
        limits = Config(max_num_seqs=8, max_num_batched_tokens=64, num_speculative_tokens=3)
        drafting = InProcess(
            held.model, INFO, limits, 4, 200, Drafter(None, lambda _: NgramProposer(1, 3)), (held.kv, held.blocks)
        )
        prompts = [[5, 17, 3, 5, 17, 3, 5], [9, 9, 9, 9, 9]]
        drafting.generate(prompts, [240, 240], temperature=0.8, allowed_token_ids=tuple(range(5, 25)))
    stats = drafting.spec_stats
    assert 0 < stats.num_accepted < stats.num_drafts
    assert seen[0] == seen[1] and len(seen[0]) >= 200
