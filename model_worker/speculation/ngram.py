"""Prompt lookup: what followed the last few tokens when they came before is likely to follow again (Saxena, "Prompt Lookup Decoding",
2023). For any model; it pays where answers repeat their prompt (summaries, edits of code) or themselves."""

import numpy as np

from model_worker.sampling_table import SamplingTable
from model_worker.slot_table import SlotTable
from model_worker.speculation.proposer import Drafts


class NgramProposer:
    """See `Proposer`. Matches the last `max_n` tokens of prompt and output, or as many fewer, down to `min_n`, as have come before."""

    def __init__(self, min_n: int, max_n: int) -> None:
        assert 1 <= min_n <= max_n, f"{min_n} to {max_n} tokens to match"
        self._min_n = min_n
        self._max_n = max_n

    def propose(self, slots: np.ndarray, rooms: np.ndarray, table: SlotTable, sampling: SamplingTable) -> Drafts:
        drafts = Drafts(np.zeros(len(slots), np.int64), np.full((len(slots), int(rooms.max(initial=0))), -1, np.int32))
        for row, (slot, room) in enumerate(zip(slots.tolist(), rooms.tolist(), strict=True)):
            found = continuation(table.token_ids[slot, : table.num_ids[slot]], room, self._min_n, self._max_n)
            drafts.counts[row] = len(found)
            drafts.token_ids[row, : len(found)] = found
        return drafts


def continuation(ids: np.ndarray, count: int, min_n: int, max_n: int) -> np.ndarray:
    """`count` tokens that followed the longest suffix of `ids` (int32 `[L]`) of `min_n` to `max_n` tokens that has come before, at its
    last occurrence; none where not even `min_n` tokens have.

    An occurrence so near the end that fewer tokens followed is taken for a period: what followed repeats.
    """
    last = len(ids) - 1
    # One pass over the context, for the last token; the others are compared where that one matches.
    ends = np.flatnonzero(ids[:last] == ids[last])
    matched = 1
    while matched < max_n and len(ends):
        ends_before = ends[ends >= matched]
        longer = ends_before[ids[ends_before - matched] == ids[last - matched]]
        if not len(longer):
            break
        ends, matched = longer, matched + 1
    if matched < min_n or not len(ends):
        return ids[:0]
    end = int(ends[-1])
    return ids[end + 1 + np.arange(count) % (last - end)]
