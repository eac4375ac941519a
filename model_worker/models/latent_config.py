"""The shape of multi-head latent attention."""

from dataclasses import dataclass


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
