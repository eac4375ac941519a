"""The Triton flavour of AITER: runs on every GPU that Triton compiles for. Norms, rotation on the way to the pool, attention, products and experts are
AITER's kernels. What it has no good kernel for is torch on the same device: embeddings, routing, products per head, which positions an index
chooses, and SiLU in AITERs that lack it."""

import torch
from torch import Tensor
from torch.nn import functional

from model_worker.batch import Batch
from model_worker.group import ALONE, Group
from model_worker.kernels.aiter.fp8_weights import quantized_blocks, quantized_rows
from model_worker.kernels.aiter.library import AiterLibrary
from model_worker.kernels.aiter.triton_attention import TritonAttention
from model_worker.kernels.aiter.triton_calls import Scaled, SortedTokens, TritonCalls
from model_worker.kernels.aiter.triton_latent import TritonLatentAttention
from model_worker.kernels.aiter.triton_sparse import TritonSparseAttention
from model_worker.kernels.head_products import batched_per_head
from model_worker.kernels.interface import ClampedExperts, PagedAttention, Product, SparseAttention, WindowedAttention
from model_worker.kernels.quantization import Quantization
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kv_layout import TOKEN_MAJOR
from model_worker.kv_pool import KVPool
from model_worker.placement import Placement
from tessera.values.config import ConfigError

_PAIRS_FEW = 16
"""Tokens per expert up to which blocks of so many are worked on, and above which of four times as many."""


class AiterTritonKernels(TorchKernels):
    """Computes in 16 bits. `quantization`: of linear layers. Raises ConfigError for another dtype, AiterUnavailable for an architecture that
    AITER's kernels are not tuned for."""

    flavour = "aiter-triton"
    kv_layout = TOKEN_MAJOR
    can_be_captured = True

    def __init__(
        self,
        library: AiterLibrary,
        placement: Placement,
        quantization: Quantization = Quantization.NONE,
        group: Group = ALONE,
        peers: Group = ALONE,
    ) -> None:
        super().__init__(group, peers, placement)
        if placement.dtype not in (torch.bfloat16, torch.float16):
            raise ConfigError(f"dtype is {placement.dtype}: aiter computes in bfloat16 or float16")
        library.require_tile_sizes()
        self._calls = TritonCalls(library)
        self._quantization = quantization

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._calls.gemm(x, weight, bias)

    def pack(self, weight: Tensor) -> Product:
        """In 8 bits where it was asked for; else with a row in one piece, as the GPU reads it best."""
        if self._quantization is Quantization.FP8:
            rows = Scaled(*quantized_rows(weight, self._calls.library.fp8))
            return lambda x, bias: self._calls.gemm_fp8(self._calls.quantize(x), rows, bias, x.dtype)
        if self._quantization is Quantization.FP8_BLOCK and weight.shape[1] % 128 == 0:
            blocks = Scaled(*quantized_blocks(weight, self._calls.library.fp8))
            return lambda x, bias: self._add(self._calls.gemm_fp8_block(self._calls.quantize_groups(x), blocks, x.dtype), bias)
        kept = weight.contiguous()
        return lambda x, bias: self._calls.gemm(x, kept, bias)

    @staticmethod
    def _add(x: Tensor, bias: Tensor | None) -> Tensor:
        return x if bias is None else x + bias

    def linear_per_head(self, x: Tensor, weight: Tensor) -> Tensor:
        return batched_per_head(x, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._calls.rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._calls.add_rms_norm(x.contiguous(), residual.contiguous(), weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return self._calls.layer_norm(x.contiguous(), weight, bias, eps)

    def rotary_embedding(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self._calls.rotate(x, cos, sin)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        if self._calls.has_silu_and_mul:
            return self._calls.silu_and_mul(x.contiguous())
        gate, up = x.float().chunk(2, dim=-1)
        return (functional.silu(gate) * up).to(x.dtype)

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        tokens, ids = self._sort(ids, len(gate_up))
        hidden = self.silu_and_mul(self._calls.gemm_experts(x, gate_up, tokens, ids, None).flatten(0, 1))
        return self._calls.gemm_experts(hidden, down, tokens, ids, weights).sum(dim=1)

    def clamped_experts(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ClampedExperts) -> Tensor:
        """The products are AITER's, with biases and the activation between them in torch, in float32."""
        tokens, here = self._sort(ids, len(experts.gate_up))
        place = ids.clamp(0, len(experts.gate_up) - 1)
        weights = torch.where(ids == place, weights, 0.0)
        gate_up = self._calls.gemm_experts(x, experts.gate_up, tokens, here, None) + experts.gate_up_bias[place].float()
        gate = gate_up[..., ::2].clamp(max=experts.limit)
        up = gate_up[..., 1::2].clamp(-experts.limit, experts.limit)
        hidden = (gate * torch.sigmoid(experts.alpha * gate) * (up + 1.0)).to(x.dtype).flatten(0, 1)
        output = self._calls.gemm_experts(hidden, experts.down, tokens, here, None) + experts.down_bias[place].float()
        return (output * weights.unsqueeze(2)).sum(dim=1).to(x.dtype)

    def _sort(self, ids: Tensor, num_experts: int) -> tuple[SortedTokens, Tensor]:
        """The pairs sorted, and the ids int32."""
        ids = ids.int()
        block_size = 16 if ids.numel() <= _PAIRS_FEW * num_experts else 64
        return self._calls.sort_tokens(ids, num_experts, block_size), ids

    def paged_attention(self, batch: Batch, kv: KVPool) -> PagedAttention:
        if kv.num_planes == 1:
            return TritonLatentAttention(self._calls, batch, kv, self.placement)
        return TritonAttention(self._calls, batch, kv, self.placement)

    def windowed_attention(self, batch: Batch, kv: KVPool) -> WindowedAttention:
        return TritonAttention(self._calls, batch, kv, self.placement)

    def sparse_attention(self, batch: Batch, kv: KVPool) -> SparseAttention:
        return TritonSparseAttention(self._calls, batch, kv, self.placement)
