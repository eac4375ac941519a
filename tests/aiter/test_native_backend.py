"""Each operation of the native flavour, through AITER's declarations to torch stand-ins, against the torch backend in float32 on the same numbers."""

import pytest
import torch
from torch import Tensor

from model_worker.batch import Batch
from model_worker.group import ALONE, Group
from model_worker.kernels.aiter.library import AiterLibrary, AiterUnavailable
from model_worker.kernels.aiter.native_backend import AiterNativeKernels
from model_worker.kernels.quantization import Quantization
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kv_pool import KVPool
from model_worker.kv_shape import KVShape
from model_worker.models.experts_config import ExpertsConfig
from model_worker.placement import Placement
from tessera.values.config import ConfigError
from tests.aiter.compiled_modules import Call

TORCH = TorchKernels()
ROUNDINGS = 4 * 2.0**-8
"""Of bfloat16: a few, each of at most so much of the largest number."""

IN_BFLOAT16 = Placement(torch.device("cpu"), torch.bfloat16)


class Two:
    """The first of two ranks. See `Group`; nothing is exchanged."""

    rank, size = 0, 2


def make(arch: str, quantization: Quantization = Quantization.NONE, peers: Group = ALONE) -> AiterNativeKernels:
    return AiterNativeKernels(AiterLibrary(arch), IN_BFLOAT16, quantization, peers=peers)


@pytest.fixture
def kernels(arch: str) -> AiterNativeKernels:
    torch.manual_seed(5)
    return make(arch)


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape)).bfloat16()


def is_close(found: Tensor, expected: Tensor, bound: float = ROUNDINGS) -> bool:
    assert found.shape == expected.shape and expected.dtype == torch.float32
    return float((found.float() - expected).abs().max()) <= bound * float(expected.abs().max())


@pytest.mark.parametrize("is_biased", [False, True])
def test_linear(kernels: AiterNativeKernels, recorded_calls: list[Call], *, is_biased: bool) -> None:
    """A weight that lies by columns, as it was loaded, is torch's to multiply by, until it is packed."""
    x, weight, bias = normal(5, 64), normal(64, 96, scale=0.1).t(), normal(96) if is_biased else None
    expected = TORCH.linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert is_close(kernels.linear(x, weight, bias), expected)
    assert is_close(kernels.pack(weight)(x, bias), expected)
    assert is_close(kernels.linear(x, weight.contiguous(), bias), expected)


def test_linear_per_head(kernels: AiterNativeKernels) -> None:
    x, weight = normal(5, 3, 16), normal(3, 24, 16, scale=0.1)
    assert is_close(kernels.linear_per_head(x, weight), TORCH.linear_per_head(x.float(), weight.float()))


def test_norms_of_rows_and_of_heads_of_a_wider_tensor(kernels: AiterNativeKernels) -> None:
    x, weight, bias = normal(5, 96)[:, 16:80], normal(64), normal(64)
    assert is_close(kernels.rms_norm(x, weight, 1e-5), TORCH.rms_norm(x.float(), weight.float(), 1e-5))
    expected = TORCH.layer_norm(x.float(), weight.float(), bias.float(), 1e-5)
    assert is_close(kernels.layer_norm(x, weight, bias, 1e-5), expected)
    heads, weight = normal(5, 6, 32)[:, 1:5], normal(32)
    assert is_close(kernels.rms_norm(heads, weight, 1e-5), TORCH.rms_norm(heads.float(), weight.float(), 1e-5))


def test_rotation_leaves_what_it_is_given(kernels: AiterNativeKernels) -> None:
    x, angles = normal(5, 3, 32), 7.0 * torch.rand(5, 16)
    before = x.clone()
    expected = TORCH.rotary_embedding(x.float(), angles.cos(), angles.sin())
    assert is_close(kernels.rotary_embedding(x, angles.cos(), angles.sin()), expected)
    assert torch.equal(x, before)


def test_silu_and_mul(kernels: AiterNativeKernels) -> None:
    x = normal(5, 96)[:, :64]
    assert is_close(kernels.silu_and_mul(x), TORCH.silu_and_mul(x.float()))


@pytest.mark.parametrize("renormalize", [False, True])
def test_routing(kernels: AiterNativeKernels, recorded_calls: list[Call], *, renormalize: bool) -> None:
    """Three groups are none that AITER knows: those are torch's."""
    logits, bias = normal(5, 12), torch.randn(12)
    ids, weights = kernels.topk_softmax(logits, 4, renormalize)
    expected_ids, expected = TORCH.topk_softmax(logits, 4, renormalize)
    assert torch.equal(ids, expected_ids) and torch.allclose(weights, expected)
    for groups in (1, 4, 3):
        experts = ExpertsConfig(
            12, 3, 64, frozenset(), renormalize, num_groups=groups, num_groups_chosen=min(2, groups), scale=2.5
        )
        ids, weights = kernels.biased_grouped_topk(logits, bias, experts)
        expected_ids, expected = TORCH.biased_grouped_topk(logits, bias, experts)
        assert torch.equal(ids, expected_ids) and torch.allclose(weights, expected)
    assert [call.operator for call in recorded_calls] == ["topk_softmax", "biased_grouped_topk", "biased_grouped_topk"]


@pytest.mark.parametrize(("vocab", "is_compiled"), [(96, True), (97, False)])
def test_best_tokens(kernels: AiterNativeKernels, recorded_calls: list[Call], vocab: int, *, is_compiled: bool) -> None:
    """Of a vocabulary that its vectors do not divide AITER would read on: that is torch's."""
    logits = torch.randn(5, vocab).round()
    logits[2, 7] = torch.nan
    found, expected = kernels.best_tokens(logits), TORCH.best_tokens(logits)
    some = [0, 1, 3, 4]
    assert torch.equal(found.token_ids[some].long(), expected.token_ids[some])
    assert torch.equal(found.logits[some], expected.logits[some])
    assert found.is_finite.tolist() == expected.is_finite.tolist() == [True, True, False, True, True]
    assert [call.operator for call in recorded_calls] == ["mixed_sample_outer_exponential"] * is_compiled


@pytest.mark.parametrize("is_spread", [False, True])
def test_experts(arch: str, *, is_spread: bool) -> None:
    """Of six experts four are here, where they are spread over peers."""
    torch.manual_seed(5)
    scores = torch.rand(7, 6 if is_spread else 4)
    weights, ids = scores.topk(2, dim=1)
    x, gate_up, down = normal(7, 64), normal(4, 64, 64, scale=0.2).transpose(1, 2), normal(4, 64, 32, scale=0.2)
    total = make(arch, peers=Two() if is_spread else ALONE).pack_experts(gate_up, down)  # type: ignore[arg-type]  # it exchanges nothing
    expected = TORCH.experts(x.float(), ids, weights, gate_up.float(), down.float())
    assert is_close(total(x, ids, weights), expected, 2 * ROUNDINGS)


@pytest.mark.parametrize("quantization", [Quantization.FP8, Quantization.FP8_BLOCK])
@pytest.mark.parametrize(("rows", "columns"), [(128, 256), (24, 256), (128, 96)])
def test_weights_of_sizes_that_8_bit_kernels_do_not_take_stay_as_they_are(
    arch: str, recorded_calls: list[Call], quantization: Quantization, rows: int, columns: int
) -> None:
    torch.manual_seed(5)
    x, weight, bias = normal(5, columns), normal(rows, columns, scale=0.1), normal(rows)
    found = make(arch, quantization).pack(weight)(x, bias)
    is_quantized = (rows, columns) == (128, 256)
    assert is_close(found, TORCH.linear(x.float(), weight.float(), bias.float()), 0.1 if is_quantized else ROUNDINGS)
    assert any(call.module.startswith("module_gemm_a8w8") for call in recorded_calls) == is_quantized


def one_decode(kv: KVPool) -> Batch:
    one, zero = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    return Batch(zero, zero, zero, torch.tensor([0, 1], dtype=torch.int32), one, torch.zeros(1, 1, dtype=torch.int32), 1, zero)


@pytest.mark.parametrize(
    ("shape", "block_size", "what"),
    [
        (KVShape(1, 2, 64), 16, "128 elements in blocks of 16, not of 64 in 16"),
        (KVShape(1, 2, 128), 32, "not of 128 in 32"),
        (KVShape(1, 1, 320, num_planes=1), 16, "reads 576 elements of bfloat16, not 320"),
    ],
)
def test_pools_that_only_triton_reads(kernels: AiterNativeKernels, shape: KVShape, block_size: int, what: str) -> None:
    """As those of draft models may be, which are not asked about when kernels are chosen."""
    kv = KVPool.of_shape(shape, 2, block_size, kernels.kv_store())
    with pytest.raises(AiterUnavailable, match=f"{what}.*choose kernels aiter-triton"):
        kernels.paged_attention(one_decode(kv), kv)


def test_what_only_triton_has_is_an_error_that_says_so(kernels: AiterNativeKernels) -> None:
    kv = KVPool.of_shape(KVShape(1, 2, 128), 2, 16, kernels.kv_store())
    for prepare in (kernels.windowed_attention, kernels.sparse_attention):
        with pytest.raises(AiterUnavailable, match="choose kernels aiter-triton"):
            prepare(one_decode(kv), kv)
    with pytest.raises(ConfigError, match=r"float16: kernels aiter-native compute in bfloat16"):
        AiterNativeKernels(AiterLibrary("gfx942"), Placement(torch.device("cpu"), torch.float16))
