"""Llama (arXiv:2302.13971, with grouped query attention), and the many models of its shape."""

from model_worker.kernels.interface import Kernels
from model_worker.layers.attention import Attention
from model_worker.layers.decoder import Decoder, DecoderLayer
from model_worker.layers.mlp import MLP
from model_worker.models.model_config import ModelConfig


class LlamaForCausalLM(Decoder):
    """See `CausalLM` for the contract."""

    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        def layer() -> DecoderLayer:
            mlp = MLP(kernels, config.hidden_size, config.intermediate_size, config.mlp_bias)
            return DecoderLayer(config, kernels, Attention(config, kernels, config.attention_bias), mlp)

        super().__init__(config, kernels, [layer() for _ in range(config.num_layers)])
