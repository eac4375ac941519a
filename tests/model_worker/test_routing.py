"""Which experts a token goes through, against the formulas written out for one token."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_worker.kernels.torch_backend import TorchKernels
from model_worker.models.experts_config import ExpertsConfig

KERNELS = TorchKernels()


def choose(scores: list[float], count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda expert: -scores[expert])[:count]


def logits_of(num_experts: int, seed: int) -> torch.Tensor:
    return torch.randn(4, num_experts, generator=torch.Generator().manual_seed(seed))


def assert_rows(ids: torch.Tensor, weights: torch.Tensor, expected: list[dict[int, float]]) -> None:
    found = [dict(zip(*row, strict=True)) for row in zip(ids.tolist(), weights.tolist(), strict=True)]
    assert len(found) == len(expected)
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-5)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(num_experts=st.integers(2, 9), seed=st.integers(0, 99), renormalize=st.booleans(), data=st.data())
def test_softmax_over_all_experts_then_the_best(num_experts: int, seed: int, renormalize: bool, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, num_experts))
    logits = logits_of(num_experts, seed)
    expected = []
    for row in logits.tolist():
        total = sum(math.exp(logit) for logit in row)
        best = {expert: math.exp(row[expert]) / total for expert in choose(row, count)}
        norm = sum(best.values()) if renormalize else 1.0
        expected.append({expert: weight / norm for expert, weight in best.items()})
    assert_rows(*KERNELS.topk_softmax(logits, count, renormalize), expected)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(num_groups=st.integers(1, 4), size=st.integers(1, 4), seed=st.integers(0, 99), renormalize=st.booleans(), data=st.data())
def test_the_bias_decides_among_the_best_groups_but_weighs_nothing(
    num_groups: int, size: int, seed: int, renormalize: bool, data: st.DataObject
) -> None:
    chosen_groups = data.draw(st.integers(1, num_groups))
    count = data.draw(st.integers(1, chosen_groups * size))
    experts = ExpertsConfig(
        num_groups * size, count, 8, frozenset(), renormalize, num_groups=num_groups, num_groups_chosen=chosen_groups, scale=2.5
    )
    logits, bias = logits_of(num_groups * size, seed), logits_of(num_groups * size, seed + 100)[0]
    expected = []
    for row in logits.tolist():
        scores = [1 / (1 + math.exp(-logit)) for logit in row]
        biased = [score + extra for score, extra in zip(scores, bias.tolist(), strict=True)]
        groups = [biased[first : first + size] for first in range(0, len(biased), size)]
        best_groups = choose([sum(sorted(group)[-2:]) for group in groups], chosen_groups)
        allowed = [value if place // size in best_groups else -math.inf for place, value in enumerate(biased)]
        best = {expert: scores[expert] for expert in choose(allowed, count)}
        norm = sum(best.values()) if renormalize else 1.0
        expected.append({expert: 2.5 * weight / norm for expert, weight in best.items()})
    assert_rows(*KERNELS.biased_grouped_topk(logits, bias, experts), expected)


def test_a_token_is_the_weighted_sum_of_its_experts_whatever_is_beside_it() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 12, generator=generator)
    gate_up, down = torch.randn(4, 16, 12, generator=generator), torch.randn(4, 12, 8, generator=generator)
    ids = torch.tensor([[0, 2], [2, 0], [3, 1], [2, 3], [0, 2]])
    weights = torch.rand(5, 2, generator=generator)
    found = KERNELS.experts(x, ids, weights, gate_up, down)
    for token in range(5):
        expected = torch.zeros(12)
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            expected += weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))
        torch.testing.assert_close(found[token], expected, rtol=1e-4, atol=1e-4)
        one = slice(token, token + 1)
        alone = KERNELS.experts(x[one], ids[one], weights[one], gate_up, down)
        torch.testing.assert_close(alone, found[one], rtol=1e-5, atol=1e-5)
