"""The reference backend: plain torch, float32 on a CPU."""

import torch
from torch import Tensor
from torch.nn import functional

from model_worker.batch import Batch
from model_worker.kernels.interface import Kernels, PagedAttention
from model_worker.kernels.torch_attention import TorchPagedAttention
from model_worker.kv_pool import KVPool


class TorchKernels(Kernels):
    """Stateless; see the interface for shapes."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias)

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        return weight.index_select(0, ids)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, eps)

    def rotary_embedding(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def paged_attention(self, batch: Batch, kv: KVPool) -> PagedAttention:
        return TorchPagedAttention(batch, kv)
