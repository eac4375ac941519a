"""Whose KV each block may still hold, so that nobody gets a block with another tenant's (`secure_zero`)."""

from collections.abc import Sequence

from kv_manager.block_table import BlockTable


class BlockTenants:
    """The namespace of each block's last holder; None where it is not known. Blocks go to another one only zeroed, or overwritten whole."""

    __slots__ = ("_foreign", "_namespaces")

    def __init__(self, num_blocks: int) -> None:
        self._namespaces: list[bytes | None] = [None] * num_blocks
        self._foreign: dict[int, None] = {}

    def hand_over(self, block_ids: Sequence[int], namespace: bytes) -> None:
        """Blocks leave the free list for a table of this namespace."""
        namespaces = self._namespaces
        for block_id in block_ids:
            if namespaces[block_id] != namespace:
                self._foreign[block_id] = None
                namespaces[block_id] = namespace

    def overwritten(self, block_ids: Sequence[int]) -> None:
        """The batch being put together copies other blocks over these, after handing them over. Should they be given back before it
        leaves, nothing is copied: so it is not known whose they are."""
        for block_id in block_ids:
            self._foreign.pop(block_id, None)
            self._namespaces[block_id] = None

    def settle(self, table: BlockTable) -> None:
        """A table that was there before holds its blocks."""
        for block_id in table.block_ids:
            self._namespaces[block_id] = table.namespace

    def take_foreign(self) -> list[int]:
        """The blocks to zero since the last call, in the order of handing over."""
        foreign = list(self._foreign)
        self._foreign.clear()
        return foreign
