"""The noise stream is Philox 4x64-10, held to its published vectors, and laid out as its module says."""

import math

import numpy as np
import pytest

from model_worker.noise import exponentials, noise_words, words_at

MASK = 2**64 - 1


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox 4x64-10 as in the paper, in Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (product1 >> 64) ^ c1 ^ k0, product1 & MASK, (product0 >> 64) ^ c3 ^ k1, product0 & MASK
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
    return c0, c1, c2, c3


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B)),
        ((MASK,) * 4, (MASK, MASK), (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0)),
        (
            (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
            (0x452821E638D01377, 0xBE5466CF34E90C6C),
            (0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6),
        ),
    ],
)
def test_the_reference_meets_the_vectors_of_random123(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert philox(counter, key) == expected


@pytest.mark.parametrize(("seed", "output_index"), [(0, 0), (1, 0), (0, 1), (2**63 - 1, 2**20), (12345, 2**32 + 5)])
@pytest.mark.parametrize("count", [1, 7, 8, 50])
def test_words_are_laid_out_as_documented(seed: int, output_index: int, count: int) -> None:
    words = noise_words(seed, output_index, count)
    assert words.dtype == np.uint32 and len(words) == count
    for token in range(count):
        output = philox((token // 8 + 1, output_index, 0, 0), (seed, 0))[token // 2 % 4]
        assert words[token] == (output >> 32 * (token % 2)) & 0xFFFFFFFF


def test_draws_are_positive_finite_and_grow_with_their_words() -> None:
    words = np.array([0, 1, 2**31, 2**32 - 2, 2**32 - 1], dtype=np.uint32)
    draws = exponentials(words)
    assert np.isfinite(draws).all() and draws[0] > 0 and (np.diff(draws) > 0).all()
    assert draws[2] == pytest.approx(math.log(2), rel=1e-9)


def test_draws_are_exponential() -> None:
    draws = np.concatenate([exponentials(noise_words(seed, index, 1000)) for seed in range(10) for index in range(10)])
    edges = np.append(-np.log1p(-np.arange(20) / 20), np.inf)
    counts, _ = np.histogram(draws, edges)
    chi_square = ((counts - 5000.0) ** 2 / 5000).sum()
    assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001; the seeds are fixed, so this never flickers


def test_words_of_single_tokens_are_those_of_the_whole_row() -> None:
    seeds, indices = [0, 1, 2**63 - 1, 12345], [0, 2**20, 7, 2**32 + 5]
    token_ids = np.random.default_rng(0).integers(0, 130_000, (4, 40))
    token_ids[:, :9] = np.arange(9)
    words = words_at(np.array(seeds, np.uint64), np.array(indices, np.uint64), token_ids)
    assert words.dtype == np.uint32
    for row in range(4):
        assert words[row].tolist() == noise_words(seeds[row], indices[row], 130_000)[token_ids[row]].tolist()
