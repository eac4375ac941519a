"""A model over two ranks on AITER's compiled kernels: each has its share of heads and experts, and together they give what one alone gives."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from model_worker.group import ALONE, Group
from model_worker.kernels.aiter.library import AiterLibrary
from model_worker.kernels.aiter.native_backend import AiterNativeKernels
from model_worker.kv_pool import KVPool
from model_worker.models.causal_lm import CausalLM
from model_worker.placement import Placement
from tests.aiter.test_native_models import SHAPES
from tests.model_worker import random_llama
from tests.model_worker.paged_driver import Run, build_batch

PROMPT = [(7 * place + 3) % 97 for place in range(19)]


class Meeting:
    """Where two threads leave tensors for each other."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=60)
        self.left: dict[int, Tensor] = {}


class ThreadGroup:
    """See `Group`: one of two ranks, each a thread."""

    size = 2

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank = rank
        self._meeting = meeting

    def all_gather(self, x: Tensor) -> Tensor:
        self._meeting.left[self.rank] = x
        self._meeting.barrier.wait()
        gathered = torch.stack([self._meeting.left[rank] for rank in range(self.size)])
        self._meeting.barrier.wait()
        return gathered

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.all_gather(x).sum(dim=0)

    def gather(self, x: Tensor) -> Tensor | None:
        gathered = self.all_gather(x)
        return gathered if self.rank == 0 else None

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self.all_gather(x).sum(dim=0)[self.rank]


def made(name: str, arch: str, group: Group) -> tuple[CausalLM, KVPool]:
    shape, _ = SHAPES[name]
    kernels = AiterNativeKernels(AiterLibrary(arch), Placement(torch.device("cpu"), torch.bfloat16), group=group)
    return random_llama.build(shape, kernels), KVPool.of_shape(shape.kv_shape_of(group), 4, 16, kernels.kv_store())


def logits_of(model: CausalLM, kv: KVPool) -> Tensor:
    """Of a prompt in two chunks, and of a decode behind it."""
    run, parts = Run([*PROMPT, 5], len(PROMPT), table=[2, 1]), []
    for count in (12, 7, 1):
        parts.append(model.forward(build_batch([(run, count)], 16, every_logit=True), kv))
        run.computed += count
    return torch.cat(parts)


@pytest.mark.parametrize("name", ["Llama", "Qwen3-MoE"])
def test_two_ranks_give_what_one_gives(name: str, arch: str) -> None:
    meeting = Meeting()
    ranks = [made(name, arch, ThreadGroup(rank, meeting)) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        whole, other = threads.map(logits_of, *zip(*ranks, strict=True))
    expected = logits_of(*made(name, arch, ALONE))
    assert other.shape == (0, expected.shape[1])
    assert float((whole - expected).abs().max() / expected.std()) < 0.1
