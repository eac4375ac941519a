"""Which blocks of tokens the workers behind a gateway have cached, for those who choose between gateways by it.

To somebody outside all workers are one cache: a block is stored with its first copy, and removed with its last.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tessera.values.kv_events import PoolChange


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A full block. `digest` names it and all before it; `parent` is that of the block before, None for the first of a prompt. `token_ids`
    are its own, int32 as bytes."""

    digest: int
    parent: int | None
    token_ids: bytes


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that follow each other, at least one; what comes before the first was stored earlier."""

    blocks: tuple[CachedBlock, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks of these digests, at least one."""

    digests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """All there were."""


CacheEvent = Stored | Removed | Cleared

_Copy = tuple[dict[int, int], int, CachedBlock]
"""The pool that it lies in, its block id there, and what it is a copy of."""


class CachedBlocks:
    """What is known to be cached. Only prompts without a salt: whoever reads this finds nothing of a tenant that has one, neither in the
    cache nor here."""

    def __init__(self) -> None:
        self._pools: dict[str, dict[int, int]] = {}  # by worker: block id to digest
        self._copies: Counter[int] = Counter()
        self._blocks: dict[int, CachedBlock] = {}  # by digest, each behind its parent
        self._waiting: dict[int, list[_Copy]] = {}  # by the digest that they continue

    def __len__(self) -> int:
        """Blocks, of which there may be several copies."""
        return len(self._blocks)

    def whole(self) -> list[Stored]:
        """Everything, parents first."""
        return list(_runs(self._blocks.values()))

    def fill(self, change: PoolChange) -> list[CacheEvent]:
        """Take a part of the whole, whose blocks may come before those that they continue; no block may be told twice in one part. Returns
        what it comes to."""
        given_up: list[int] = []
        ready: list[_Copy] = []
        pool = self._pools.setdefault(change.worker, {})
        if change.is_gone:
            given_up.extend(pool.values())
            pool.clear()
        given_up.extend(pool.pop(block_id) for block_id in change.removed.tolist() if block_id in pool)
        for block_id, block in _blocks_of(change):
            held = pool.get(block_id)
            if held is not None:
                if block is not None and held == block.digest:
                    continue
                given_up.append(pool.pop(block_id))
            if block is None:
                continue
            if block.parent is None or block.parent in self._blocks:
                ready.append((pool, block_id, block))
            else:
                self._waiting.setdefault(block.parent, []).append((pool, block_id, block))
        return [*_runs(self._hold(ready)), *self._give_up(given_up)]

    def filled(self) -> None:
        """That was the whole: what continues nothing that is known is of a tenant's prompts."""
        self._waiting.clear()

    def apply(self, change: PoolChange) -> list[CacheEvent]:
        """Take what has happened since; returns what it comes to. What is continued is known, or told with it."""
        events = self.fill(change)
        self.filled()
        return events

    def _hold(self, ready: list[_Copy]) -> list[CachedBlock]:
        """Take these copies, whose prefixes are known, and those that waited for them; returns the blocks that had none."""
        stored = []
        while ready:  # the last first, so that what continues a block follows it
            pool, block_id, block = ready.pop()
            assert block_id not in pool, "a block is told twice"
            pool[block_id] = block.digest
            self._copies[block.digest] += 1
            if block.digest not in self._blocks:
                self._blocks[block.digest] = block
                stored.append(block)
            ready.extend(self._waiting.pop(block.digest, ()))
        return stored

    def _give_up(self, digests: Iterable[int]) -> list[CacheEvent]:
        """A copy of each of these is gone."""
        gone = []
        for digest in digests:
            self._copies[digest] -= 1
            if not self._copies[digest]:
                del self._copies[digest], self._blocks[digest]
                gone.append(digest)
        if not gone:
            return []
        return [Removed(tuple(gone))] if self._blocks else [Cleared()]


def _blocks_of(change: PoolChange) -> Iterator[tuple[int, CachedBlock | None]]:
    """Block id and what it holds; None where that begins a tenant's prompt."""
    width = 4 * change.token_ids.shape[1]
    data = change.token_ids.tobytes()
    columns = (change.block_ids, change.digests, change.links, change.has_parent)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for row, (block_id, digest, link, has_parent) in enumerate(rows):
        if has_parent or link == change.root:
            yield block_id, CachedBlock(digest, link if has_parent else None, data[row * width : (row + 1) * width])
        else:
            yield block_id, None


def _runs(blocks: Iterable[CachedBlock]) -> Iterator[Stored]:
    """These blocks, those that follow each other together."""
    run: list[CachedBlock] = []
    for block in blocks:
        if run and block.parent != run[-1].digest:
            yield Stored(tuple(run))
            run = []
        run.append(block)
    if run:
        yield Stored(tuple(run))
