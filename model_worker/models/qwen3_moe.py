"""Qwen3 with experts in place of most dense layers (arXiv:2505.09388)."""

from model_worker.kernels.interface import Kernels
from model_worker.layers.attention import Attention
from model_worker.layers.decoder import Decoder, DecoderLayer
from model_worker.layers.experts import dense_or_experts
from model_worker.layers.router import SoftmaxRouter
from model_worker.models.model_config import ModelConfig


class Qwen3MoeForCausalLM(Decoder):
    """See `CausalLM` for the contract. `config.qk_norm` and `config.experts` are set."""

    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        def layer(index: int) -> DecoderLayer:
            mlp = dense_or_experts(index, config, kernels, SoftmaxRouter)
            return DecoderLayer(config, kernels, Attention(config, kernels, config.attention_bias), mlp)

        super().__init__(config, kernels, [layer(index) for index in range(config.num_layers)])
