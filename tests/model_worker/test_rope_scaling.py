"""Stretched rotary embeddings against transformers' own functions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from model_worker.layers.rope_scaling import YarnScaling, plain_frequencies
from model_worker.layers.rotary import RotaryEmbedding
from model_worker.weights.config_values import ConfigValues
from model_worker.weights.rope_config import rope_config

LLAMA_31 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DEEPSEEK_V3 = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}
GPT_OSS = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
SHORT = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 4}
GIVEN_FACTOR = DEEPSEEK_V3 | {"attention_factor": 1.25}


def config_values(rope: dict[str, Any], max_len: int = 131072) -> ConfigValues:
    return ConfigValues(Path("config.json"), {"max_position_embeddings": max_len, "rope_parameters": rope})


@pytest.mark.parametrize("rope", [LLAMA_31, DEEPSEEK_V3, GPT_OSS, SHORT, GIVEN_FACTOR], ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("dim", [16, 64, 128])
def test_angles_and_factor(rope: dict[str, Any], dim: int) -> None:
    theirs = LlamaConfig(hidden_size=dim, num_attention_heads=1, max_position_embeddings=131072, rope_parameters=dict(rope))
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, torch.device("cpu"))
    found = rope_config(config_values(rope))
    assert found.scaling is not None and found.scaling.attention_factor == pytest.approx(factor, rel=1e-12)
    torch.testing.assert_close(found.scaling.frequencies(dim, found.theta), frequencies, rtol=1e-6, atol=0.0)
    cos, sin = RotaryEmbedding(dim, found.theta, found.scaling)(torch.tensor([0, 1, 77]))
    angles = torch.tensor([[0.0], [1.0], [77.0]]) * frequencies
    torch.testing.assert_close(cos, angles.cos() * factor, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sin, angles.sin() * factor, rtol=1e-5, atol=1e-5)


def test_yarn_leaves_fast_pairs_and_stretches_slow_ones() -> None:
    scaling = rope_config(config_values(DEEPSEEK_V3)).scaling
    assert isinstance(scaling, YarnScaling)
    ratio = 10000.0 ** (-torch.arange(0, 64, 2) / 64) / scaling.frequencies(64, 10000.0)
    assert ratio[:10].allclose(torch.ones(10)) and ratio[-8:].allclose(torch.full((8,), 40.0))
    assert (ratio.diff() >= -1e-4).all(), "pairs between go over steadily"


def test_deepseeks_two_factors() -> None:
    """mscale 1 over mscale_all_dim 0.8 for cosines and sines, mscale_all_dim squared for the scores: 0.1 * m * ln 40 + 1 each."""
    scaling = rope_config(config_values(DEEPSEEK_V3)).scaling
    assert isinstance(scaling, YarnScaling)
    assert scaling.attention_factor == pytest.approx(1.3688879454 / 1.2951103563, rel=1e-9)
    assert scaling.score_factor == pytest.approx(1.2951103563**2, rel=1e-9)


def test_yarn_without_a_factor_takes_the_ratio_of_the_lengths() -> None:
    rope = {key: value for key, value in GPT_OSS.items() if key != "factor"}
    assert rope_config(config_values(rope)).scaling == rope_config(config_values(GPT_OSS)).scaling


def test_config_as_transformers_4_wrote_it() -> None:
    older = {
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "rope_scaling": {key: value for key, value in LLAMA_31.items() if key != "rope_theta"},
    }
    assert rope_config(ConfigValues(Path("config.json"), json.loads(json.dumps(older)))) == rope_config(config_values(LLAMA_31))


def test_angles_that_are_kept_are_those_that_are_computed() -> None:
    """However far the positions before have gone, bit for bit."""
    theta, dim = 100_000.0, 64
    rotary, positions = (
        RotaryEmbedding(dim, theta),
        [torch.tensor([3]), torch.tensor([1023, 0, 1024]), torch.tensor([70_000, 5])],
    )
    for some in [*positions, *positions]:
        angles = some.float().unsqueeze(1) * plain_frequencies(dim, theta)
        cos, sin = rotary(some)
        assert torch.equal(cos, angles.cos()) and torch.equal(sin, angles.sin())
