"""The noise of sampling: a counter-based generator, so that a draw depends on (seed, output index) and nothing else.

Philox 4x64 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11), raw bits only: key words
`(seed, 0)`, and counter words `(i + 1, output_index, 0, 0)` for block i of four 64-bit outputs. Token t of the vocabulary takes
32 bits: the low half of 64-bit output t // 2 when t is even, the high half when it is odd. numpy supplies the algorithm; the
stream is defined above and not by numpy's distributions, and `tests/model_worker/test_noise.py` holds it to published vectors.
"""

import numpy as np

_WORD_RANGE = 2.0**32


def noise_words(seed: int, output_index: int, count: int) -> np.ndarray:
    """The 32 random bits of the first `count` tokens, uint32 `[count]`; `seed` and `output_index` are below 2**64."""
    generator = np.random.Philox(key=seed, counter=output_index << 64)
    outputs = generator.random_raw((count + 1) // 2)
    return outputs.astype("<u8", copy=False).view("<u4")[:count]


def exponentials(words: np.ndarray) -> np.ndarray:
    """Standard exponential draws, float64, growing with their words: -log(1 - w) for w = (word + 0.5) / 2**32, w in (0, 1)."""
    return -np.log1p(-(words.astype(np.float64) + 0.5) / _WORD_RANGE)
