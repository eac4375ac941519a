"""Prompts as token ids: random ones, which share what the workload says they share."""

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from services.bench.draws import Purpose, generator
from services.bench.trace import TRACE_BLOCK_TOKENS
from services.bench.workload import PlannedRequest

Ids = NDArray[np.int32]

BLOCKS_KEPT = 4096
"""Blocks of a trace kept at hand, 8 MiB; another one is drawn again."""


class Prompts:
    """The prompt of each request. It follows from the seed and the request alone, whichever came before."""

    def __init__(self, vocab_size: int, special_ids: Iterable[int], seed: int, shared_prefix_tokens: int = 0) -> None:
        """Ids are drawn below `vocab_size`, none of `special_ids`."""
        self._ids = np.setdiff1d(np.arange(vocab_size, dtype=np.int32), np.array(list(special_ids), dtype=np.int32))
        assert len(self._ids), "a vocabulary has words"
        self._seed = seed
        self._prefix = self._draw(Purpose.SHARED_PREFIX, 0, shared_prefix_tokens)
        self._block = lru_cache(BLOCKS_KEPT)(self._drawn_block)

    def token_ids(self, request: PlannedRequest) -> list[int]:
        """`input_tokens` ids: the shared prefix, or the blocks of a trace, and what no other request has."""
        known = [self._block(block_id) for block_id in request.block_ids] or [self._prefix]
        missing = request.input_tokens - sum(map(len, known))
        own = [self._draw(Purpose.PROMPT, request.index, missing)] if missing > 0 else []
        ids: list[int] = np.concatenate([*known, *own])[: request.input_tokens].tolist()
        return ids

    def _drawn_block(self, block_id: int) -> Ids:
        return self._draw(Purpose.TRACE_BLOCK, block_id, TRACE_BLOCK_TOKENS)

    def _draw(self, purpose: Purpose, index: int, count: int) -> Ids:
        picks = generator(self._seed, purpose, index).integers(0, len(self._ids), count)
        return self._ids[picks]
