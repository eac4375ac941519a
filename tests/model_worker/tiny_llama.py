"""Small random Llamas from transformers, saved as it saves them, to compare ours with."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from model_worker.kv_pool import KVPool
from model_worker.models.causal_lm import CausalLM

SHAPES: dict[str, dict[str, Any]] = {
    "gqa-tied": {"num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "mha-untied": {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False},
    "biases-wide-heads": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 24,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True)
class Pair:
    """transformers' model and ours, on the same weights."""

    theirs: LlamaForCausalLM
    ours: CausalLM
    directory: Path

    def pool(self, block_size: int, num_tokens: int = 2048) -> KVPool:
        """A fresh pool of `num_tokens` positions."""
        return KVPool.of_shape(self.ours.config.kv_shape, -(-num_tokens // block_size), block_size)


def reference(shape: str) -> LlamaForCausalLM:
    """A random model whose logits spread over a few units, so that two best ones are rarely close."""
    config = LlamaConfig(
        vocab_size=199,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        bos_token_id=1,
        eos_token_id=2,
        **SHAPES[shape],
    )
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(11)
    for name, parameter in sorted(model.named_parameters()):
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.data.normal_(0.0, 0.15, generator=generator)
    return model


def save(model: LlamaForCausalLM, directory: Path, **options: Any) -> Path:
    """Save as transformers does, with a tokenizer.json (only its bytes matter here)."""
    model.save_pretrained(directory, **options)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def reference_logits(model: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    """Logits `[len(ids), vocab]` of one sequence."""
    return _logits(model, tuple(ids))


def reference_greedy(model: LlamaForCausalLM, prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy continuation, EOS ignored."""
    ids = list(prompt)
    for _ in range(max_tokens):
        ids.append(int(reference_logits(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


@cache
@torch.inference_mode()
def _logits(model: LlamaForCausalLM, ids: tuple[int, ...]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0]
