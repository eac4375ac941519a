"""What somebody knows who is told of cached blocks, as smg keeps it: by name the whole prefix that a block ends."""

from collections.abc import Iterable

from gateway.cached_blocks import CacheEvent, Cleared, Removed, Stored


class Follower:
    """`prefixes`: every prefix, in whole blocks, that is said to be cached. Asserts that what is told can be followed."""

    def __init__(self) -> None:
        self._by_digest: dict[int, tuple[bytes, ...]] = {}

    def follow(self, events: Iterable[CacheEvent]) -> None:
        for event in events:
            match event:
                case Stored(blocks):
                    for before, block in zip((None, *blocks), blocks, strict=False):
                        assert before is None or block.parent == before.digest, "a run has a gap"
                        assert block.digest not in self._by_digest, "stored twice"
                        begin = () if block.parent is None else self._by_digest[block.parent]
                        self._by_digest[block.digest] = (*begin, block.token_ids)
                case Removed(digests):
                    for digest in digests:
                        del self._by_digest[digest]
                case Cleared():
                    self._by_digest.clear()

    @property
    def prefixes(self) -> set[tuple[bytes, ...]]:
        return set(self._by_digest.values())
