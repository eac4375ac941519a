"""The noise of sampling: a counter-based generator, so that a draw depends on (seed, output index) and nothing else.

Philox 4x64 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11), raw bits only: key words
`(seed, 0)`, and counter words `(i + 1, output_index, 0, 0)` for block i of four 64-bit outputs. Token t of the vocabulary takes
32 bits: the low half of 64-bit output t // 2 when t is even, the high half when it is odd. Uniform numbers beside these have counter words
`(1, output_index, stream, 0)` with a stream from 1 on. For a whole row numpy supplies the
algorithm, for single tokens `words_at` does; the stream is defined above and not by numpy's distributions, and
`tests/model_worker/test_noise.py` holds both to published vectors.
"""

import numpy as np

_WORD_RANGE = 2.0**32
MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
KEY_STEPS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def noise_words(seed: int, output_index: int, count: int) -> np.ndarray:
    """The 32 random bits of the first `count` tokens, uint32 `[count]`; `seed` and `output_index` are below 2**64."""
    generator = np.random.Philox(key=seed, counter=output_index << 64)
    outputs = generator.random_raw((count + 1) // 2)
    words: np.ndarray = outputs.astype("<u8", copy=False).view("<u4")[:count]
    return words


def words_at(seeds: np.ndarray, output_indices: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """The 32 random bits of some tokens of each of R rows, uint32 `[R, C]`: `seeds` and `output_indices` uint64 `[R]`, `token_ids`
    `[R, C]`, not negative. The same bits as `noise_words` gives; some five times dearer by the block of eight tokens."""
    tokens = token_ids.astype(np.uint64)
    zero = np.zeros((1, 1), np.uint64)
    c0, c1, c2, c3 = _philox(tokens // np.uint64(8) + np.uint64(1), output_indices[:, None], zero, seeds[:, None])
    place = tokens // np.uint64(2) % np.uint64(4)
    outputs = np.where(place < 2, np.where(place == 0, c0, c1), np.where(place == 2, c2, c3))
    words: np.ndarray = (outputs >> tokens % np.uint64(2) * _HALF & _LOW).astype(np.uint32)
    return words


def uniforms(seeds: np.ndarray, output_indices: np.ndarray, stream: int) -> np.ndarray:
    """One number in [0, 1) for each of R rows, float64 `[R]`, a multiple of 2**-53: `seeds` and `output_indices` uint64 `[R]`. Independent of
    the words of tokens, and of other streams."""
    assert stream > 0, "0 is that of the words"
    first, _, _, _ = _philox(np.ones_like(seeds), output_indices, np.full_like(seeds, stream), seeds)
    numbers: np.ndarray = (first >> np.uint64(11)) * 2.0**-53
    return numbers


def _philox(c0: np.ndarray, c1: np.ndarray, c2: np.ndarray, seeds: np.ndarray) -> tuple[np.ndarray, ...]:
    """The four 64-bit outputs of the counters (c0, c1, c2, 0), uint64 of a shape that all have in common."""
    c3 = np.zeros_like(c2)
    k0, k1 = seeds, np.zeros_like(c2)
    for _ in range(ROUNDS):
        high0, low0 = _product(MULTIPLIERS[0], c0)
        high1, low1 = _product(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + np.uint64(KEY_STEPS[0]), k1 + np.uint64(KEY_STEPS[1])
    return c0, c1, c2, c3


def _product(factor: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The high and the low 64 bits of `factor * x`, by halves of 32 bits."""
    factor_low, factor_high = np.uint64(factor) & _LOW, np.uint64(factor) >> _HALF
    x_low, x_high = x & _LOW, x >> _HALF
    middle = x_high * factor_low + (x_low * factor_low >> _HALF)
    other = x_low * factor_high + (middle & _LOW)
    return x_high * factor_high + (middle >> _HALF) + (other >> _HALF), x * np.uint64(factor)


def exponentials(words: np.ndarray) -> np.ndarray:
    """Standard exponential draws, float64, growing with their words: -log(1 - w) for w = (word + 0.5) / 2**32, w in (0, 1)."""
    return -np.log1p(-(words.astype(np.float64) + 0.5) / _WORD_RANGE)
