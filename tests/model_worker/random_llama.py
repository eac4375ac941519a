"""Small random Llamas without files: any shape, the same weights for any kernels."""

from dataclasses import replace
from typing import Any

import torch

from model_worker.kernels.interface import Kernels
from model_worker.kv_pool import IN_FLOAT32, KVPool, KVStore
from model_worker.layers.weight_slot import WeightSlot
from model_worker.models.causal_lm import CausalLM
from model_worker.models.model_config import ModelConfig
from model_worker.models.registry import build_model

_GQA = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=199,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    max_model_len=2048,
    rms_norm_eps=1e-5,
    rope_theta=5000.0,
    tie_word_embeddings=True,
)


def config(**changes: Any) -> ModelConfig:
    """Two layers, 8 heads of 16, 2 KV heads, vocabulary 199; `changes` override."""
    return replace(_GQA, **changes)


def build(shape: ModelConfig, kernels: Kernels) -> CausalLM:
    """The model of this shape, or the part of it that is its rank's; its weights depend on the shape alone."""
    model = build_model(shape, kernels)
    fill(model.slots())
    return model


def fill(slots: dict[str, WeightSlot]) -> None:
    """Random weights, norms about one."""
    generator = torch.Generator().manual_seed(11)
    for name, slot in sorted(slots.items()):
        values = torch.empty(slot.shape)
        values.uniform_(0.5, 1.5, generator=generator) if "norm" in name else values.normal_(0.0, 0.15, generator=generator)
        slot.view.copy_(values.narrow(slot.dim, slot.start, slot.stop - slot.start))


def pool(shape: ModelConfig, block_size: int, num_tokens: int = 2048, store: KVStore = IN_FLOAT32) -> KVPool:
    """A fresh pool of `num_tokens` positions."""
    return KVPool.of_shape(shape.kv_shape, -(-num_tokens // block_size), block_size, store)
