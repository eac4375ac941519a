"""Torch's words are those of Philox 4x64-10's published vectors, and numpy's for whole rows, wherever they are computed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_worker.device_noise import device_words, philox
from model_worker.noise import noise_words
from tests.model_worker.far_device import FAR, far

__all__ = ["far"]

MASK = 2**64 - 1


def bits(number: int) -> torch.Tensor:
    return torch.from_numpy(np.array([[number]], np.uint64).view(np.int64))


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
def test_the_published_vectors(counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = map(bits, counter)
    outputs = philox((c0, c1, c2, c3), (bits(key[0]), bits(key[1])))
    assert [int(output) & MASK for output in outputs] == list(expected)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, MASK), st.integers(0, MASK)), min_size=1, max_size=3),
    count=st.integers(1, 60),
)
def test_words_are_those_of_the_host(rows: list[tuple[int, int]], count: int) -> None:
    words = device_words(*words_of(rows), count)
    assert words.dtype == torch.int64
    assert words.tolist() == [noise_words(*row, count).tolist() for row in rows]


@pytest.mark.usefixtures("far")
def test_words_on_a_device() -> None:
    rows = [(2**63 - 1, 0), (5, 2**20)]
    seeds, output_indices = words_of(rows)
    words = device_words(seeds.to(FAR), output_indices.to(FAR), 1001)
    assert words.device == FAR and words.cpu().tolist() == [noise_words(*row, 1001).tolist() for row in rows]


def words_of(rows: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    columns = np.array(rows, np.uint64).T.copy().view(np.int64)
    return torch.from_numpy(columns[0]), torch.from_numpy(columns[1])
