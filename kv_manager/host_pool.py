"""Host blocks: where the KV of swapped-out sequences lies. Which of them are free."""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_manager.free_list import FreeList


@dataclass(frozen=True, slots=True)
class HostPoolExhausted:
    """A swap-out that changed nothing: it takes `needed` host blocks, of which `free` are free."""

    needed: int
    free: int


class HostPool:
    """Host blocks 0 to `num_blocks - 1`; none is ever shared or cached, each is in one table or free.

    A batch executes its swap outs before its swap ins. So a block that a swap in of this batch still reads must not be the target of
    a swap out of the same batch: `release_read` keeps it apart until the batch is sealed.
    """

    __slots__ = ("_free", "_read", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = FreeList(num_blocks)
        self._read: list[int] = []

    @property
    def num_free(self) -> int:
        """Blocks that a swap out can take now."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Hand out `count` free blocks, lowest id first; there must be that many."""
        return self._free.take(count)

    def release(self, block_ids: Sequence[int]) -> None:
        """Take back blocks whose content nobody will read."""
        for block_id in block_ids:
            self._free.release_plain(block_id)

    def release_read(self, block_ids: Sequence[int]) -> None:
        """Take back blocks that the next batch still reads."""
        self._read += block_ids

    def seal(self) -> None:
        """The batch that reads blocks taken back is complete: they are free for the ones after it."""
        self.release(self._read)
        self._read.clear()

    def refill(self, held: set[int]) -> None:
        """All blocks but the `held` ones are free."""
        self._read.clear()
        self._free.refill([block_id for block_id in range(self.num_blocks) if block_id not in held], [])

    def check_integrity(self, held: Sequence[int]) -> None:
        """Assert that `held`, the blocks of all tables, and the free ones are the whole pool, each once."""
        every = sorted([*held, *self._free, *self._read])
        assert every == list(range(self.num_blocks)), f"host blocks are lost, or held twice: {every}"
