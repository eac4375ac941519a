"""The fast backend on a CPU: kernels of our own where they matter, torch for the rest.

Weights of linear layers are packed once they are read, in float32, bfloat16, float16 or 8 bits; sums are always in float32. Everything that is computed by
these kernels has the same bits whatever shares its batch, and however its context was computed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from model_worker.batch import Batch
from model_worker.group import ALONE, Group
from model_worker.kernels.cpu.attention import CpuAttention
from model_worker.kernels.cpu.layer_stack import CpuLayerStack, are_packed
from model_worker.kernels.cpu.library import CpuLibrary, address
from model_worker.kernels.cpu.packed_weight import PackedWeight
from model_worker.kernels.interface import ExpertsSum, LayerStack, PagedAttention, PlainLayer, Product
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kv_layout import KEYS_TRANSPOSED, PAIRED
from model_worker.kv_pool import KVPool, KVStore
from model_worker.models.model_config import ModelConfig

HEAD_DIM_MAX = 512
"""As in `source/attention.hpp`."""


def has_plain_attention(shape: ModelConfig) -> bool:
    """Whether these kernels do the attention of such a model, over a pool with blocks of whole vectors."""
    return shape.latent is None and not shape.sliding_windows and shape.head_dim <= HEAD_DIM_MAX and shape.head_dim % 2 == 0


def can_read_cache(shape: ModelConfig, block_size: int) -> bool:
    """Whether they do so over blocks of this size."""
    return has_plain_attention(shape) and block_size % 16 == 0


def is_all_ours(shape: ModelConfig, block_size: int) -> bool:
    """Whether every product of such a model, and its attention, go through these kernels, so that a token's logits are the same bits in any batch. Of a
    model with experts the router's product is torch's."""
    return can_read_cache(shape, block_size) and shape.experts is None


def _cached_as(dtype: torch.dtype, library: CpuLibrary) -> torch.dtype:
    """What the KV cache holds beside weights of `dtype`."""
    if dtype == torch.bfloat16 and not library.multiplies_bfloat16:
        return torch.float16
    return dtype


class CpuKernels(TorchKernels):
    """`dtype`: of packed weights, and of the KV cache, which is in float16 where the processor does not multiply bfloat16. `in_8_bits`: weights are
    quantized (see `PackedWeight`). `reads_cache`: whether attention is by these kernels (see `can_read_cache`); otherwise it is torch's, and so is
    the cache."""

    def __init__(
        self,
        library: CpuLibrary,
        dtype: torch.dtype,
        group: Group = ALONE,
        peers: Group = ALONE,
        *,
        in_8_bits: bool = False,
        reads_cache: bool = True,
    ) -> None:
        super().__init__(group, peers)
        self._library = library
        self.weights_dtype = torch.int8 if in_8_bits else dtype
        self._kv_dtype = _cached_as(dtype, library)
        self._reads_cache = reads_cache
        if reads_cache:
            self.flavour, self.kv_layout = "cpu", PAIRED if self._kv_dtype == torch.bfloat16 else KEYS_TRANSPOSED

    def kv_store(self, dtype: torch.dtype | None = None) -> KVStore:
        return super().kv_store(dtype or (self._kv_dtype if self._reads_cache else None))

    def can_share_cache(self, shape: ModelConfig) -> bool:
        return not self._reads_cache or has_plain_attention(shape)

    def pack(self, weight: Tensor) -> Product | None:
        return self.pack_table(weight)

    def pack_table(self, weight: Tensor) -> PackedWeight:
        return PackedWeight(self._library, weight, self.weights_dtype)

    def stack_layers(self, layers: Sequence[PlainLayer]) -> LayerStack | None:
        return CpuLayerStack(self._library, layers) if self._reads_cache and are_packed(layers) else None

    def pack_experts(self, gate_up: Tensor, down: Tensor) -> ExpertsSum | None:
        products = [[self.pack_table(each) for each in stack] for stack in (gate_up, down)]

        def expert(index: int, x: Tensor) -> Tensor:
            return products[1][index](self.silu_and_mul(products[0][index](x, None)), None)

        return lambda x, ids, weights: self._weighted_sum(x, ids, weights, len(gate_up), expert)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, result = x.contiguous(), torch.empty(x.shape)
        size = x.shape[-1]
        self._library.rms_norm(address(x), None, None, address(weight), eps, address(result), x.numel() // size, size)
        return result

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        rows, size = x.shape
        total, result = torch.empty(rows, size), torch.empty(rows, size)
        self._library.rms_norm(address(x), address(residual), address(total), address(weight), eps, address(result), rows, size)
        return result, total

    def silu_and_mul(self, x: Tensor) -> Tensor:
        x, rows, n = x.contiguous(), x.shape[0], x.shape[1] // 2
        result = torch.empty(rows, n)
        self._library.silu_and_mul(address(x), address(result), rows, n)
        return result

    def paged_attention(self, batch: Batch, kv: KVPool) -> PagedAttention:
        return CpuAttention(self._library, batch, kv) if self._reads_cache else super().paged_attention(batch, kv)
