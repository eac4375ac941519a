"""Buffers for a chunk of logits rows. They are kept from step to step: fresh pages would cost more than what is computed in them."""

import numpy as np

CHUNK_BYTES = 2 << 20
"""Logits that are worked on at a time: they, and what is made of them, stay in a core's caches."""


def rows_per_chunk(vocab_size: int) -> int:
    """Rows of logits in a chunk, at least one."""
    return max(1, CHUNK_BYTES // (4 * vocab_size))


class Workspace:
    """Of one thread, for chunks of up to `rows_per_chunk` rows of `vocab_size` numbers; whoever gets a view of a buffer owns it until the
    next call for the same one. `logits`, `likelihoods`, `bounds` are float32, `words` uint32, `chosen` bool, all `[rows, vocab_size]`."""

    def __init__(self, vocab_size: int) -> None:
        shape = (rows_per_chunk(vocab_size), vocab_size)
        self.vocab_size = vocab_size
        self.logits, self.likelihoods, self.bounds = (np.empty(shape, np.float32) for _ in range(3))
        self.words = np.empty(shape, np.uint32)
        self.chosen = np.empty(shape, np.bool_)
