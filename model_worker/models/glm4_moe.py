"""GLM-4.5 and its kin (arXiv:2508.06471): attention of which a part of each head is rotated, DeepSeek-V3's experts."""

from model_worker.kernels.interface import Kernels
from model_worker.layers.attention import Attention
from model_worker.layers.decoder import Decoder, DecoderLayer
from model_worker.layers.experts import dense_or_experts
from model_worker.layers.router import SigmoidRouter
from model_worker.models.model_config import ModelConfig


class Glm4MoeForCausalLM(Decoder):
    """See `CausalLM` for the contract. `config.experts` and `config.rotary_dim` are set."""

    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        super().__init__(config, kernels, [decoder_layer(index, config, kernels) for index in range(config.num_layers)])


def decoder_layer(index: int, config: ModelConfig, kernels: Kernels) -> DecoderLayer:
    """Layer `index`, or one of those behind the last, which are made alike."""
    mlp = dense_or_experts(index, config, kernels, SigmoidRouter)
    return DecoderLayer(config, kernels, Attention(config, kernels, output_bias=False), mlp)
