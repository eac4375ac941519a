"""Each operation of the Triton flavour on AITER's real kernels, in the interpreter, against the torch backend in float32 on the same 16-bit numbers."""

import pytest
import torch
from torch import Tensor

from model_worker.kernels.aiter.library import AiterLibrary, AiterUnavailable
from model_worker.kernels.aiter.triton_backend import AiterTritonKernels
from model_worker.kernels.interface import ClampedExperts
from model_worker.kernels.quantization import Quantization
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.placement import Placement
from tessera.values.config import ConfigError

TORCH = TorchKernels()
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""The largest relative error of a rounded number. Results are rounded once, and what went into them a few times."""


@pytest.fixture(params=list(ROUNDING), ids=["bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.fixture
def kernels(arch: str, dtype: torch.dtype) -> AiterTritonKernels:
    return make(arch, dtype)


def make(arch: str, dtype: torch.dtype, quantization: Quantization = Quantization.NONE) -> AiterTritonKernels:
    return AiterTritonKernels(AiterLibrary(arch), Placement(torch.device("cpu"), dtype), quantization)


@pytest.fixture
def random(dtype: torch.dtype) -> "Random":
    return Random(dtype)


class Random:
    """Normal numbers of 16 bits."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._generator = torch.Generator().manual_seed(5)

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=self._generator)).to(self._dtype)


def is_close(found: Tensor, expected: Tensor, roundings: float = 4.0) -> bool:
    """Whether `found`, of 16 bits, is `expected`, float32, but for so many roundings of the largest of it."""
    assert found.shape == expected.shape and expected.dtype == torch.float32
    return float((found.float() - expected).abs().max()) <= roundings * ROUNDING[found.dtype] * float(expected.abs().max())


@pytest.mark.parametrize("is_biased", [False, True])
def test_linear(kernels: AiterTritonKernels, random: Random, *, is_biased: bool) -> None:
    x, weight, bias = random(5, 64), random(64, 96, scale=0.1).t(), random(96) if is_biased else None
    expected = TORCH.linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert is_close(kernels.linear(x, weight, bias), expected)
    assert is_close(kernels.pack(weight)(x, bias), expected)


def test_linear_per_head(kernels: AiterTritonKernels, random: Random) -> None:
    x, weight = random(5, 3, 16), random(3, 24, 16, scale=0.1)
    assert is_close(kernels.linear_per_head(x, weight), TORCH.linear_per_head(x.float(), weight.float()))


def test_norms_of_rows_of_a_wider_tensor(kernels: AiterTritonKernels, random: Random) -> None:
    x, weight, bias = random(5, 96)[:, 16:80], random(64), random(64)
    assert is_close(kernels.rms_norm(x, weight, 1e-5), TORCH.rms_norm(x.float(), weight.float(), 1e-5))
    expected = TORCH.layer_norm(x.float(), weight.float(), bias.float(), 1e-5)
    assert is_close(kernels.layer_norm(x, weight, bias, 1e-5), expected)


def test_the_norm_of_heads(kernels: AiterTritonKernels, random: Random) -> None:
    x, weight = random(5, 6, 32)[:, 1:5], random(32)
    assert is_close(kernels.rms_norm(x, weight, 1e-5), TORCH.rms_norm(x.float(), weight.float(), 1e-5))


def test_the_norm_of_a_sum(kernels: AiterTritonKernels, random: Random) -> None:
    x, residual, weight = random(5, 64), random(5, 64), random(64)
    normed, total = kernels.add_rms_norm(x, residual, weight, 1e-5)
    expected = TORCH.add_rms_norm(x.float(), residual.float(), weight.float(), 1e-5)
    assert is_close(normed, expected[0]) and is_close(total, expected[1])


def test_rotation(kernels: AiterTritonKernels, random: Random) -> None:
    x, angles = random(5, 3, 32), 7.0 * torch.rand(5, 16)
    expected = TORCH.rotary_embedding(x.float(), angles.cos(), angles.sin())
    assert is_close(kernels.rotary_embedding(x, angles.cos(), angles.sin()), expected)


def test_silu_and_mul(kernels: AiterTritonKernels, random: Random) -> None:
    x = random(5, 64)
    assert is_close(kernels.silu_and_mul(x), TORCH.silu_and_mul(x.float()))


@pytest.mark.parametrize("tokens", [3, 70])
def test_experts_of_which_some_are_elsewhere(kernels: AiterTritonKernels, random: Random, tokens: int) -> None:
    ids, weights = _chosen(tokens)
    x, gate_up, down = random(tokens, 32), random(4, 32, 64, scale=0.2).transpose(1, 2), random(4, 32, 32, scale=0.2)
    expected = TORCH.experts(x.float(), ids, weights, gate_up.float(), down.float())
    assert is_close(kernels.experts(x, ids, weights, gate_up, down), expected)


def test_clamped_experts_of_which_some_are_elsewhere(kernels: AiterTritonKernels, random: Random) -> None:
    ids, weights = _chosen(5)
    x, tensors = random(5, 32), (random(4, 64, 32), random(4, 64), random(4, 32, 32, scale=0.2), random(4, 32))
    exact = ClampedExperts(*(tensor.float() for tensor in tensors), alpha=1.702, limit=1.5)
    expected = TORCH.clamped_experts(x.float(), ids, weights, exact)
    found = kernels.clamped_experts(x, ids, weights, ClampedExperts(*tensors, alpha=1.702, limit=1.5))
    assert is_close(found, expected)


def _chosen(tokens: int) -> tuple[Tensor, Tensor]:
    """Two of six experts for each token, of which those from 0 to 3 are here."""
    scores = torch.rand(tokens, 6, generator=torch.Generator().manual_seed(2))
    weights, ids = scores.topk(2, dim=1)
    return ids - 1, weights


@pytest.mark.each_arch
@pytest.mark.parametrize("rows", [64, 96, 160])
@pytest.mark.parametrize("quantization", [Quantization.FP8, Quantization.FP8_BLOCK])
def test_linear_in_8_bits(arch: str, quantization: Quantization, rows: int) -> None:
    """Both factors are off by up to 2 ** -4 of themselves: a sum of 256 products by some per cent of its spread."""
    random = Random(torch.bfloat16)
    x, weight, bias = random(5, 256), random(256, rows, scale=256**-0.5).t(), random(rows)
    expected = TORCH.linear(x.float(), weight.float(), bias.float())
    found = make(arch, torch.bfloat16, quantization).pack(weight)(x, bias)
    errors = (found.float() - expected) / expected.std()
    assert errors.std() < 0.04 and errors.abs().max() < 0.2


@pytest.mark.each_arch
@pytest.mark.parametrize("quantization", [Quantization.FP8, Quantization.FP8_BLOCK])
def test_a_token_of_zeros_in_8_bits(arch: str, quantization: Quantization) -> None:
    """As one whose embedding is zero."""
    x, weight = torch.zeros(2, 128, dtype=torch.bfloat16), Random(torch.bfloat16)(32, 128)
    assert not make(arch, torch.bfloat16, quantization).pack(weight)(x, None).any()


def test_a_weight_that_128_does_not_divide_stays_in_16_bits(arch: str) -> None:
    random = Random(torch.bfloat16)
    x, weight = random(5, 96), random(64, 96)
    found = make(arch, torch.bfloat16, Quantization.FP8_BLOCK).pack(weight)(x, None)
    assert is_close(found, TORCH.linear(x.float(), weight.float(), None))


def test_an_architecture_that_aiter_is_not_tuned_for_is_refused(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = AiterLibrary("gfx1201")
    monkeypatch.setattr("aiter.ops.triton.utils._triton.arch_info.get_arch", lambda: "gfx1201")
    with pytest.raises(AiterUnavailable, match="no tile sizes for gfx1201"):
        AiterTritonKernels(library, Placement(torch.device("cpu"), torch.bfloat16))


def test_another_dtype_is_refused(arch: str) -> None:
    with pytest.raises(ConfigError, match=r"dtype is torch\.float32: aiter computes in bfloat16 or float16"):
        make(arch, torch.float32)
