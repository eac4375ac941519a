"""Mixtral (arXiv:2401.04088): Llama with experts in place of every dense layer."""

from model_worker.kernels.interface import Kernels
from model_worker.layers.attention import Attention
from model_worker.layers.decoder import Decoder, DecoderLayer
from model_worker.layers.experts import Experts
from model_worker.layers.router import SoftmaxRouter
from model_worker.models.model_config import ModelConfig

EXPERT_NAMES = ("w1", "w3", "w2")
"""Gate, up and down in its checkpoints."""


class MixtralForCausalLM(Decoder):
    """See `CausalLM` for the contract. `config.experts` is set."""

    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        experts = config.experts
        assert experts is not None

        def layer() -> DecoderLayer:
            router = SoftmaxRouter(kernels, config.hidden_size, experts)
            mlp = Experts(kernels, config.hidden_size, experts, router, EXPERT_NAMES)
            return DecoderLayer(config, kernels, Attention(config, kernels, output_bias=False), mlp, "block_sparse_moe")

        super().__init__(config, kernels, [layer() for _ in range(config.num_layers)])
