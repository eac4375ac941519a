"""What all models here share: an embedding, layers of attention and feed-forward behind norms, a last norm and a head."""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from model_worker.batch import Batch
from model_worker.kernels.interface import Kernels, LayerStack, PagedAttention, PlainLayer
from model_worker.kv_pool import KVPool
from model_worker.layers.attention import Attention
from model_worker.layers.embedding import Embedding
from model_worker.layers.mlp import MLP
from model_worker.layers.rms_norm import RMSNorm
from model_worker.layers.rotary import RotaryEmbedding
from model_worker.layers.weight_slot import WeightSlot
from model_worker.models.model_config import ModelConfig


class AttentionLayer(Protocol):
    """Mixes positions."""

    def __call__(self, x: Tensor, rotation: tuple[Tensor, Tensor], attention: PagedAttention, layer: int) -> Tensor:
        """`x` and the result are `[T, hidden_size]`; what the pool keeps of the batch's positions is written to it."""
        ...

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """Checkpoint name -> where it goes."""
        ...


class FeedForward(Protocol):
    """Works on each position by itself."""

    def __call__(self, x: Tensor) -> Tensor:
        """`x` and the result are `[T, hidden_size]`."""
        ...

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """Checkpoint name -> where it goes."""
        ...


class DecoderLayer:
    """`mlp_name` is what the checkpoint calls the feed-forward part."""

    def __init__(
        self, config: ModelConfig, kernels: Kernels, attention: AttentionLayer, mlp: FeedForward, mlp_name: str = "mlp"
    ) -> None:
        self._kernels = kernels
        self._input_norm = RMSNorm(kernels, config.hidden_size, config.rms_norm_eps)
        self._attention = attention
        self._post_attention_norm = RMSNorm(kernels, config.hidden_size, config.rms_norm_eps)
        self._mlp = mlp
        self._mlp_name = mlp_name

    def __call__(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], attention: PagedAttention, layer: int) -> Tensor:
        """`hidden` and the result are `[T, hidden_size]`."""
        mixed = self._attention(self._input_norm(hidden), rotation, attention, layer)
        normed, hidden = self._post_attention_norm.added(mixed, hidden)
        return hidden + self._mlp(normed)

    def plain(self, eps: float) -> PlainLayer | None:
        """Its parts, where it is nothing but a plain layer on one rank."""
        attention, mlp = self._attention, self._mlp
        if type(attention) is not Attention or type(mlp) is not MLP or self._kernels.group.size > 1:
            return None
        (qkv, norms, output), (gate_up, down) = attention.parts, mlp.parts
        num_heads, num_kv_heads = attention.num_heads
        head_norms = (norms["q_norm"].weight, norms["k_norm"].weight) if norms else None
        return PlainLayer(
            self._input_norm.weight,
            *qkv.parts,
            head_norms,
            *output.parts,
            self._post_attention_norm.weight,
            *gate_up.parts,
            *down.parts,
            num_heads,
            num_kv_heads,
            eps,
        )

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """Checkpoint name -> where it goes."""
        return (
            self._input_norm.slots(f"{prefix}.input_layernorm")
            | self._attention.slots(f"{prefix}.self_attn")
            | self._post_attention_norm.slots(f"{prefix}.post_attention_layernorm")
            | self._mlp.slots(f"{prefix}.{self._mlp_name}")
        )


class Decoder:
    """See `CausalLM` for the contract. A model is this with layers of its own."""

    def __init__(self, config: ModelConfig, kernels: Kernels, layers: Sequence[DecoderLayer]) -> None:
        self.config = config
        self._kernels = kernels
        self._embed_tokens = Embedding(kernels, config.vocab_size, config.hidden_size)
        self._layers = layers
        self._norm = RMSNorm(kernels, config.hidden_size, config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self._lm_head = self._embed_tokens if tied else Embedding(kernels, config.vocab_size, config.hidden_size)
        self._rotary = RotaryEmbedding(config.rotary_dim or config.head_dim, config.rope_theta, config.rope_scaling)

    @property
    def embedding(self) -> Embedding:
        """Of token ids."""
        return self._embed_tokens

    @property
    def head(self) -> Embedding:
        """Gives the logits of hidden states behind the last norm."""
        return self._lm_head

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KVPool) -> Tensor:
        """See `CausalLM`."""
        hidden, _ = self._hidden(batch, kv, (), self._kernels.placement.take(batch.logits_rows))
        return self._lm_head.logits(self._norm(hidden))

    @torch.inference_mode()
    def forward_tapped(self, batch: Batch, kv: KVPool, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """See `TappedLM`."""
        hidden, tapped = self._hidden(batch, kv, taps)
        normed = self._norm(hidden)
        logits = self._lm_head.logits(normed.index_select(0, self._kernels.placement.take(batch.logits_rows)))
        return logits, torch.cat(tapped, dim=1) if taps else normed

    def _hidden(
        self, batch: Batch, kv: KVPool, taps: Sequence[int], wanted: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """What the last layer gives for the tokens `wanted`, or for all, `[S, hidden_size]`, and what went into the layers `taps`, `[T, hidden_size]`."""
        attention = self.paged_attention(batch, kv)
        rotation = self._rotary(self._kernels.placement.take(batch.positions))
        hidden, tapped = self._embed_tokens(self._kernels.placement.take(batch.input_ids)), {}
        if (stack := self._stack) is not None:
            bounds = sorted({0, *taps, len(self._layers)})
            for first, stop in pairwise(bounds):
                if first in taps:
                    tapped[first] = hidden.clone()
                is_last = stop == len(self._layers)
                hidden = stack.run(range(first, stop), hidden, rotation, attention, wanted if is_last else None)
            return hidden, [tapped[index] for index in taps]
        for index, layer in enumerate(self._layers):
            if index in taps:
                tapped[index] = hidden
            hidden = layer(hidden, rotation, attention, index)
        return hidden if wanted is None else hidden.index_select(0, wanted), [tapped[index] for index in taps]

    @cached_property
    def _stack(self) -> LayerStack | None:
        """All layers in one piece, where they are plain and the kernels can; made at the first pass, when the weights are loaded."""
        layers = [layer.plain(self.config.rms_norm_eps) for layer in self._layers]
        plain = [layer for layer in layers if layer is not None]
        return self._kernels.stack_layers(plain) if len(plain) == len(layers) else None

    def paged_attention(self, batch: Batch, kv: KVPool) -> PagedAttention:
        """For one step of the model's layers, or of others like them. A model whose layers need more of it overrides this."""
        return self._kernels.paged_attention(batch, kv)

    def slots(self) -> dict[str, WeightSlot]:
        """See `CausalLM`."""
        slots = self._embed_tokens.slots("model.embed_tokens") | self._norm.slots("model.norm")
        for index, layer in enumerate(self._layers):
            slots |= layer.slots(f"model.layers.{index}")
        return slots if self.config.tie_word_embeddings else slots | self._lm_head.slots("lm_head")
