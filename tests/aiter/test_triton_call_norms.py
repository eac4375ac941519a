"""AITER's Triton norms and activation, in the interpreter, against float32."""

import pytest
from torch.nn import functional

from model_worker.kernels.aiter.library import AiterUnavailable
from model_worker.kernels.aiter.triton_calls import TritonCalls
from tests.aiter import references
from tests.aiter.checkout import CHECKOUT
from tests.aiter.references import BFLOAT16_STEP, error, normal

EPS = 1e-6
LARGEST = 16.0
"""No element of a result below is larger: normal values times a normal weight."""

NORM_ERROR_MAX = LARGEST * BFLOAT16_STEP / 2 + 1e-3


@pytest.mark.parametrize("size", [64, 200, 576])
def test_rms_norm(size: int, triton_calls: TritonCalls) -> None:
    x, weight = normal(5, size, seed=1), normal(size, seed=2)
    assert error(triton_calls.rms_norm(x, weight, EPS), references.rms_norm(x, weight, EPS)) < NORM_ERROR_MAX


def test_rms_norm_of_a_sum(triton_calls: TritonCalls) -> None:
    x, residual, weight = normal(5, 256, seed=1), normal(5, 256, seed=2), normal(256, seed=3)
    normed, total = triton_calls.add_rms_norm(x, residual, weight, EPS)
    assert error(total, x.float() + residual.float()) <= 8 * BFLOAT16_STEP / 2
    assert error(normed, references.rms_norm(x.float() + residual.float(), weight, EPS)) < NORM_ERROR_MAX


def test_layer_norm(triton_calls: TritonCalls) -> None:
    x, weight, bias = normal(5, 128, seed=1), normal(128, seed=2), normal(128, seed=3)
    expected = functional.layer_norm(x.float(), (128,), weight.float(), bias.float(), EPS)
    assert error(triton_calls.layer_norm(x, weight, bias, EPS), expected) < NORM_ERROR_MAX


def test_silu_and_mul_which_the_published_wheel_has_not(triton_calls: TritonCalls) -> None:
    x = normal(5, 2 * 96, seed=1)
    assert triton_calls.has_silu_and_mul == (CHECKOUT is not None)
    if CHECKOUT is None:
        with pytest.raises(AiterUnavailable, match="fused_silu_mul"):
            triton_calls.silu_and_mul(x)
        return
    gate, linear = x.float().chunk(2, -1)
    assert error(triton_calls.silu_and_mul(x), functional.silu(gate) * linear) < NORM_ERROR_MAX
