"""What a model's shape is, whatever file it came from."""

from dataclasses import dataclass, replace

from model_worker.group import Group
from model_worker.kv_shape import KVShape
from model_worker.layers.rope_scaling import RopeScaling
from model_worker.layers.share import kv_head_share
from model_worker.models.experts_config import ExpertsConfig
from model_worker.models.latent_config import LatentConfig


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder-only transformer. Sizes are counts of elements, not bytes."""

    architecture: str  # as in config.json, e.g. LlamaForCausalLM
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int  # positions the model was trained for
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # each query and key head is normalised before its rotation
    rope_scaling: RopeScaling | None = None
    rotary_dim: int | None = None  # leading elements of a head that are rotated; None: all
    sliding_windows: tuple[int | None, ...] = ()  # per layer, None: the whole context; empty: no layer has one
    num_mtp_layers: int = 0  # layers behind the last that predict further tokens
    experts: ExpertsConfig | None = None  # None: every layer is dense
    latent: LatentConfig | None = None  # None: the pool keeps keys and values

    @property
    def kv_shape(self) -> KVShape:
        """What the model keeps of a position."""
        if self.latent is not None:
            index_dim = self.latent.indexer.head_dim if self.latent.indexer else 0
            return KVShape(self.num_layers, num_kv_heads=1, head_dim=self.latent.kept + index_dim, num_planes=1)
        return KVShape(self.num_layers, self.num_kv_heads, self.head_dim)

    def kv_shape_of(self, group: Group) -> KVShape:
        """What one of several ranks keeps: the KV heads that its query heads read, or all of a latent. Raises HeadsDoNotDivide."""
        if self.latent is not None:
            return self.kv_shape
        return replace(self.kv_shape, num_kv_heads=kv_head_share(self.num_kv_heads, group).size)
