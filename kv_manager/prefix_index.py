"""Which published blocks continue which prefix: the port, and the index by hash chain that serves it."""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import itemgetter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kv_manager.block import Blocks

BULK_BLOCKS = 16
"""From so many blocks on, two at the least, it pays to look at them together."""


class PrefixIndex(Protocol):
    """Published blocks by the whole prefix they stand for.

    An implementation writes the pool's content columns (`digests`, `parents`, `token_ids`, `published_steps`). Two rules make a hit
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

    def remove(self, block_id: int) -> None:
        """Forget a published block."""

    def check_integrity(self) -> None:
        """Assert that entries and columns agree."""


class HashPrefixIndex:
    """`PrefixIndex` as a hash table from chain digest to block.

    `_first` has one block per digest, `_others` the further ones of the few digests that have several.
    """

    __slots__ = ("_blocks", "_first", "_others")

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._first: dict[int, int] = {}
        self._others: dict[int, dict[int, None]] = {}

    def longest_match(self, digests: Sequence[int], token_ids: npt.NDArray[np.int32], root: int | None = None) -> list[int]:
        """See `PrefixIndex`."""
        find, parents = self._first.get, self._blocks.parents
        block_ids: list[int] = []
        parent = root
        for digest in digests:
            block_id = find(digest)
            if block_id is None or parents[block_id] != parent:
                break
            block_ids.append(block_id)
            parent = digest
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
        return next((index for index, digest in enumerate(digests) if digest not in self._first), len(digests))

    def insert(
        self, parent: int | None, block_ids: list[int], digests: Sequence[int], token_ids: npt.NDArray[np.int32], step: int
    ) -> int:
        """See `PrefixIndex`."""
        blocks = self._blocks
        # All rows at once; one alone (a decode that fills its block) is cheaper by its number than through a list.
        blocks.token_ids[block_ids if len(block_ids) > 1 else block_ids[0]] = token_ids
        if len(block_ids) >= BULK_BLOCKS and self._insert_new(parent, block_ids, digests, step):
            return len(block_ids)
        claim, held_digests, parents, steps = self._first.setdefault, blocks.digests, blocks.parents, blocks.published_steps
        for count, (block_id, digest) in enumerate(zip(block_ids, digests, strict=True)):
            held = held_digests[block_id]
            if held is None:
                if claim(digest, block_id) != block_id and not self._insert_other(parent, block_id, digest):
                    return count
                held_digests[block_id] = digest
                parents[block_id] = parent
                steps[block_id] = step
            else:
                assert held == digest, f"block {block_id} is published with other content"
            parent = digest
        return len(block_ids)

    def _insert_new(self, parent: int | None, block_ids: list[int], digests: Sequence[int], step: int) -> bool:
        """Publish blocks of which none is published, under digests of which none is known; False, and nothing, for all others. Costs half as
        much a block: for the tables of a takeover and long prompts."""
        blocks, num_first = self._blocks, len(self._first)
        if itemgetter(*block_ids)(blocks.digests).count(None) < len(block_ids) or len(set(digests)) < len(digests):
            return False
        if not self._first.keys().isdisjoint(digests):
            return False
        self._first.update(zip(digests, block_ids, strict=True))
        assert len(self._first) == num_first + len(digests)
        columns: list[tuple[list[Any], Iterable[Any]]] = [
            (blocks.digests, digests),
            (blocks.parents, (parent, *digests)),
            (blocks.published_steps, repeat(step)),
        ]
        for column, values in columns:
            deque(map(column.__setitem__, block_ids, values), maxlen=0)
        return True

    def _insert_other(self, parent: int | None, block_id: int, digest: int) -> bool:
        """Add a further block to a digest, if it holds the same content."""
        blocks, first = self._blocks, self._first[digest]
        if blocks.parents[first] != parent or not np.array_equal(blocks.token_ids[first], blocks.token_ids[block_id]):
            return False
        self._others.setdefault(digest, {})[block_id] = None
        return True

    def remove(self, block_id: int) -> None:
        """See `PrefixIndex`."""
        digest = self._blocks.digests[block_id]
        assert digest is not None, f"block {block_id} is not published"
        self._blocks.digests[block_id] = None
        others = self._others.get(digest)
        if others is None:
            del self._first[digest]
            return
        if self._first[digest] == block_id:
            self._first[digest], _ = others.popitem()
        else:
            del others[block_id]
        if not others:
            del self._others[digest]

    def check_integrity(self) -> None:
        """See `PrefixIndex`."""
        blocks = self._blocks
        indexed = {block_id: digest for digest, block_id in self._first.items()}
        for digest, others in self._others.items():
            first = self._first[digest]
            assert others, f"digest {digest} has an empty list of further blocks"
            for block_id in others:
                assert block_id not in indexed, f"block {block_id} is indexed twice"
                indexed[block_id] = digest
                assert blocks.parents[block_id] == blocks.parents[first], (
                    f"blocks {block_id} and {first} differ in their parent"
                )
                assert np.array_equal(blocks.token_ids[block_id], blocks.token_ids[first]), (
                    f"blocks {block_id} and {first} differ"
                )
        published = {block_id: digest for block_id, digest in enumerate(blocks.digests) if digest is not None}
        assert indexed == published, f"index and columns differ: {indexed.items() ^ published.items()}"
        for block_id in published:
            parent = blocks.parents[block_id]
            assert parent is None or parent < 0 or parent in self._first, f"block {block_id} outlived its prefix"
