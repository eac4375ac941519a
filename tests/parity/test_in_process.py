"""The system that parity drives gives what a scheduler and an engine must give: every mode alike, blocks back, prefixes found."""

import pytest

from model_worker.kernels.torch_backend import TorchKernels
from model_worker.models.deterministic import DeterministicLM, deterministic_config, next_tokens
from services.worker.drafter import LoadedModel
from tessera.values.model import ModelInfo
from tests.parity.mode import MODES, Mode

VOCAB = 97
PROMPTS = [list(range(40)), [5], [*range(40), 3, 1], [8] * 70]


def expected(prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_tokens(ids, VOCAB)[0])
    return ids[len(prompt) :]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.label)
def test_outputs_and_cached_tokens(mode: Mode) -> None:
    model = DeterministicLM(deterministic_config(VOCAB, 256))
    info = ModelInfo("m", "Deterministic", VOCAB, 256, (), None, "t", "w")
    system = mode.system(LoadedModel(model, info, None, TorchKernels(), TorchKernels()))
    counts = [20, 3, 1, 17]
    for _ in range(2):
        assert system.generate(PROMPTS, counts) == [expected(*each) for each in zip(PROMPTS, counts, strict=True)]
    assert (system.num_cached_tokens > 0) == mode.prefix_caching
