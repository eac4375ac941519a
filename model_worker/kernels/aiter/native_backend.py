"""The native flavour of AITER: its kernels in CK, in assembly and in HIP, for the GPUs and the models that `probe` names. What these do not compute
is torch on the same device: embeddings, products per head, and products of routers, whose weights stay as they were loaded."""

import torch
from torch import Tensor
from torch.nn import functional

from model_worker.batch import Batch
from model_worker.group import ALONE, Group
from model_worker.kernels.aiter.fp8_weights import quantized_blocks, quantized_rows
from model_worker.kernels.aiter.library import AiterLibrary, AiterUnavailable
from model_worker.kernels.aiter.native_attention import NativeAttention
from model_worker.kernels.aiter.native_calls import NativeCalls
from model_worker.kernels.aiter.native_latent import NativeLatentAttention
from model_worker.kernels.best_tokens import BestTokens
from model_worker.kernels.head_products import batched_per_head
from model_worker.kernels.interface import ExpertsSum, PagedAttention, Product, SparseAttention, WindowedAttention
from model_worker.kernels.quantization import Quantization
from model_worker.kernels.routing import biased_grouped_topk
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kv_layout import SHUFFLED, KVLayout
from model_worker.kv_pool import KVPool
from model_worker.models.experts_config import ExpertsConfig
from model_worker.placement import Placement
from tessera.values.config import ConfigError

_GROUPS = (1, 2, 4, 8)
"""Numbers of groups of experts that AITER's routing knows."""

_COLUMNS_MIN = 192
"""Of a weight in 8 bits with a scale per row: AITER has no kernel for fewer."""

_VECTOR = 4
"""Logits that AITER's sampling reads at once: behind the last row of a vocabulary that these do not divide it sees zeros, and may choose one."""


class AiterNativeKernels(TorchKernels):
    """Computes in bfloat16. `quantization`: of linear layers. Raises ConfigError for another dtype."""

    flavour = "aiter-native"
    kv_layout: KVLayout = SHUFFLED
    can_be_captured = True
    captured_tokens_max = 1 << 24
    """Latent attention lists the slots of so many positions, which takes 64 MiB, and four times as much while it is made."""

    def __init__(
        self,
        library: AiterLibrary,
        placement: Placement,
        quantization: Quantization = Quantization.NONE,
        group: Group = ALONE,
        peers: Group = ALONE,
    ) -> None:
        super().__init__(group, peers, placement)
        if placement.dtype != torch.bfloat16:
            raise ConfigError(f"dtype is {placement.dtype}: kernels aiter-native compute in bfloat16")
        self._calls = NativeCalls(library)
        self._fp8 = library.fp8
        self._quantization = quantization
        self._unit_scales: dict[tuple[int, int, int], Tensor] = {}

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._calls.mm(x, weight, bias) if weight.is_contiguous() else functional.linear(x, weight, bias)

    def pack(self, weight: Tensor) -> Product:
        """In 8 bits where it was asked for and the kernels take the size; else with a row in one piece, as they read it."""
        rows, columns = weight.shape
        if self._quantization is Quantization.FP8 and rows % 16 == 0 and columns % 64 == 0 and columns >= _COLUMNS_MIN:
            return self._by_rows(weight)
        if self._quantization is Quantization.FP8_BLOCK and rows % 128 == 0 and columns % 128 == 0:
            return self._by_blocks(weight)
        kept = weight.contiguous()
        return lambda x, bias: self._calls.mm(x, kept, bias)

    def _by_rows(self, weight: Tensor) -> Product:
        values, scales = quantized_rows(weight, self._fp8)
        shuffled, scales = self._calls.shuffle_weight(values), scales.unsqueeze(1)

        def product(x: Tensor, bias: Tensor | None) -> Tensor:
            quantized, scale = self._calls.per_token_quant(x.contiguous())
            return _plus(self._calls.gemm_a8w8_bpreshuffle(quantized, shuffled, scale, scales), bias)

        return product

    def _by_blocks(self, weight: Tensor) -> Product:
        values, scales = quantized_blocks(weight, self._fp8)

        def product(x: Tensor, bias: Tensor | None) -> Tensor:
            quantized, scale = self._calls.per_group_quant(x.contiguous())
            return _plus(self._calls.gemm_a8w8_blockscale(quantized, values, scale, scales), bias)

        return product

    def linear_per_head(self, x: Tensor, weight: Tensor) -> Tensor:
        return batched_per_head(x, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._calls.rmsnorm2d_fwd(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._calls.rmsnorm2d_fwd_with_add(x.contiguous(), residual.contiguous(), weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return self._calls.layernorm2d_fwd(x.contiguous(), weight, bias, eps)

    def rotary_embedding(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated = x.clone(memory_format=torch.contiguous_format)
        self._calls.rope_cached_positions_fwd_inplace(rotated, cos, sin, torch.arange(len(x), device=x.device))
        return rotated

    def silu_and_mul(self, x: Tensor) -> Tensor:
        return self._calls.silu_and_mul(x.contiguous())

    def topk_softmax(self, logits: Tensor, num_chosen: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        ids, weights = self._calls.topk_softmax(logits.float().contiguous(), num_chosen, renormalize)
        return ids.long(), weights

    def biased_grouped_topk(self, logits: Tensor, bias: Tensor, experts: ExpertsConfig) -> tuple[Tensor, Tensor]:
        if experts.num_groups not in _GROUPS:
            return biased_grouped_topk(logits, bias, experts)
        groups = experts.num_groups, experts.num_groups_chosen
        logits = logits.float().contiguous()
        ids, weights = self._calls.biased_grouped_topk(
            logits, bias.float(), experts.num_chosen, groups, experts.renormalize, experts.scale
        )
        return ids.long(), weights

    def pack_experts(self, gate_up: Tensor, down: Tensor) -> ExpertsSum:
        """Shuffled as the kernels read them."""
        weights = self._calls.shuffle_weight(gate_up.contiguous()), self._calls.shuffle_weight(down.contiguous())
        count = len(gate_up)
        is_here = torch.arange(count + 1, device=gate_up.device).lt(count).int()
        are_spread = self.group.size * self.peers.size > 1

        def total(x: Tensor, ids: Tensor, factors: Tensor) -> Tensor:
            # Experts of other ranks go by one more id, which the mask takes out.
            ids = torch.where((ids >= 0) & (ids < count), ids, count) if are_spread else ids
            mask = is_here if are_spread else None
            return self._calls.fused_moe(x.contiguous(), weights, ids.int(), factors.float(), mask)

        return total

    def best_tokens(self, logits: Tensor) -> BestTokens:
        if logits.shape[1] % _VECTOR:
            return super().best_tokens(logits)
        noise = torch.ones(1, logits.shape[1], device=logits.device, dtype=torch.float32).expand(logits.shape)
        temperatures = torch.zeros(len(logits), device=logits.device, dtype=torch.float32)
        return BestTokens.of(logits, self._calls.mixed_sample_outer_exponential(logits, noise, temperatures))

    def paged_attention(self, batch: Batch, kv: KVPool) -> PagedAttention:
        if kv.num_planes == 1:
            return NativeLatentAttention(self._calls, batch, kv, self.placement)
        return NativeAttention(self._calls, batch, kv, self.placement, self._units(kv))

    def _units(self, kv: KVPool) -> Tensor | None:
        """Ones for every position of a pool of 8-bit floats, made once."""
        if kv.dtype.itemsize != 1:
            return None
        shape = kv.num_blocks + 1, kv.num_kv_heads, kv.block_size
        if shape not in self._unit_scales:
            self._unit_scales[shape] = torch.ones(shape, dtype=torch.float32, device=self.placement.device)
        return self._unit_scales[shape]

    def windowed_attention(self, batch: Batch, kv: KVPool) -> WindowedAttention:
        raise AiterUnavailable("AITER's compiled kernels have no attention with sinks and windows: choose kernels aiter-triton")

    def sparse_attention(self, batch: Batch, kv: KVPool) -> SparseAttention:
        raise AiterUnavailable(
            "AITER's compiled kernels have no attention over chosen positions here: choose kernels aiter-triton"
        )


def _plus(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias
