"""DeepSeek-V3 (arXiv:2412.19437): latent attention, and experts chosen by groups behind some dense layers."""

from model_worker.kernels.interface import Kernels
from model_worker.layers.decoder import Decoder, DecoderLayer
from model_worker.layers.experts import dense_or_experts
from model_worker.layers.latent_attention import LatentAttention
from model_worker.layers.router import SigmoidRouter
from model_worker.models.model_config import ModelConfig


class DeepseekV3ForCausalLM(Decoder):
    """See `CausalLM` for the contract. `config.latent` and `config.experts` are set."""

    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        super().__init__(config, kernels, [decoder_layer(index, config, kernels) for index in range(config.num_layers)])


def decoder_layer(index: int, config: ModelConfig, kernels: Kernels) -> DecoderLayer:
    """Layer `index`, or one of those behind the last, which are made alike."""
    mlp = dense_or_experts(index, config, kernels, SigmoidRouter)
    return DecoderLayer(config, kernels, LatentAttention(config, kernels), mlp)
