"""Prompts that begin alike and come together: who would compute what another is computing already waits for that, and hits it.

An optimisation: a block is found cached once the output of the step that filled it has come, so without it the prompts of the steps in flight would
each compute their common beginning, with the same KV.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from services.scheduler.core.forks import is_awaited
from services.scheduler.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The first `num_blocks` blocks of a waiting sequence are the owner's, who computes those that are not cached yet."""

    owner: Sequence
    num_blocks: int


class PrefixesUnderWay:
    """Of one worker, while it puts a batch together: the running sequences that compute prompts, by the digest of the first block that each has not
    published. It names the whole prefix up to there, in its namespace."""

    def __init__(self, running: Iterable[Sequence]) -> None:
        self._by_digest: dict[int, Sequence] = {}
        for sequence in running:
            if not sequence.output_len and is_awaited(sequence):
                self.note(sequence, sequence.table.num_published)

    def note(self, sequence: Sequence, num_cached: int) -> None:
        """It computes its prompt behind so many blocks, or is about to be admitted so. Of several that compute the same the first is named."""
        digests, first = sequence.table.digests, num_cached - sequence.table.num_published
        if first < len(digests):
            self._by_digest.setdefault(digests[first], sequence)

    def shared_with(self, sequence: Sequence, num_cached: int, block_size: int) -> SharedPrefix | None:
        """What a waiting sequence, of which `num_cached` blocks are cached, would hit beyond them if it waited; None: nothing. Its table has been
        matched."""
        num_usable = (len(sequence.hit_token_ids) - 1) // block_size  # one position is always computed
        digests = sequence.table.digests[num_cached:num_usable]
        owner = self._by_digest.get(digests[0]) if digests else None
        if owner is None or owner is sequence:
            return None
        theirs = owner.table.digests[num_cached - owner.table.num_published :]
        pairs = enumerate(zip(digests, theirs, strict=False))
        num_alike = next((index for index, (one, other) in pairs if one != other), min(len(digests), len(theirs)))
        return SharedPrefix(owner, num_cached + num_alike) if num_alike else None
