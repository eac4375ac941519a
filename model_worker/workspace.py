"""Buffers for a chunk of logits rows. They are kept from step to step: fresh pages would cost more than what is computed in them."""

import numpy as np

CHUNK_BYTES = 2 << 20
"""Logits that are worked on at a time where most of them are only looked at once or twice."""

GROUP_BYTES = 512 << 10
"""The same where several arrays of that size are in use together, which ought to fit a core's own cache."""


def rows_per_chunk(vocab_size: int) -> int:
    """Rows of logits in a chunk, at least one."""
    return max(1, CHUNK_BYTES // (4 * vocab_size))


def rows_per_group(vocab_size: int) -> int:
    """Rows of logits in a group, at least one, and no more than in a chunk."""
    return max(1, min(CHUNK_BYTES, GROUP_BYTES) // (4 * vocab_size))


class Workspace:
    """Of one thread; whoever gets a view of a buffer owns it until the next call for the same one. For chunks of up to `rows_per_chunk`
    rows `[rows, vocab_size]`: `logits` and `likelihoods` float32, `chosen` bool. For groups of up to `rows_per_group` rows: `bounds`
    float32 and `words` uint32."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        chunk, group = (rows_per_chunk(vocab_size), vocab_size), (rows_per_group(vocab_size), vocab_size)
        self.logits, self.likelihoods = np.empty(chunk, np.float32), np.empty(chunk, np.float32)
        self.chosen = np.empty(chunk, np.bool_)
        self.bounds, self.words = np.empty(group, np.float32), np.empty(group, np.uint32)
