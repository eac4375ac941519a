"""Every architecture gives transformers' logits and greedy tokens through the real scheduler and engine: a short form of `make parity`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from model_worker.models.registry import ARCHITECTURES
from tests.parity.architectures import check_shape
from tests.parity.mode import SPECULATIVE, SPREAD, Mode
from tests.parity.tiny_models import tiny_configs

MODES = (Mode(False, False, False), Mode(prefix_caching=True, chunked=True, alone=False), SPECULATIVE)
CASES = [(name, index) for name, configs in tiny_configs().items() for index in range(len(configs))]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("architecture", "shape"), CASES)
def test_logits_and_tokens_of_every_architecture(architecture: str, shape: int, tmp_path: Path) -> None:
    configs = tiny_configs()[architecture]
    spread = SPREAD[1:] if len(configs) == 1 else SPREAD[1 + shape :][:1]  # of each architecture over 2 and over 4 ranks
    result = check_shape(configs[shape], tmp_path, (*MODES, *spread))
    assert result.is_same, result


def test_no_architecture_is_left_out() -> None:
    assert tiny_configs().keys() == ARCHITECTURES.keys()
