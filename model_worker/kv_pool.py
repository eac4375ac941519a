"""The paged KV cache: one tensor for all layers, cut into blocks that block tables name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from model_worker.kv_layout import HEAD_MAJOR, KVLayout
from model_worker.kv_shape import KVShape
from model_worker.placement import ON_CPU
from model_worker.resident_pages import make_resident
from tessera.values.config import ConfigError
from tessera.values.model import KVGeometry

_DTYPES = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e4m3fnuz: "f8e4m3fnuz",
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes: not every operation knows 8-bit floats


class KVPoolTooSmall(ConfigError):
    """The memory for a pool does not hold a single block; the message says how many bytes one block needs."""


@dataclass(frozen=True, slots=True)
class KVStore:
    """How a pool keeps numbers. Of 8-bit floats each stands for itself times its layer's scale (`KVPool.scales`)."""

    dtype: torch.dtype = torch.float32
    flavour: str = (
        "torch"  # whose kernels write and read it; part of `KVGeometry.kv_format`, and so of what a prefix is found by
    )
    layout: KVLayout = HEAD_MAJOR  # that of the flavour
    device: torch.device = ON_CPU.device


IN_FLOAT32 = KVStore()
"""What the torch kernels read on a CPU."""


class KVPool:
    """Keys and values of every layer on one device; owned by one worker, written in place by the attention kernels.

    What a layer's keys (and values) look like is the layout's: `[num_blocks + 1, num_kv_heads, block_size, head_dim]` for the torch kernels.
    With one plane (see `KVShape`) keys and values are the same view.

    A pool may be paired with that of whoever drafts: the same block ids, another shape. Then a block is copied, cleared and counted in both.

    The last block (`null_block`) belongs to no table and is zero: padded reads go there. Only a dummy run writes it, and clears it.
    Memory is zero; on a CPU it is reserved, not resident, until a block is first written (huge pages: 2 MiB steps).
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        store: KVStore = IN_FLOAT32,
        num_planes: int = 2,
    ) -> None:
        assert min(num_layers, num_blocks, block_size, num_kv_heads, head_dim) >= 1 and num_planes in (1, 2)
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.num_planes = num_planes
        self.store = store
        self._layout = store.layout.of_single_planes if num_planes == 1 else store.layout
        shape = (num_layers, num_planes, num_blocks + 1, num_kv_heads, block_size, head_dim)
        self._data = _zeros(shape, store)
        self.scales = torch.ones(num_layers, 2, dtype=torch.float32, device=store.device)
        """Of each layer's keys and values, float32 `[num_layers, 2]`; ones unless the dtype has 8 bits and the weights say otherwise."""
        self.paired: KVPool | None = None

    def make_resident(self) -> bool:
        """Of a pool in host memory, see there; of the paired one too. May run beside everything else."""
        pools = (pool for pool in (self, self.paired) if pool is not None)
        return all(pool.store.device.type != "cpu" or make_resident(pool._data) for pool in pools)

    @classmethod
    def of_shape(
        cls,
        shape: KVShape,
        num_blocks: int,
        block_size: int,
        store: KVStore = IN_FLOAT32,
        paired: KVShape | None = None,
    ) -> Self:
        """The pool of a model that keeps `shape` of a position; `paired` with that of whoever drafts, if that keeps anything."""
        pool = cls(shape.num_layers, num_blocks, block_size, shape.num_kv_heads, shape.head_dim, store, shape.num_planes)
        if paired is not None:
            pool.paired = cls.of_shape(paired, num_blocks, block_size, store)
        return pool

    @property
    def dtype(self) -> torch.dtype:
        """Of what is stored."""
        return self.store.dtype

    @property
    def null_block(self) -> int:
        """Id of the block that padded reads go to."""
        return self.num_blocks

    @property
    def bytes_per_token(self) -> int:
        """Bytes one position takes over all layers, keys and values, here and in the paired pool."""
        own = KVShape(self.num_layers, self.num_kv_heads, self.head_dim, self.num_planes).bytes_per_token(self.dtype)
        return own + (self.paired.bytes_per_token if self.paired is not None else 0)

    @property
    def geometry(self) -> KVGeometry:
        """The pool as the scheduler needs to know it."""
        return KVGeometry(self.num_blocks, self.block_size, self.bytes_per_token, self.kv_format)

    @property
    def kv_format(self) -> str:
        """Layout and dtype, and what is kept beside."""
        own = f"{self.store.flavour}/{_DTYPES[self.dtype]}" + ("/latent" if self.num_planes == 1 else "")
        if self.paired is None:
            return own
        drafts = self.paired
        return f"{own}+drafts:{drafts.kv_format}/{drafts.num_layers}x{drafts.num_kv_heads}x{drafts.head_dim}"

    def keys(self, layer: int) -> Tensor:
        """The keys of one layer as its kernels take them, a view."""
        return self._layout.keys(self._data[layer, 0])

    def values(self, layer: int) -> Tensor:
        """The values of one layer as its kernels take them, a view. With one plane these are the keys."""
        if self.num_planes == 1:
            return self.keys(layer)
        return self._layout.values(self._data[layer, 1])

    def raw_block(self, block_id: int) -> Tensor:
        """One block as it lies, a view of the nominal shape `[num_layers, num_planes, num_kv_heads, block_size, head_dim]`."""
        return self._data[:, :, block_id]

    def block(self, block_id: int) -> np.ndarray:
        """A copy of one block, see `read_block`."""
        return self.read_block(self.raw_block(block_id))

    def read_block(self, raw: Tensor) -> np.ndarray:
        """A copy of a block of this pool, or of its host pool, as float32 `[num_layers, num_planes, block_size, num_kv_heads, head_dim]` on the
        host; see `raw_block`."""
        planes = [self._layout.positions(raw[:, plane], is_value=plane == 1) for plane in range(self.num_planes)]
        block = torch.stack(planes, dim=1).to("cpu", torch.float32)
        if self.dtype.itemsize == 1:
            block *= self.scales.cpu()[:, : self.num_planes, None, None, None]
        copied: np.ndarray = block.contiguous().numpy()
        return copied

    def copy_blocks(self, pairs: np.ndarray) -> None:
        """Copy whole blocks: `pairs` int32 `[C, 2]` (source, target), no target a source."""
        for source, target in pairs.tolist():
            self.raw_block(target).copy_(self.raw_block(source))
        if self.paired is not None:
            self.paired.copy_blocks(pairs)

    def zero_blocks(self, block_ids: np.ndarray) -> None:
        """Clear whole blocks, int32 `[Z]`."""
        bits = self._data.view(_BITS[self.dtype.itemsize])
        bits.index_fill_(2, torch.from_numpy(block_ids.astype(np.int64)).to(self.store.device), 0)
        if self.paired is not None:
            self.paired.zero_blocks(block_ids)

    def zero_positions(self, slots: np.ndarray) -> None:
        """Clear single positions in all layers, int64 `[n]`: block_id * block_size + offset."""
        at = tuple(torch.from_numpy(part).to(self.store.device) for part in np.divmod(slots, self.block_size))
        bits = self._data.view(_BITS[self.dtype.itemsize])
        for layer in range(self.num_layers):
            for plane in range(self.num_planes):
                self._layout.clear(bits[layer, plane], (at[0], at[1]), is_value=plane == 1)
        if self.paired is not None:
            self.paired.zero_positions(slots)

    def clear_null_block(self) -> None:
        """The same of the null block, without the host's taking part, so that it may be a piece of what is recorded."""
        self.raw_block(self.null_block).view(_BITS[self.dtype.itemsize]).zero_()


def reserved_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in host memory that is not resident until it is written: numpy takes zeroed pages from the system untouched, torch.zeros
    would write them all. Raises ConfigError where it has no room for them."""
    count = int(np.prod(shape, dtype=np.int64))
    size = max(1, count) * dtype.itemsize
    try:
        raw = np.zeros(size, dtype=np.uint8)
    except MemoryError as error:
        raise ConfigError(f"the system has no {size} bytes for KV: lower kv_cache_bytes or swap_bytes") from error
    return torch.from_numpy(raw).view(dtype)[:count].view(*shape)


def _zeros(shape: Sequence[int], store: KVStore) -> Tensor:
    if store.device.type == "cpu":
        return reserved_zeros(shape, store.dtype)
    return torch.zeros(shape, dtype=_BITS[store.dtype.itemsize], device=store.device).view(store.dtype)


def num_blocks_for(pool_bytes: int, block_size: int, bytes_per_token: int, option: str = "kv_cache_bytes") -> int:
    """Blocks that fit in `pool_bytes`, which `option` gave. Raises KVPoolTooSmall when not even one does."""
    block_bytes = block_size * bytes_per_token
    num_blocks = pool_bytes // block_bytes
    if num_blocks < 1:
        raise KVPoolTooSmall(f"{option} is {pool_bytes}, but one block of {block_size} tokens needs {block_bytes} bytes")
    return num_blocks
