"""What the accuracy run counts."""

import math

import pytest
import torch

from model_worker.kernels.cpu.library import cpu_library
from tests.model_worker.random_llama import build, config
from tests.parity.accuracy import MODES, REFERENCE, Measured, common_prefix, prose, read_text, records, surprise


def test_surprise_is_the_log_of_the_vocabulary_where_nothing_is_known() -> None:
    assert surprise(torch.zeros(3, 50), torch.tensor([0, 7, 49])) == pytest.approx(3 * math.log(50))
    certain = torch.zeros(1, 50).index_fill_(1, torch.tensor([7]), 100.0)
    assert surprise(certain, torch.tensor([7])) == pytest.approx(0, abs=1e-6)
    assert surprise(certain, torch.tensor([8])) == pytest.approx(100, rel=1e-4)


def test_two_modes_are_compared_place_by_place_and_up_to_the_first_difference() -> None:
    one = Measured(1.0, torch.tensor([1, 2, 3, 4]), [[5, 6, 7, 8], [1, 1]])
    other = Measured(1.0, torch.tensor([1, 2, 9, 4]), [[5, 6, 9, 8], [1, 1]])
    assert one.likeliest_as(other) == 0.75 and one.answers_as(other) == pytest.approx(4 / 6)
    assert (common_prefix([1, 2], [1, 2]), common_prefix([3], [4])) == (2, 0)


def test_a_text_is_read_in_every_mode() -> None:
    library = cpu_library(1)
    pieces = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3], [8, 4, 6]]
    found = {name: read_text(build(config(), make(library)), make(library), pieces) for name, make in MODES.items()}
    expected = found[REFERENCE]
    assert expected[0] > 1 and expected[1].shape == (19,)
    for perplexity, likeliest in found.values():
        assert perplexity == pytest.approx(expected[0], rel=0.1)
        assert (likeliest == expected[1]).float().mean() > 0.8


def test_the_text_is_prose_of_some_length() -> None:
    assert prose("a\n| b |\n    c\nd") == "a\nd"
    assert len(records()) > 30_000 and "\n|" not in records()
