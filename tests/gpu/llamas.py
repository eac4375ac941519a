"""Llamas of random weights, in the shapes of Llama 3.2 1B and Llama 3.1 8B, and a tiny one for a CPU."""

from dataclasses import dataclass

import torch

from model_worker.batch import Batch
from model_worker.kernels.interface import Kernels
from model_worker.kv_pool import KVPool
from model_worker.layers.decoder import Decoder
from model_worker.models.model_config import ModelConfig
from model_worker.models.registry import build_model

BLOCK_SIZE = 16


def _shape(hidden: int, inner: int, layers: int, heads: int, head_dim: int, vocab: int = 128256) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8 if heads >= 8 else 2,
        head_dim=head_dim,
        max_model_len=1024,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        tie_word_embeddings=hidden <= 2048,
    )


TINY = _shape(64, 96, 2, 4, 16, vocab=199)
SHAPES = {"1B": _shape(2048, 8192, 16, 32, 64), "8B": _shape(4096, 14336, 32, 32, 128)}


@dataclass(frozen=True, slots=True, eq=False)
class Llama:
    """A model and a pool for `max_rows` sequences of `context` tokens, all of them full of random numbers."""

    model: Decoder
    kv: KVPool
    context: int
    weight_bytes: int  # that every pass reads

    @classmethod
    def random(cls, shape: ModelConfig, kernels: Kernels, max_rows: int, context: int) -> "Llama":
        """On the kernels' device, always the same numbers there."""
        model = build_model(shape, kernels)
        assert isinstance(model, Decoder)
        generator = torch.Generator(kernels.placement.device).manual_seed(11)
        for name, slot in sorted(model.slots().items()):
            if "norm" in name:
                slot.view.fill_(1.0)
            else:
                slot.view.normal_(0.0, shape.hidden_size**-0.5, generator=generator)
        kv = KVPool.of_shape(shape.kv_shape, max_rows * (context // BLOCK_SIZE), BLOCK_SIZE, kernels.kv_store())
        for layer in range(kv.num_layers):
            for plane in (kv.keys(layer), kv.values(layer)):
                plane[: kv.num_blocks].normal_(generator=generator)
        # Of an embedding that is no head a pass reads only the rows that it is asked for.
        read = [slot.view for name, slot in model.slots().items() if shape.tie_word_embeddings or "embed_tokens" not in name]
        return cls(model, kv, context, sum(view.numel() * view.itemsize for view in read))

    def decodes(self, rows: int, first_id: int = 0) -> Batch:
        """The last position of so many sequences."""
        width = self.context // BLOCK_SIZE
        tables = torch.arange(rows * width, dtype=torch.int32).view(rows, width)
        last = self.context - 1
        return Batch(
            input_ids=(torch.arange(rows) * 31 + first_id) % self.model.config.vocab_size,
            positions=torch.full((rows,), last),
            slot_mapping=tables[:, -1].long() * BLOCK_SIZE + last % BLOCK_SIZE,
            cu_seqlens_q=torch.arange(rows + 1, dtype=torch.int32),
            context_lens=torch.full((rows,), self.context, dtype=torch.int32),
            block_tables=tables,
            num_decodes=rows,
            logits_rows=torch.arange(rows),
        )

    def bytes_read(self, rows: int) -> int:
        """What a pass of `decodes(rows)` cannot do without: every weight once, and the KV of every context."""
        return self.weight_bytes + rows * self.context * self.kv.bytes_per_token
