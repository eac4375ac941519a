"""The batch-invariant mode under the real scheduler and engine: whatever becomes of a request, one context has one set of logits.

Lives mix policies, forks, prefix hits, chunks, both ways of preemption, drafts, new leaders and workers that start again. Every set of logits that an
engine computes is remembered by the token ids before it, over all lives, and must be the same bits whenever these ids come again.
"""

from collections import Counter

import pytest
import torch
from remembering_life import LlamaLife, Memory
from torch import Tensor

from model_worker.kernels.invariant_backend import InvariantKernels, ask_mkl_for_invariance
from model_worker.kernels.torch_backend import TorchKernels

LIVES = 4

ask_mkl_for_invariance()  # before the first test multiplies


class HalvesForOneRow(TorchKernels):
    """Adds up in another order where a row is alone, as libraries do (torch's own on many machines, but not on all)."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if len(x) > 1:
            return super().linear(x, weight, bias)
        half = x.shape[1] // 2
        return super().linear(x[:, :half], weight[:, :half], bias) + super().linear(x[:, half:], weight[:, half:], None)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_every_request_is_computed_bit_for_bit_as_it_is_alone(mode: str) -> None:
    memory, kernels, seen = Memory(), InvariantKernels(), Counter[str]()
    for seed in range(LIVES + 2):
        life = LlamaLife(seed, mode, kernels, memory, num_drafts=2 * (seed >= LIVES))
        try:
            life.live()
            life.check()
        except BaseException as error:
            error.add_note(f"seed {seed}, mode {mode}")
            raise
        load = life.rig.scheduler.load()
        seen += Counter(restarts=life.restarts, preemptions=load.num_preemptions)
        seen["drafts"] += life.rig.scheduler.spec_stats.num_drafts
        seen["swaps"] += sum(len(batch.swap_ins) for batch in life.rig.batches)
        seen["hits"] += sum(life.rig.sequence(number).num_cached_tokens > 0 for number in life.prompts)
    assert memory.contradictions == 0
    assert memory.again > 1000 and min(seen["restarts"], seen["preemptions"], seen["hits"], seen["drafts"]) > 0, (
        memory.again,
        seen,
    )
    assert (seen["swaps"] > 0) == (mode == "swap")


def test_kernels_that_look_at_the_batch_give_contexts_several_sets_of_logits() -> None:
    """The memory finds what it is there for."""
    memory = Memory()
    life = LlamaLife(0, "recompute", HalvesForOneRow(), memory)
    life.live()
    assert memory.contradictions > 0
