"""How the keys, or the values, of one layer lie in a pool's blocks. Kernels are written for one layout."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


class KVLayout(ABC):
    """A block holds `block_size * num_kv_heads * head_dim` elements in one piece, whatever their order, so that moving a block needs no
    layout. A plane is given with its nominal shape `[num_blocks, num_kv_heads, block_size, head_dim]`."""

    @abstractmethod
    def keys(self, plane: Tensor) -> Tensor:
        """A layer's keys as the kernels take them: a view of `plane`."""

    @abstractmethod
    def values(self, plane: Tensor) -> Tensor:
        """A layer's values as the kernels take them: a view of `plane`."""

    @property
    def of_single_planes(self) -> "KVLayout":
        """How a plane lies that is the only one, keys and values in one, of one head."""
        return self

    @abstractmethod
    def positions(self, plane: Tensor, *, is_value: bool) -> Tensor:
        """`plane` by position, `[num_blocks, block_size, num_kv_heads, head_dim]`: a view, or a copy."""

    @abstractmethod
    def clear(self, plane: Tensor, at: tuple[Tensor, Tensor], *, is_value: bool) -> None:
        """Write zeros to positions of `plane`: `at` are their blocks and their offsets in these, int64 `[n]` each."""


class HeadMajor(KVLayout):
    """`[num_blocks, num_kv_heads, block_size, head_dim]`: gathering blocks gives each head its tokens in one piece."""

    def keys(self, plane: Tensor) -> Tensor:
        return plane

    def values(self, plane: Tensor) -> Tensor:
        return plane

    def positions(self, plane: Tensor, *, is_value: bool) -> Tensor:
        return plane.transpose(1, 2)

    def clear(self, plane: Tensor, at: tuple[Tensor, Tensor], *, is_value: bool) -> None:
        plane.transpose(1, 2)[at] = 0


class TokenMajor(KVLayout):
    """`[num_blocks, block_size, num_kv_heads, head_dim]`, which FlashAttention's paged kernels read."""

    def keys(self, plane: Tensor) -> Tensor:
        num_blocks, num_kv_heads, block_size, head_dim = plane.shape
        return plane.view(num_blocks, block_size, num_kv_heads, head_dim)

    def values(self, plane: Tensor) -> Tensor:
        return self.keys(plane)

    def positions(self, plane: Tensor, *, is_value: bool) -> Tensor:
        return self.keys(plane)

    def clear(self, plane: Tensor, at: tuple[Tensor, Tensor], *, is_value: bool) -> None:
        self.keys(plane)[at] = 0


@dataclass(frozen=True, slots=True)
class Shuffled(KVLayout):
    """Of each head of a block `together` bytes at a time, x elements: keys `[num_blocks, num_kv_heads, head_dim / x, block_size, x]`, values
    `[num_blocks, num_kv_heads, block_size / x, head_dim, x]`. Single planes are as `single` has them."""

    together: int
    single: KVLayout

    @property
    def of_single_planes(self) -> KVLayout:
        return self.single

    def keys(self, plane: Tensor) -> Tensor:
        num_blocks, num_kv_heads, block_size, head_dim = plane.shape
        x = self._x(plane)
        return plane.view(num_blocks, num_kv_heads, head_dim // x, block_size, x)

    def values(self, plane: Tensor) -> Tensor:
        num_blocks, num_kv_heads, block_size, head_dim = plane.shape
        x = self._x(plane)
        return plane.view(num_blocks, num_kv_heads, block_size // x, head_dim, x)

    def positions(self, plane: Tensor, *, is_value: bool) -> Tensor:
        if is_value:
            return self.values(plane).permute(0, 2, 4, 1, 3).flatten(1, 2)
        return self.keys(plane).permute(0, 3, 1, 2, 4).flatten(3)

    def clear(self, plane: Tensor, at: tuple[Tensor, Tensor], *, is_value: bool) -> None:
        blocks, offsets = at
        if is_value:
            x = self._x(plane)
            self.values(plane).permute(0, 2, 4, 1, 3)[blocks, offsets // x, offsets % x] = 0
        else:
            self.keys(plane).permute(0, 3, 1, 2, 4)[blocks, offsets] = 0

    def _x(self, plane: Tensor) -> int:
        return self.together // plane.dtype.itemsize


class KeysTransposed(HeadMajor):
    """As `HeadMajor`, with each head's keys `[head_dim, block_size]`: as many positions as a vector has elements are multiplied at once."""

    @property
    def of_single_planes(self) -> KVLayout:
        return HEAD_MAJOR

    def keys(self, plane: Tensor) -> Tensor:
        num_blocks, num_kv_heads, block_size, head_dim = plane.shape
        return plane.view(num_blocks, num_kv_heads, head_dim, block_size)

    def positions(self, plane: Tensor, *, is_value: bool) -> Tensor:
        return super().positions(plane, is_value=True) if is_value else self.keys(plane).permute(0, 3, 1, 2)

    def clear(self, plane: Tensor, at: tuple[Tensor, Tensor], *, is_value: bool) -> None:
        if is_value:
            super().clear(plane, at, is_value=True)
        else:
            self.keys(plane).permute(0, 3, 1, 2)[at] = 0


HEAD_MAJOR = HeadMajor()
KEYS_TRANSPOSED = KeysTransposed()
TOKEN_MAJOR = TokenMajor()
SHUFFLED = Shuffled(16, TOKEN_MAJOR)
"""As AITER's assembly reads them."""
PAIRED = Shuffled(4, HEAD_MAJOR)
"""Of 16-bit numbers two at a time, as a processor multiplies them."""
