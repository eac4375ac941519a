"""Which published blocks continue which prefix: the port, and the index by hash chain that serves it."""

from array import array
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kv_manager.block import Blocks

BULK_BLOCKS = 16
"""From so many blocks on, two at the least, it pays to look at them together."""

_NONE = -1
"""No block, in a column of block ids."""


class PrefixIndex(Protocol):
    """Published blocks by the whole prefix they stand for.

    An implementation writes the pool's content columns (`is_published`, `digests`, `links`, `steps`, `token_ids`). Two rules make a hit
    exact even where digests collide: all blocks under one digest have the same parent and token ids, and a block is published only
    while its parent is. The second rule rests on the caller, who never removes the last block of a prefix before those that
    continue it: tables are freed tail first, and the least recently released block is handed out first.
    """

    def longest_match(self, digests: Sequence[int], token_ids: npt.NDArray[np.int32], root: int | None = None) -> list[int]:
        """Block ids of the longest published prefix, one per block; compares content, not only digests.

        `digests` are the chain over `token_ids` int32 `[blocks, block_size]` from the first block on of a sequence of the namespace
        with this root.
        """

    def likely_match_len(self, digests: Sequence[int]) -> int:
        """How many blocks `longest_match` would find unless digests collide: cheap, for comparing pools."""

    def insert(
        self, parent: int | None, block_ids: list[int], digests: Sequence[int], token_ids: npt.NDArray[np.int32], step: int
    ) -> int:
        """Publish one or more consecutive full blocks, int32 `[blocks, block_size]`, as completed in worker step `step`.

        They continue `parent`, which is published; the root of a namespace (negative, or None) starts a sequence. Several blocks may hold
        the same content. Returns how many are published now: it stops at the first whose digest stands for other content. Blocks
        published before stay as they are.
        """

    def insert_next(
        self, parents: list[int], block_ids: list[int], digests: list[int], token_ids: npt.NDArray[np.int32], step: int
    ) -> int:
        """Publish a full block behind each of these published ones, `parents` being their digests. Returns how many are published now: it
        stops at the first that is not new in every respect, which is for `insert`."""

    def remove(self, block_id: int) -> None:
        """Forget a published block."""

    def check_integrity(self) -> None:
        """Assert that entries and columns agree."""


class HashPrefixIndex:
    """`PrefixIndex` as a hash table from chain digest to blocks, in columns.

    `_heads` has, for the low bits of a digest, the first block of a chain, -1 for none; `_following` for each block the next of its chain.
    Blocks under one digest follow each other, the first published first. A dictionary would take seven times the memory.
    """

    __slots__ = ("_blocks", "_following", "_following_view", "_heads", "_heads_view", "_mask")

    def __init__(self, blocks: Blocks) -> None:
        size = 1 << (blocks.num_blocks - 1).bit_length()
        self._blocks = blocks
        self._mask = size - 1
        self._heads = array("i", [_NONE]) * size
        self._following = array("i", [_NONE]) * blocks.num_blocks
        self._heads_view = np.frombuffer(self._heads, np.int32)
        self._following_view = np.frombuffer(self._following, np.int32)

    def longest_match(self, digests: Sequence[int], token_ids: npt.NDArray[np.int32], root: int | None = None) -> list[int]:
        """See `PrefixIndex`."""
        links, steps, held_digests = self._blocks.links, self._blocks.steps, self._blocks.digests
        heads, following, mask = self._heads, self._following, self._mask
        block_ids: list[int] = []
        link, has_parent = link_of(root)
        for digest in digests:
            block_id = heads[digest & mask]  # as `_find`: the call would cost as much as the look-up
            while block_id >= 0 and held_digests[block_id] != digest:
                block_id = following[block_id]
            if block_id < 0 or links[block_id] != link or steps[block_id] & 1 != has_parent:
                break
            block_ids.append(block_id)
            link, has_parent = digest, 1
        if not block_ids:
            return block_ids
        # One comparison for all hits: per block it would cost more than the look-up.
        held = self._blocks.token_ids.take(block_ids, axis=0)
        wanted = token_ids[: len(block_ids)]
        if held.tobytes() == wanted.tobytes():
            return block_ids
        return block_ids[: int((held != wanted).any(axis=1).argmax())]

    def likely_match_len(self, digests: Sequence[int]) -> int:
        """See `PrefixIndex`."""
        return next((index for index, digest in enumerate(digests) if self._find(digest) < 0), len(digests))

    def insert(
        self, parent: int | None, block_ids: list[int], digests: Sequence[int], token_ids: npt.NDArray[np.int32], step: int
    ) -> int:
        """See `PrefixIndex`."""
        blocks = self._blocks
        if len(block_ids) >= BULK_BLOCKS:
            index, column = np.array(block_ids, np.int64), np.array(digests, np.uint64)
            blocks.token_ids[index] = token_ids
            link, has_parent = link_of(parent)
            before, numbers = np.empty_like(column), np.full(len(index), 2 * step + 1)
            before[0], before[1:], numbers[0] = link, column[:-1], 2 * step + has_parent
            if self._insert_new(index, column, before, numbers):
                return len(block_ids)
        else:  # one alone (a decode that fills its block) is cheaper by its number than through a list
            blocks.token_ids[block_ids if len(block_ids) > 1 else block_ids[0]] = token_ids
        is_published, held_digests, links, steps = blocks.is_published, blocks.digests, blocks.links, blocks.steps
        link, has_parent = link_of(parent)
        for count, (block_id, digest) in enumerate(zip(block_ids, digests, strict=True)):
            if is_published[block_id]:
                assert held_digests[block_id] == digest, f"block {block_id} is published with other content"
            else:
                links[block_id], steps[block_id] = link, 2 * step + has_parent
                first = self._find(digest)
                if first >= 0 and not self._hold_the_same(first, block_id):
                    return count
                held_digests[block_id], is_published[block_id] = digest, True
                self._chain(block_id, first)
            link, has_parent = digest, 1
        return len(block_ids)

    def insert_next(
        self, parents: list[int], block_ids: list[int], digests: list[int], token_ids: npt.NDArray[np.int32], step: int
    ) -> int:
        """See `PrefixIndex`."""
        blocks, heads, following, mask = self._blocks, self._heads, self._following, self._mask
        is_published, held_digests, links, steps = blocks.is_published, blocks.digests, blocks.links, blocks.steps
        blocks.token_ids[block_ids] = token_ids
        for count, (parent, block_id, digest) in enumerate(zip(parents, block_ids, digests, strict=True)):
            first = other = heads[digest & mask]
            while (
                other >= 0 and held_digests[other] != digest
            ):  # as `_find`, `_chain`: the calls would cost as much as all the rest
                other = following[other]
            if other >= 0 or is_published[block_id]:
                return count
            held_digests[block_id], links[block_id], steps[block_id] = digest, parent, 2 * step + 1
            is_published[block_id] = True
            following[block_id], heads[digest & mask] = first, block_id
        return len(block_ids)

    def _insert_new(
        self,
        index: npt.NDArray[np.int64],
        column: npt.NDArray[np.uint64],
        links: npt.NDArray[np.uint64],
        steps: npt.NDArray[np.int64],
    ) -> bool:
        """Publish blocks of which none is published, under digests of which none is known; False, and nothing, for all others. `links` and
        `steps` are as in the columns of blocks. Costs half as much a block: for the tables of a takeover and long prompts."""
        blocks = self._blocks
        if blocks.is_published_view[index].any() or len(set(column.tolist())) < len(column):
            return False
        heads = (column & np.uint64(self._mask)).view(np.int64)
        before = self._heads_view[heads]
        if any(self._find(digest) >= 0 for digest in column[before >= 0].tolist()):
            return False
        blocks.digests_view[index], blocks.is_published_view[index] = column, True
        blocks.links_view[index], blocks.steps_view[index] = links, steps
        self._following_view[index], self._heads_view[heads] = before, index
        # Of several with one head numpy keeps the last: the others go before it.
        for row in np.flatnonzero(self._heads_view[heads] != index).tolist():
            self._chain(int(index[row]), _NONE)
        return True

    def _find(self, digest: int) -> int:
        """The first block under a digest, or `_NONE`."""
        block_id, digests = self._heads[digest & self._mask], self._blocks.digests
        while block_id >= 0 and digests[block_id] != digest:
            block_id = self._following[block_id]
        return block_id

    def _chain(self, block_id: int, first: int) -> None:
        """Put a block behind the first one of its digest, or, where that is `_NONE`, at the head of its chain."""
        following = self._following
        if first >= 0:
            following[block_id], following[first] = following[first], block_id
        else:
            head = self._blocks.digests[block_id] & self._mask
            following[block_id], self._heads[head] = self._heads[head], block_id

    def _hold_the_same(self, one: int, other: int) -> bool:
        """Whether two blocks stand for the same tokens behind the same parent."""
        blocks = self._blocks
        if blocks.links[one] != blocks.links[other] or (blocks.steps[one] ^ blocks.steps[other]) & 1:
            return False
        return np.array_equal(blocks.token_ids[one], blocks.token_ids[other])

    def remove(self, block_id: int) -> None:
        """See `PrefixIndex`."""
        blocks, following = self._blocks, self._following
        assert blocks.is_published[block_id], f"block {block_id} is not published"
        blocks.is_published[block_id] = False
        head = blocks.digests[block_id] & self._mask
        before = self._heads[head]
        if before == block_id:
            self._heads[head] = following[block_id]
            return
        while following[before] != block_id:
            before = following[before]
        following[before] = following[block_id]

    def check_integrity(self) -> None:
        """See `PrefixIndex`."""
        blocks = self._blocks
        indexed: dict[int, int] = {}
        firsts: dict[int, int] = {}
        for head in np.flatnonzero(self._heads_view >= 0).tolist():
            block_id = self._heads[head]
            while block_id >= 0:
                assert block_id not in indexed, f"block {block_id} is indexed twice"
                digest = indexed[block_id] = blocks.digests[block_id]
                assert digest & self._mask == head, f"block {block_id} is in the chain of another digest"
                first = firsts.setdefault(digest, block_id)
                assert self._hold_the_same(first, block_id), f"blocks {block_id} and {first} differ"
                block_id = self._following[block_id]
        published = {block_id: blocks.digests[block_id] for block_id in blocks.published_ids().tolist()}
        assert indexed == published, f"index and columns differ: {indexed.items() ^ published.items()}"
        for block_id in published:
            has_parent = blocks.steps[block_id] & 1
            assert not has_parent or blocks.links[block_id] in firsts, f"block {block_id} outlived its prefix"


def link_of(parent: int | None) -> tuple[int, int]:
    """The link before a block, and whether it is that of a block: of a digest, or of a namespace's root."""
    if parent is None:
        return 0, 0
    return max(parent, ~parent), int(parent >= 0)
