"""Llama (arXiv:2302.13971, with grouped query attention), and the many models of its shape."""

import torch
from torch import Tensor

from model_worker.batch import Batch
from model_worker.kernels.interface import Kernels, PagedAttention
from model_worker.kv_pool import KVPool
from model_worker.layers.embedding import Embedding
from model_worker.layers.linear import Linear
from model_worker.layers.rms_norm import RMSNorm
from model_worker.layers.rotary import RotaryEmbedding
from model_worker.models.model_config import ModelConfig


class LlamaAttention:
    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        self._kernels = kernels
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        outputs = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self._qkv_proj = Linear(kernels, config.hidden_size, outputs, config.attention_bias)
        self._o_proj = Linear(kernels, q_size, {"o_proj": config.hidden_size}, config.attention_bias)

    def __call__(self, x: Tensor, rotation: tuple[Tensor, Tensor], attention: PagedAttention, layer: int) -> Tensor:
        qkv = self._qkv_proj(x).view(x.shape[0], -1, self._head_dim)
        qk, value = qkv.split_with_sizes((self._num_heads + self._num_kv_heads, self._num_kv_heads), dim=1)
        query, key = self._kernels.rotary_embedding(qk, *rotation).split_with_sizes(
            (self._num_heads, self._num_kv_heads), dim=1
        )
        attention.store(layer, key, value)
        return self._o_proj(attention.attend(layer, query, key, value))

    def slots(self, prefix: str) -> dict[str, Tensor]:
        return self._qkv_proj.slots(prefix) | self._o_proj.slots(prefix)


class LlamaMLP:
    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        self._kernels = kernels
        outputs = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self._gate_up_proj = Linear(kernels, config.hidden_size, outputs, config.mlp_bias)
        self._down_proj = Linear(kernels, config.intermediate_size, {"down_proj": config.hidden_size}, config.mlp_bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._down_proj(self._kernels.silu_and_mul(self._gate_up_proj(x)))

    def slots(self, prefix: str) -> dict[str, Tensor]:
        return self._gate_up_proj.slots(prefix) | self._down_proj.slots(prefix)


class LlamaLayer:
    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        self._input_norm = RMSNorm(kernels, config.hidden_size, config.rms_norm_eps)
        self._attention = LlamaAttention(config, kernels)
        self._post_attention_norm = RMSNorm(kernels, config.hidden_size, config.rms_norm_eps)
        self._mlp = LlamaMLP(config, kernels)

    def __call__(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], attention: PagedAttention, layer: int) -> Tensor:
        hidden = hidden + self._attention(self._input_norm(hidden), rotation, attention, layer)
        return hidden + self._mlp(self._post_attention_norm(hidden))

    def slots(self, prefix: str) -> dict[str, Tensor]:
        return (
            self._input_norm.slots(f"{prefix}.input_layernorm")
            | self._attention.slots(f"{prefix}.self_attn")
            | self._post_attention_norm.slots(f"{prefix}.post_attention_layernorm")
            | self._mlp.slots(f"{prefix}.mlp")
        )


class LlamaForCausalLM:
    """See `CausalLM` for the contract."""

    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        self.config = config
        self._kernels = kernels
        self._embed_tokens = Embedding(kernels, config.vocab_size, config.hidden_size)
        self._layers = [LlamaLayer(config, kernels) for _ in range(config.num_layers)]
        self._norm = RMSNorm(kernels, config.hidden_size, config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self._lm_head = self._embed_tokens if tied else Embedding(kernels, config.vocab_size, config.hidden_size)
        self._rotary = RotaryEmbedding(config.head_dim, config.rope_theta)

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KVPool) -> Tensor:
        attention = self._kernels.paged_attention(batch, kv)
        rotation = self._rotary(batch.positions)
        hidden = self._embed_tokens(batch.input_ids)
        for index, layer in enumerate(self._layers):
            hidden = layer(hidden, rotation, attention, index)
        wanted = hidden.index_select(0, batch.logits_rows)
        return self._lm_head.logits(self._norm(wanted))

    def slots(self) -> dict[str, Tensor]:
        slots = self._embed_tokens.slots("model.embed_tokens") | self._norm.slots("model.norm")
        for index, layer in enumerate(self._layers):
            slots |= layer.slots(f"model.layers.{index}")
        return slots if self.config.tie_word_embeddings else slots | self._lm_head.slots("lm_head")
