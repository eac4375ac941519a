"""The shape of multi-head latent attention."""

from dataclasses import dataclass

from model_worker.models.indexer_config import IndexerConfig


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Sizes as config.json names them. A head's query and key are `qk_nope_head_dim` elements without a position and `qk_rope_head_dim`
    rotated ones."""

    q_lora_rank: int | None  # None: queries are projected in one step
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    is_interleaved: bool  # neighbours are rotated together, not elements half a head apart
    indexer: IndexerConfig | None = None  # None: a token attends to all positions up to its own

    @property
    def kept(self) -> int:
        """Elements of what the pool keeps of a position for attention itself: the latent, and the rotated part of every head's key."""
        return self.kv_lora_rank + self.qk_rope_head_dim
