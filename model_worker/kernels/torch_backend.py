"""The reference backend: plain torch, on any device; exact where it computes in float32."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from model_worker.batch import Batch
from model_worker.kernels.interface import ClampedExperts, Kernels, PagedAttention, SparseAttention, WindowedAttention
from model_worker.kernels.routing import biased_grouped_topk, topk_softmax
from model_worker.kernels.sparse_attention import TorchSparseAttention
from model_worker.kernels.torch_attention import TorchPagedAttention
from model_worker.kernels.windowed_attention import TorchWindowedAttention
from model_worker.kv_layout import HEAD_MAJOR, KVLayout
from model_worker.kv_pool import KVPool
from model_worker.models.experts_config import ExpertsConfig


class TorchKernels(Kernels):
    """Stateless; see the interface for shapes."""

    flavour = "torch"
    kv_layout: KVLayout = HEAD_MAJOR

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias)

    def linear_per_head(self, x: Tensor, weight: Tensor) -> Tensor:
        heads = x.transpose(0, 1).contiguous()
        return torch.stack([self.linear(heads[index], weight[index], None) for index in range(len(weight))], dim=1)

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        return weight.index_select(0, ids)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return functional.layer_norm(x, weight.shape, weight, bias, eps)

    def rotary_embedding(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def topk_softmax(self, logits: Tensor, num_chosen: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        return topk_softmax(logits, num_chosen, renormalize)

    def biased_grouped_topk(self, logits: Tensor, bias: Tensor, experts: ExpertsConfig) -> tuple[Tensor, Tensor]:
        return biased_grouped_topk(logits, bias, experts)

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        def expert(index: int, x: Tensor) -> Tensor:
            return self.linear(self.silu_and_mul(self.linear(x, gate_up[index], None)), down[index], None)

        return self._weighted_sum(x, ids, weights, len(gate_up), expert)

    def clamped_experts(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ClampedExperts) -> Tensor:
        def expert(index: int, x: Tensor) -> Tensor:
            gate_up = self.linear(x, experts.gate_up[index], experts.gate_up_bias[index])
            gate = gate_up[:, ::2].clamp(max=experts.limit)
            up = gate_up[:, 1::2].clamp(-experts.limit, experts.limit)
            hidden = gate * torch.sigmoid(experts.alpha * gate) * (up + 1.0)
            return self.linear(hidden, experts.down[index], experts.down_bias[index])

        return self._weighted_sum(x, ids, weights, len(experts.gate_up), expert)

    def paged_attention(self, batch: Batch, kv: KVPool) -> PagedAttention:
        return TorchPagedAttention(batch, kv)

    def windowed_attention(self, batch: Batch, kv: KVPool) -> WindowedAttention:
        return TorchWindowedAttention(batch, kv)

    def sparse_attention(self, batch: Batch, kv: KVPool) -> SparseAttention:
        return TorchSparseAttention(batch, kv)

    def _weighted_sum(
        self, x: Tensor, ids: Tensor, weights: Tensor, num_experts: int, expert: Callable[[int, Tensor], Tensor]
    ) -> Tensor:
        """The sum of `expert(ids[t, k], x[t]) * weights[t, k]` over those k whose id is in `[0, num_experts)`."""
        output = torch.zeros_like(x)
        # Expert by expert in ascending order, so the order of a token's sum does not depend on the tokens beside it.
        for index in torch.unique(ids[(ids >= 0) & (ids < num_experts)]).tolist():
            tokens, places = (ids == index).nonzero(as_tuple=True)
            part = expert(index, x.index_select(0, tokens)) * weights[tokens, places].unsqueeze(1)
            output.index_add_(0, tokens, part.to(x.dtype))
        return output
