"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): layers behind the last that say what comes after the next token."""

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from model_worker.batch import Batch
from model_worker.kernels.interface import Kernels, PagedAttention
from model_worker.kv_pool import KVPool
from model_worker.kv_shape import KVShape
from model_worker.layers.decoder import Decoder, DecoderLayer
from model_worker.layers.embedding import Embedding
from model_worker.layers.linear import Linear
from model_worker.layers.rms_norm import RMSNorm
from model_worker.layers.rotary import RotaryEmbedding
from model_worker.layers.weight_slot import WeightSlot
from model_worker.models import deepseek_v3, glm4_moe
from model_worker.models.model_config import ModelConfig

BLOCKS: dict[str, Callable[[int, ModelConfig, Kernels], DecoderLayer]] = {
    "DeepseekV32ForCausalLM": deepseek_v3.decoder_layer,
    "DeepseekV3ForCausalLM": deepseek_v3.decoder_layer,
    "Glm4MoeForCausalLM": glm4_moe.decoder_layer,
}
"""Architecture -> what makes its layer number so-and-so."""


class _MtpLayer:
    """`norm(block(eh_proj([enorm(embedding of the token), hnorm(hidden)])))`. The norm is the one before the head: what is handed on is
    behind it, as the model's own hidden states are."""

    def __init__(
        self, config: ModelConfig, kernels: Kernels, block: DecoderLayer, embedding: Embedding, head: Embedding
    ) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self._token_norm, self._hidden_norm, self._norm = (RMSNorm(kernels, size, eps) for _ in range(3))
        self._join = Linear(kernels, 2 * size, {"eh_proj": size})
        self._block = block
        self.embedding = embedding
        self.head = head

    def __call__(
        self, ids: Tensor, hidden: Tensor, rotation: tuple[Tensor, Tensor], attention: PagedAttention, index: int
    ) -> Tensor:
        joined = torch.cat((self._token_norm(self.embedding(ids)), self._hidden_norm(hidden)), dim=1)
        return self._norm(self._block(self._join(joined), rotation, attention, index))

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        return (
            self._token_norm.slots(f"{prefix}.enorm")
            | self._hidden_norm.slots(f"{prefix}.hnorm")
            | self._join.slots(prefix)
            | self._block.slots(prefix)
            | self._norm.slots(f"{prefix}.shared_head.norm")
        )


class MtpHead:
    """See `DraftHead`. `target` lends its embedding and its head to layers that have none of their own among the names `given` of the
    checkpoint."""

    taps: tuple[int, ...] = ()

    def __init__(self, config: ModelConfig, kernels: Kernels, target: Decoder, given: Collection[str]) -> None:
        self.num_layers = config.num_mtp_layers
        self.hidden_size = self.tapped_size = config.hidden_size
        shape = config.kv_shape_of(kernels.group)
        self.kv_shape = KVShape(self.num_layers, shape.num_kv_heads, shape.head_dim, shape.num_planes)
        self._target = target
        self._placement = kernels.placement
        self._rotary = RotaryEmbedding(config.rotary_dim or config.head_dim, config.rope_theta, config.rope_scaling)
        self._own: dict[str, Embedding] = {}
        self._layers: dict[str, _MtpLayer] = {}
        for index in range(config.num_layers, config.num_layers + self.num_layers):
            prefix = f"model.layers.{index}"
            tables = []
            for name, shared in ((f"{prefix}.embed_tokens", target.embedding), (f"{prefix}.shared_head.head", target.head)):
                table = shared
                if f"{name}.weight" in given:
                    table = self._own[name] = Embedding(kernels, config.vocab_size, config.hidden_size)
                tables.append(table)
            block = BLOCKS[config.architecture](index, config, kernels)
            self._layers[prefix] = _MtpLayer(config, kernels, block, *tables)

    def slots(self) -> dict[str, WeightSlot]:
        """Checkpoint name -> where it goes."""
        slots: dict[str, WeightSlot] = {}
        for prefix, table in self._own.items():
            slots |= table.slots(prefix)
        for prefix, layer in self._layers.items():
            slots |= layer.slots(prefix)
        return slots

    def enter(self, tapped: Tensor) -> Tensor:
        """The model's hidden states as they are."""
        return tapped

    def forward(self, batch: Batch, hidden: Tensor, before: Tensor, kv: KVPool) -> Tensor:
        """See `DraftHead`."""
        take = self._placement.take
        attention, rotation = self._target.paged_attention(batch, kv), self._rotary(take(batch.positions))
        ids, firsts = take(batch.input_ids), take(batch.cu_seqlens_q[:-1].long())
        found: list[Tensor] = []
        for index, layer in enumerate(self._layers.values()):
            if index:
                hidden = found[-1].roll(1, 0).index_copy(0, firsts, before[index - 1])
            found.append(layer(ids, hidden, rotation, attention, index))
        return torch.stack(found)

    def logits(self, hidden: Tensor, layer: int) -> Tensor:
        """See `DraftHead`."""
        return list(self._layers.values())[layer].head.logits(hidden)
