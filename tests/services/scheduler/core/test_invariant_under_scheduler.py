"""The batch-invariant mode under the real scheduler and engine: whatever becomes of a request, one context has one set of logits.

Lives mix policies, forks, prefix hits, chunks, both ways of preemption, drafts, new leaders and workers that start again. Every set of logits that an
engine computes is remembered by the token ids before it, over all lives, and must be the same bits whenever these ids come again.
"""

from collections import Counter

import numpy as np
import pytest
import torch
from engine_life import Life
from engine_worker import EngineWorker
from scheduler_rig import WORKER, Rig
from torch import Tensor

from model_worker.engine import Engine
from model_worker.input_batch import Rows
from model_worker.kernels.interface import Kernels
from model_worker.kernels.invariant_backend import InvariantKernels, ask_mkl_for_invariance
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kv_pool import KVPool
from model_worker.models.causal_lm import CausalLM
from model_worker.models.model_config import ModelConfig
from model_worker.models.registry import build_model
from model_worker.speculation.ngram import NgramProposer
from services.scheduler.core.worker_loss import LEFT
from tessera.values.config import Config
from tessera.values.logprobs import PromptLogprobs
from tessera.values.model import WorkerLimits

SHAPE = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    max_model_len=64,
    rms_norm_eps=1e-5,
    rope_theta=5000.0,
    tie_word_embeddings=False,
)
LIVES = 4

ask_mkl_for_invariance()  # before the first test multiplies


class Memory:
    """Bits of logits by the ids before them; `again` counts the contexts that came again, `contradictions` those with other bits then."""

    def __init__(self) -> None:
        self._bits: dict[bytes, bytes] = {}
        self.again = self.contradictions = 0

    def add(self, ids: np.ndarray, logits: np.ndarray) -> None:
        known = self._bits.setdefault(ids.tobytes(), logits.tobytes())
        self.again += 1
        self.contradictions += known != logits.tobytes()


class RememberingEngine(Engine):
    """Tells `memory` all that it computes."""

    memory: Memory

    def _forward(self, rows: Rows, step_id: int) -> tuple[np.ndarray, PromptLogprobs | None]:
        logits, prompt_logprobs = super()._forward(rows, step_id)
        row_of = np.repeat(np.arange(len(rows.slots)), rows.logits_counts)
        lengths = rows.context_lens[row_of] - (np.cumsum(rows.logits_counts) - 1)[row_of] + np.arange(len(row_of))
        for slot, length, row in zip(rows.slots[row_of], lengths, logits, strict=True):
            self.memory.add(self._slots.token_ids[slot, :length], row)
        return logits, prompt_logprobs


class LlamaWorker(EngineWorker):
    """A Llama with random weights instead of the deterministic model, built anew at every boot."""

    kernels: Kernels
    memory: Memory

    def build_model(self) -> CausalLM:
        model = build_model(SHAPE, self.kernels)
        generator = torch.Generator().manual_seed(11)
        for _, slot in sorted(model.slots().items()):
            slot.view.copy_(torch.empty(slot.shape).normal_(0.0, 0.3, generator=generator))
        return model

    def build_engine(self, model: CausalLM, kv: KVPool) -> Engine:
        proposer = NgramProposer(1, 3) if self.limits.num_speculative_tokens else None
        engine = RememberingEngine(model, kv, self.description, proposer)
        engine.memory = self.memory
        return engine


class HalvesForOneRow(TorchKernels):
    """Adds up in another order where a row is alone, as libraries do (torch's own on many machines, but not on all)."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if len(x) > 1:
            return super().linear(x, weight, bias)
        half = x.shape[1] // 2
        return super().linear(x[:, :half], weight[:, :half], bias) + super().linear(x[:, half:], weight[:, half:], None)


class LlamaLife(Life):
    """Greedy and sampled requests; the worker is attached again, or starts again."""

    def __init__(self, seed: int, mode: str, kernels: Kernels, memory: Memory, num_drafts: int = 0) -> None:
        self.worker_class = type("OneLlamaWorker", (LlamaWorker,), {"kernels": kernels, "memory": memory})
        self.restarts = 0
        super().__init__(seed, mode, num_drafts)
        limits = WorkerLimits(max_num_seqs=1, max_num_batched_tokens=64)
        self.solo = Rig(Config(enable_prefix_caching=False), self.worker_class(16, 4, limits))

    def sampling(self) -> dict[str, object]:
        return {"temperature": self.rng.choice((0.0, 0.7, 1.5)), "seed": self.rng.randint(0, 3)}

    def interrupt(self) -> None:
        if self.rng.random() < 0.5:
            super().interrupt()
            return
        self.restarts += 1
        self.rig.scheduler.lose_worker(WORKER, LEFT, self.rig.now_us)
        self.worker.restart()
        self.rig.attach()

    def alone(self, number: int, length: int) -> list[int]:
        sampling = self.rig.sequence(number).submission.sampling
        own = {name: getattr(sampling, name) for name in ("temperature", "seed", "max_tokens", "ignore_eos")}
        self.solo.submit(number, self.prompts[number], **own)
        self.solo.finish_all()
        return self.solo.output(number)[:length]


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
