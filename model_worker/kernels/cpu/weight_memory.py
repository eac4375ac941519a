"""Memory for packed weights, cut from large pieces in the order in which a pass reads them."""

import contextlib
import mmap

import torch
from torch import Tensor

PIECE_BYTES = 64 << 20
CACHE_LINE = 64


class WeightMemory:
    """Weights of some MiB each would lie in huge pages only in part; reading the rest costs walks through page tables, and the processor's
    reading ahead ends every 4 KiB. A piece is given back once nothing in it is used; what nobody has written is not resident."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)  # of the present piece
        self._before = self._rest  # the last one was taken

    def take(self, size: int) -> Tensor:
        """uint8 `[size]`, from the start of a cache line."""
        whole = -(-size // CACHE_LINE) * CACHE_LINE
        if whole > len(self._rest):
            self._rest = _piece(max(whole, PIECE_BYTES))
        self._before = self._rest
        taken, self._rest = self._rest[:size], self._rest[whole:]
        return taken

    def give_back(self, taken: Tensor) -> None:
        """What was taken last."""
        assert taken.data_ptr() == self._before.data_ptr(), "something else was taken since"
        self._rest = self._before


def _piece(size: int) -> Tensor:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has no huge pages
    with contextlib.suppress(OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
