"""The prefix index as a radix tree over tokens: the same hits as by hash chain, found without trusting a digest."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kv_manager.block import Blocks
from kv_manager.prefix_index import link_of


@dataclass(slots=True, eq=False)
class _Node:
    """A run of consecutive blocks that nothing branches off from but at its end: of each its token ids (`keys`, int32 as bytes), its digest,
    and the blocks that hold it, first published first. `children` are by the key of their first block. The top of a namespace has
    no `parent`, an empty run, and the `root` of the namespace."""

    parent: "_Node | None" = None
    root: int | None = None
    keys: list[bytes] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    holders: list[list[int]] = field(default_factory=list)
    children: dict[bytes, "_Node"] = field(default_factory=dict)


_Place = tuple[_Node, int]
"""Behind the first so many blocks of a node's run."""


class RadixPrefixIndex:
    """`PrefixIndex` as a radix tree for each namespace.

    A place in a tree is one prefix. `_nodes` says in which node a digest lies, for `insert`, whose parent is named by one, and because
    of two prefixes that collide only the first may be published: a journal tells them apart by nothing else.
    """

    __slots__ = ("_blocks", "_nodes", "_roots")

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._roots: dict[int | None, _Node] = {}
        self._nodes: dict[int, _Node] = {}

    def longest_match(self, digests: Sequence[int], token_ids: npt.NDArray[np.int32], root: int | None = None) -> list[int]:
        """See `PrefixIndex`; `digests` are not looked at."""
        node, end, block_ids = self._roots.get(root), 0, []
        if node is None:
            return []
        for key in _keys(token_ids):
            if end == len(node.keys):
                node, end = node.children.get(key), 0
                if node is None:
                    break
            if node.keys[end] != key or not node.holders[end]:
                break
            block_ids.append(node.holders[end][0])
            end += 1
        return block_ids

    def likely_match_len(self, digests: Sequence[int]) -> int:
        """See `PrefixIndex`."""
        return next((index for index, digest in enumerate(digests) if digest not in self._nodes), len(digests))

    def insert(
        self, parent: int | None, block_ids: list[int], digests: Sequence[int], token_ids: npt.NDArray[np.int32], step: int
    ) -> int:
        """See `PrefixIndex`."""
        blocks = self._blocks
        blocks.token_ids[block_ids] = token_ids
        place = self._behind(parent)
        link, has_parent = link_of(parent)
        for count, (block_id, digest, key) in enumerate(zip(block_ids, digests, _keys(token_ids), strict=True)):
            if blocks.is_published[block_id]:
                assert blocks.digests[block_id] == digest, f"block {block_id} is published with other content"
                place = self._behind(digest)
            else:
                found = _step(place, key)
                node = self._nodes.get(digest)
                if node is not None and found != self._behind(digest):
                    self._prune(place[0])
                    return count
                node, end = place = found or self._grow(place, key, digest)
                assert node.digests[end - 1] == digest, "one prefix has two digests"
                self._nodes[digest] = node
                node.holders[end - 1].append(block_id)
                blocks.is_published[block_id], blocks.digests[block_id] = True, digest
                blocks.links[block_id], blocks.steps[block_id] = link, 2 * step + has_parent
            link, has_parent = digest, 1
        return len(block_ids)

    def insert_next(
        self, parents: list[int], block_ids: list[int], digests: list[int], token_ids: npt.NDArray[np.int32], step: int
    ) -> int:
        """See `PrefixIndex`. Each block's node is looked for in the tree, so nothing is gained by many at once."""
        return 0

    def remove(self, block_id: int) -> None:
        """See `PrefixIndex`."""
        blocks = self._blocks
        assert blocks.is_published[block_id], f"block {block_id} is not published"
        blocks.is_published[block_id] = False
        digest = blocks.digests[block_id]
        node, end = self._behind(digest)
        node.holders[end - 1].remove(block_id)
        if not node.holders[end - 1]:
            del self._nodes[digest]
            self._prune(node)

    def check_integrity(self) -> None:
        """See `PrefixIndex`."""
        indexed: dict[int, int] = {}
        for root, node in self._roots.items():
            assert not node.keys and node.parent is None and node.children and node.root == root, f"root {root} is none"
            self._check_below(node, indexed)
        blocks = self._blocks
        published = {block_id: blocks.digests[block_id] for block_id in blocks.published_ids().tolist()}
        assert indexed == published, f"index and columns differ: {indexed.items() ^ published.items()}"
        assert self._nodes.keys() == set(indexed.values()), "a digest lies nowhere"

    def _check_below(self, top: _Node, indexed: dict[int, int]) -> None:
        """Assert that all nodes below one fit it and the columns; collect their blocks."""
        blocks, waiting = self._blocks, [(child, key, top.root) for key, child in top.children.items()]
        while waiting:
            node, first_key, parent = waiting.pop()
            assert node.keys and node.keys[0] == first_key, "a node lies under another key"
            is_gone = False
            for key, digest, holders in zip(node.keys, node.digests, node.holders, strict=True):
                is_gone |= not holders
                for block_id in holders:
                    assert block_id not in indexed, f"block {block_id} is indexed twice"
                    assert not is_gone, f"block {block_id} outlived its prefix"
                    assert self._nodes.get(digest) is node, f"digest {digest} lies in another node"
                    assert (blocks.links[block_id], blocks.steps[block_id] & 1) == link_of(parent), (
                        f"parent of block {block_id}"
                    )
                    assert blocks.token_ids[block_id].tobytes() == key, f"block {block_id} holds other tokens than its place"
                    indexed[block_id] = digest
                parent = digest
            assert node.holders[-1] or node.children, "an empty place was left behind"
            for key, child in node.children.items():
                assert child.parent is node, "a node has another parent"
                waiting.append((child, key, parent))

    def _behind(self, parent: int | None) -> _Place:
        """The place of what ends in this digest, or of a namespace's root, which is made where there is none."""
        if parent is None or parent < 0:
            return self._roots.setdefault(parent, _Node(root=parent)), 0
        node = self._nodes[parent]
        last = len(node.digests)
        return node, last if node.digests[-1] == parent else node.digests.index(parent) + 1

    def _grow(self, place: _Place, key: bytes, digest: int) -> _Place:
        """A new place behind one that has no such block behind it."""
        node, end = place
        if end < len(node.keys):
            self._split(node, end)
        if node.children or node.parent is None:
            node.children[key] = node = _Node(node)
        node.keys.append(key)
        node.digests.append(digest)
        node.holders.append([])
        return node, len(node.keys)

    def _split(self, node: _Node, end: int) -> None:
        """Make a child of what lies behind the first `end` blocks of a run."""
        child = _Node(node, None, node.keys[end:], node.digests[end:], node.holders[end:], node.children)
        del node.keys[end:], node.digests[end:], node.holders[end:]
        node.children = {child.keys[0]: child}
        for below in child.children.values():
            below.parent = child
        for digest, holders in zip(child.digests, child.holders, strict=True):
            if holders:
                self._nodes[digest] = child

    def _prune(self, node: _Node) -> None:
        """Take away what ends nowhere: empty places at the end of a run, then the node itself, and so on."""
        while not node.children:
            key = node.keys[0] if node.keys else b""
            while node.keys and not node.holders[-1]:
                del node.keys[-1], node.digests[-1], node.holders[-1]
            if node.keys:
                return
            if node.parent is None:
                del self._roots[node.root]
                return
            node = node.parent
            del node.children[key]


def _step(place: _Place, key: bytes) -> _Place | None:
    """The place behind one more block; None where there is none."""
    node, end = place
    if end < len(node.keys):
        return (node, end + 1) if node.keys[end] == key else None
    child = node.children.get(key)
    return None if child is None else (child, 1)


def _keys(token_ids: npt.NDArray[np.int32]) -> Iterator[bytes]:
    """The token ids of each block, as bytes."""
    data, width = token_ids.astype(np.int32, copy=False).tobytes(), 4 * token_ids.shape[1]
    return (data[start : start + width] for start in range(0, len(data), width))
