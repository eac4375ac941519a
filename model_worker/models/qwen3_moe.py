"""Qwen3 with experts in place of most dense layers (arXiv:2505.09388)."""

from model_worker.kernels.interface import Kernels
from model_worker.layers.attention import Attention
from model_worker.layers.decoder import Decoder, DecoderLayer, FeedForward
from model_worker.layers.experts import Experts
from model_worker.layers.mlp import MLP
from model_worker.layers.router import SoftmaxRouter
from model_worker.models.model_config import ModelConfig


class Qwen3MoeForCausalLM(Decoder):
    """See `CausalLM` for the contract. `config.qk_norm` and `config.experts` are set."""

    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        experts = config.experts
        assert experts is not None

        def feed_forward(index: int) -> FeedForward:
            if index not in experts.layers:
                return MLP(kernels, config.hidden_size, config.intermediate_size)
            return Experts(kernels, config.hidden_size, experts, SoftmaxRouter(kernels, config.hidden_size, experts))

        def layer(index: int) -> DecoderLayer:
            return DecoderLayer(config, kernels, Attention(config, kernels, config.attention_bias), feed_forward(index))

        super().__init__(config, kernels, [layer(index) for index in range(config.num_layers)])
