"""gpt-oss (arXiv:2508.10925): attention with sinks, in every other layer over a sliding window; experts with biases and a clamp."""

import torch
from torch import Tensor

from model_worker.batch import Batch
from model_worker.kernels.interface import ClampedExperts, Kernels, PagedAttention, WindowedAttention
from model_worker.kv_pool import KVPool
from model_worker.layers.attention import Attention
from model_worker.layers.decoder import Decoder, DecoderLayer
from model_worker.layers.expert_parallel import expert_share, over_peers
from model_worker.layers.router import SoftmaxRouter
from model_worker.layers.share import head_share
from model_worker.layers.weight_slot import WeightSlot
from model_worker.models.model_config import ModelConfig


class GptOssAttention(Attention):
    """Each query head has a sink: a learned score of nothing, which takes its share in the softmax."""

    def __init__(self, config: ModelConfig, kernels: Kernels, window: int | None) -> None:
        super().__init__(config, kernels, config.attention_bias)
        self._sink_share = head_share(config.num_heads, kernels.group)
        self._sinks = torch.empty(self._sink_share.size)
        self._window = window

    def _attend(self, attention: PagedAttention, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert isinstance(attention, WindowedAttention)
        return attention.attend_window(layer, query, self._sinks, self._window)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        return super().slots(prefix) | {f"{prefix}.sinks": self._sink_share.slot(self._sinks)}


class GptOssExperts:
    """The weighted sum of the chosen experts, of which each rank has some. Checkpoints hold all experts of a layer in one tensor, rows being
    inputs."""

    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        experts = config.experts
        assert experts is not None and experts.swiglu is not None
        self._kernels = kernels
        self._router = SoftmaxRouter(kernels, config.hidden_size, experts, name="router", bias=True)
        self._share = expert_share(experts.num_experts, kernels)
        count, size = self._share.size, experts.intermediate_size
        self._experts = ClampedExperts(
            gate_up=torch.empty(count, config.hidden_size, 2 * size).transpose(1, 2),
            gate_up_bias=torch.empty(count, 2 * size),
            down=torch.empty(count, size, config.hidden_size).transpose(1, 2),
            down_bias=torch.empty(count, config.hidden_size),
            alpha=experts.swiglu.alpha,
            limit=experts.swiglu.limit,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """`x` and the result are `[T, hidden_size]`."""
        ids, weights = self._router(x)
        return self._kernels.group.all_reduce(over_peers(self._kernels.peers, x, ids, weights, self._chosen))

    def _chosen(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self._kernels.clamped_experts(x, ids - self._share.start, weights, self._experts)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """Checkpoint name -> where it goes."""
        return self._router.slots(prefix) | {
            f"{prefix}.experts.gate_up_proj": self._share.slot(self._experts.gate_up.transpose(1, 2)),
            f"{prefix}.experts.gate_up_proj_bias": self._share.slot(self._experts.gate_up_bias),
            f"{prefix}.experts.down_proj": self._share.slot(self._experts.down.transpose(1, 2)),
            f"{prefix}.experts.down_proj_bias": self._share.slot(self._experts.down_bias),
        }


class GptOssForCausalLM(Decoder):
    """See `CausalLM` for the contract. `config.experts` and `config.sliding_windows` are set."""

    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        def layer(window: int | None) -> DecoderLayer:
            attention = GptOssAttention(config, kernels, window)
            return DecoderLayer(config, kernels, attention, GptOssExperts(config, kernels))

        assert len(config.sliding_windows) == config.num_layers
        super().__init__(config, kernels, [layer(window) for window in config.sliding_windows])

    def paged_attention(self, batch: Batch, kv: KVPool) -> PagedAttention:
        return self._kernels.windowed_attention(batch, kv)
