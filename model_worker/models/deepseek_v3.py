"""DeepSeek-V3 (arXiv:2412.19437): latent attention, and experts chosen by groups behind some dense layers."""

from model_worker.kernels.interface import Kernels
from model_worker.layers.decoder import Decoder, DecoderLayer, FeedForward
from model_worker.layers.experts import Experts
from model_worker.layers.latent_attention import LatentAttention
from model_worker.layers.mlp import MLP
from model_worker.layers.router import SigmoidRouter
from model_worker.models.model_config import ModelConfig


class DeepseekV3ForCausalLM(Decoder):
    """See `CausalLM` for the contract. `config.latent` and `config.experts` are set."""

    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        experts = config.experts
        assert experts is not None

        def feed_forward(index: int) -> FeedForward:
            if index not in experts.layers:
                return MLP(kernels, config.hidden_size, config.intermediate_size)
            return Experts(kernels, config.hidden_size, experts, SigmoidRouter(kernels, config.hidden_size, experts))

        def layer(index: int) -> DecoderLayer:
            return DecoderLayer(config, kernels, LatentAttention(config, kernels), feed_forward(index))

        super().__init__(config, kernels, [layer(index) for index in range(config.num_layers)])
