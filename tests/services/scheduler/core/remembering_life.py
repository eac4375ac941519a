"""A random life over a small model whose engine remembers every set of logits that it computes."""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from engine_life import Life
from engine_worker import EngineWorker
from scheduler_rig import WORKER, Rig
from torch import Tensor

from model_worker.engine import Engine
from model_worker.input_batch import Rows
from model_worker.kernels.interface import Kernels
from model_worker.kv_pool import KVPool
from model_worker.kv_shape import KVShape
from model_worker.layers.weight_slot import WeightSlot
from model_worker.models.causal_lm import CausalLM
from model_worker.models.model_config import ModelConfig
from model_worker.models.registry import build_model
from model_worker.speculation.ngram import NgramProposer
from services.scheduler.core.worker_loss import LEFT
from services.worker.drafter import Drafter
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


class Memory:
    """Bits of logits by the ids before them; `again` counts the contexts that came again, `contradictions` those with other bits then."""

    def __init__(self) -> None:
        self._bits: dict[bytes, bytes] = {}
        self.again = self.contradictions = 0

    def add(self, ids: np.ndarray, logits: Tensor) -> None:
        bits = logits.numpy().tobytes()
        known = self._bits.setdefault(ids.tobytes(), bits)
        self.again += 1
        self.contradictions += known != bits


class RememberingEngine(Engine):
    """Tells `memory` all that it computes."""

    memory: Memory

    def _forward(self, rows: Rows, step_id: int) -> tuple[Tensor, PromptLogprobs | None, Tensor | None]:
        logits, prompt_logprobs, hidden = super()._forward(rows, step_id)
        row_of = np.repeat(np.arange(len(rows.slots)), rows.logits_counts)
        lengths = rows.context_lens[row_of] - (np.cumsum(rows.logits_counts) - 1)[row_of] + np.arange(len(row_of))
        for slot, length, row in zip(rows.slots[row_of], lengths, logits, strict=True):
            self.memory.add(self._slots.token_ids[slot, :length], row)
        return logits, prompt_logprobs, hidden


def randomized(slots: Mapping[str, WeightSlot], seed: int) -> None:
    """Give weights random values."""
    generator = torch.Generator().manual_seed(seed)
    for _, slot in sorted(slots.items()):
        slot.view.copy_(torch.empty(slot.shape).normal_(0.0, 0.3, generator=generator))


def ngram(model: CausalLM, kernels: Kernels) -> Drafter:
    """Prompt lookup, and eager."""
    return Drafter(None, lambda _: NgramProposer(1, 3))


class LlamaWorker(EngineWorker):
    """A model with random weights instead of the deterministic one, a Llama unless a subclass has another, built anew at every boot."""

    kernels: Kernels
    memory: Memory
    shape = SHAPE
    make_drafter: Callable[[CausalLM, Kernels], Drafter] = staticmethod(ngram)
    rejects = False

    def build_model(self) -> CausalLM:
        model = build_model(self.shape, self.kernels)
        randomized(model.slots(), 11)
        self.drafter = self.make_drafter(model, self.kernels) if self.limits.num_speculative_tokens else None
        return model

    def paired_shape(self, model: CausalLM) -> KVShape | None:
        return self.drafter.kv_shape if self.drafter is not None else None

    def build_engine(self, model: CausalLM, kv: KVPool) -> Engine:
        proposer = self.drafter.proposer(kv) if self.drafter is not None else None
        engine = RememberingEngine(model, kv, self.description, proposer, rejects=self.rejects)
        engine.memory = self.memory
        return engine


class LlamaLife(Life):
    """Greedy and sampled requests; the worker is attached again, or starts again."""

    base = LlamaWorker

    def __init__(self, seed: int, mode: str, kernels: Kernels, memory: Memory, num_drafts: int = 0) -> None:
        self.worker_class = type("OneLlamaWorker", (self.base,), {"kernels": kernels, "memory": memory})
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
