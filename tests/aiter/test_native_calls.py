"""Every call of AITER's compiled kernels passes through AITER's own declaration, and comes back right from torch stand-ins. What is shown: names,
order, dtypes, shapes, layouts, output tensors. What is not: what the compiled kernels compute, none of which has run here."""

import os
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from model_worker.kernels.aiter.library import AiterLibrary
from model_worker.kernels.aiter.native_calls import LatentRows, NativeCalls, VarlenRows
from model_worker.kernels.aiter.probe import Machine
from tests.aiter.compiled_modules import Call

BF16_STEP = 2.0**-8
"""Relative to a number of bfloat16, the most that rounding takes off."""


@pytest.fixture
def calls(arch: str) -> NativeCalls:
    return NativeCalls(AiterLibrary(arch))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def assert_close(found: Tensor, expected: Tensor, bound: float = 2 * BF16_STEP) -> None:
    assert found.shape == expected.shape
    error = (found.float() - expected.float()).abs().max()
    assert error <= bound * max(1.0, float(expected.abs().max())), float(error)


def test_norms(calls: NativeCalls) -> None:
    x, residual, weight, bias = normal(5, 64), normal(5, 64), normal(64), normal(64)
    assert_close(calls.rmsnorm2d_fwd(x, weight, 1e-6), functional.rms_norm(x.float(), (64,), weight.float(), 1e-6))
    normed, total = calls.rmsnorm2d_fwd_with_add(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert_close(normed, functional.rms_norm(total.float(), (64,), weight.float(), 1e-6))
    expected = functional.layer_norm(x.float(), (64,), weight.float(), bias.float(), 1e-5)
    assert_close(calls.layernorm2d_fwd(x, weight, bias, 1e-5), expected)


@pytest.mark.parametrize("angles", [32, 16])
def test_rotation_of_the_first_elements_of_heads_in_a_wider_tensor(calls: NativeCalls, angles: int) -> None:
    whole = normal(4, 6, 64)
    before, heads = whole.clone(), whole[:, 1:5]
    cos, sin, positions = torch.rand(9, angles), torch.rand(9, angles), torch.tensor([8, 0, 3, 3])
    calls.rope_cached_positions_fwd_inplace(heads, cos, sin, positions)
    first, second = before[:, 1:5, : 2 * angles].float().chunk(2, -1)
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    assert_close(heads[..., : 2 * angles], torch.cat((first * c - second * s, second * c + first * s), -1))
    assert torch.equal(whole[:, ::5], before[:, ::5]) and torch.equal(heads[..., 2 * angles :], before[:, 1:5, 2 * angles :])


def caches(num_blocks: int, kv_heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = 16 // dtype.itemsize
    return torch.zeros(num_blocks, kv_heads, 128 // x, 16, x, dtype=dtype), torch.zeros(
        num_blocks, kv_heads, 16 // x, 128, x, dtype=dtype
    )


@pytest.mark.each_arch
@pytest.mark.parametrize("is_fp8", [False, True])
def test_paged_attention_over_what_was_written(calls: NativeCalls, arch: str, is_fp8: bool) -> None:
    kv_heads, lens, scales = 2, ints(21, 7), torch.tensor([0.5, 0.25])
    blocks = caches(5, kv_heads, AiterLibrary(arch).fp8 if is_fp8 else torch.bfloat16)
    tables = ints(3, 1, 0, 2).view(2, 2)
    qk, value = normal(28, 4 * kv_heads + kv_heads, 128), normal(28, kv_heads, 128)
    key = qk[:, 4 * kv_heads :]
    places = [(row, position) for row, length in enumerate(lens.tolist()) for position in range(length)]
    slots = torch.tensor([int(tables[row, position // 16]) * 16 + position % 16 for row, position in places])
    calls.reshape_and_cache(key, value, blocks, slots, scales)
    query = normal(2, 4 * kv_heads, 128)
    # What a scale is for: keys are read as they were written, so the query takes the scale of keys, the result that of values.
    units = torch.ones(5, kv_heads, 16) if is_fp8 else None
    factors = scales.tolist() if is_fp8 else (1.0, 1.0)
    found = calls.pa_fwd_asm(query * factors[0], blocks, tables, lens, units) * factors[1]
    first = 0
    for row, length in enumerate(lens.tolist()):
        keys, values = (each[first : first + length].float().repeat_interleave(4, 1) for each in (key, value))
        weights = (torch.einsum("hd,thd->ht", query[row].float(), keys) / 128**0.5).softmax(-1)
        assert_close(found[row], torch.einsum("ht,thd->hd", weights, values), 0.12 if is_fp8 else 0.02)
        first += length


def test_prefill_over_longer_contexts(calls: NativeCalls) -> None:
    query, key, value = normal(5, 4, 128), normal(12, 2, 128), normal(12, 2, 128)
    rows = VarlenRows(ints(0, 3, 5), ints(0, 8, 12), 3, 8)
    found = calls.flash_attn_varlen_func(query, key, value, rows, 128**-0.5)
    expected = []
    for queries, context in ((slice(0, 3), slice(0, 8)), (slice(3, 5), slice(8, 12))):
        keys, values = (each[context].float().repeat_interleave(2, 1).transpose(0, 1) for each in (key, value))
        count, length = queries.stop - queries.start, context.stop - context.start
        mask = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        heads = query[queries].float().transpose(0, 1)
        expected.append(functional.scaled_dot_product_attention(heads, keys, values, attn_mask=mask).transpose(0, 1))
    assert_close(found, torch.cat(expected))


@pytest.mark.parametrize("counts", [(1, 1), (3, 2)])
def test_latent_attention(calls: NativeCalls, counts: tuple[int, int]) -> None:
    cache, slots = torch.zeros(4, 16, 576).bfloat16(), torch.randperm(64)[:12]
    latent = normal(12, 576)
    calls.concat_and_cache_mla(latent[:, :512], latent[:, 512:], cache, slots, torch.ones(1))
    vectors = cache.view(-1, 1, 1, 576)
    query, lens = normal(sum(counts), 16, 576), (7, 5)
    rows = LatentRows(ints(0, counts[0], sum(counts)), ints(0, 7, 12), slots.int(), ints(1, 1), max(counts))
    call = calls.mla_decode_fwd if counts == (1, 1) else calls.mla_prefill_fwd
    found, first, context = call(query, vectors, rows, 0.05), 0, 0
    for count, length in zip(counts, lens, strict=True):
        keys = latent[context : context + length].float()
        mask = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        scores = torch.einsum("qhd,kd->hqk", query[first : first + count].float(), keys) * 0.05
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        expected = torch.einsum("hqk,kd->qhd", weights, keys[:, :512])
        assert_close(found[first : first + count], expected)
        first, context = first + count, context + length


def test_no_tensor_of_an_earlier_decode_is_read_again(calls: NativeCalls) -> None:
    """AITER remembers one by its arguments. A graph that read it would do so when it is gone."""
    rows = LatentRows(ints(0, 1), ints(0, 7), ints(*range(7)), ints(1), 1)
    for _ in range(2):
        calls.mla_decode_fwd(normal(1, 16, 576), normal(8, 1, 1, 576), rows, 0.05)
    assert import_module("aiter.mla").get_meta_param.cache_info().hits == 0


def test_silu_and_mul(calls: NativeCalls) -> None:
    x = normal(3, 64)
    gate, up = x.float().chunk(2, -1)
    assert_close(calls.silu_and_mul(x), functional.silu(gate) * up)


@pytest.mark.parametrize("renormalize", [False, True])
def test_routing(calls: NativeCalls, renormalize: bool) -> None:
    logits, bias = torch.randn(5, 16), torch.randn(16)
    ids, weights = calls.topk_softmax(logits, 4, renormalize)
    expected, best = logits.softmax(-1).topk(4)
    assert torch.equal(ids.long(), best) and ids.dtype == torch.int32
    assert_close(weights, expected / expected.sum(-1, keepdim=True) if renormalize else expected, 1e-6)
    ids, weights = calls.biased_grouped_topk(logits, bias, 3, (4, 2), renormalize, 2.5)
    scores = logits.sigmoid().gather(1, ids.long())
    assert_close(weights, 2.5 * (scores / scores.sum(-1, keepdim=True) if renormalize else scores), 1e-6)


def test_experts_with_some_that_are_elsewhere(calls: NativeCalls, recorded_calls: list[Call]) -> None:
    gate_up, down, x = normal(3, 64, 64) * 0.2, normal(3, 64, 32) * 0.2, normal(5, 64)
    ids = ints(0, 1, 2, 3, 3, 1, 2, 0, 1, 3).view(5, 2)
    factors = torch.rand(5, 2)
    shuffled = calls.shuffle_weight(gate_up), calls.shuffle_weight(down)
    found = calls.fused_moe(x, shuffled, ids, factors, ints(1, 1, 1, 0))
    expected = torch.zeros(5, 64)
    for token, place in ((token, place) for token in range(5) for place in range(2)):
        expert = int(ids[token, place])
        if expert < 3:
            gate, up = (gate_up[expert].float() @ x[token].float()).chunk(2)
            inner = (functional.silu(gate) * up).bfloat16().float()
            expected[token] += factors[token, place] * (down[expert].float() @ inner)
    assert_close(found, expected, 0.02)
    assert "preshuffle_on" in recorded_calls[-1].module


@pytest.mark.parametrize("has_bias", [False, True])
def test_product(calls: NativeCalls, has_bias: bool) -> None:
    x, weight, bias = normal(5, 64), normal(32, 64), normal(32) if has_bias else None
    expected = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert_close(calls.mm(x, weight, bias), expected)


@pytest.mark.each_arch
def test_products_of_8_bit_floats(calls: NativeCalls, arch: str) -> None:
    x, weight = normal(5, 256), normal(128, 256)
    expected = x.float() @ weight.float().T
    (quantized, scale), (quantized_weight, weight_scale) = calls.per_token_quant(x), calls.per_token_quant(weight)
    assert quantized.dtype == AiterLibrary(arch).fp8
    found = calls.gemm_a8w8_bpreshuffle(quantized, calls.shuffle_weight(quantized_weight), scale, weight_scale)
    assert_close(found, expected, 0.05)
    quantized, scale = calls.per_group_quant(x)
    assert scale.shape == (5, 2)
    top = torch.finfo(quantized.dtype).max
    block_scale = weight.float().view(1, 128, 2, 128).abs().amax((1, 3)) / top
    blocks = (weight.float().view(1, 128, 2, 128) / block_scale[:, None, :, None]).view(128, 256).to(quantized.dtype)
    assert_close(calls.gemm_a8w8_blockscale(quantized, blocks, scale, block_scale), expected, 0.05)


def test_sampling(calls: NativeCalls) -> None:
    logits, exponentials = torch.randn(3, 50), torch.rand(3, 50) + 0.1
    temperatures = torch.tensor([0.0, 1.0, 0.5])
    found = calls.mixed_sample_outer_exponential(logits, exponentials, temperatures)
    race = (logits[1:] / temperatures[1:, None]).softmax(-1) / exponentials[1:]
    assert found.tolist() == [int(logits[0].argmax()), *race.argmax(-1).tolist()]


def test_the_machine_is_known_by_what_aiter_would_load(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = AiterLibrary(arch)
    monkeypatch.setenv("PATH", "")
    assert Machine.of(library) == Machine(arch, has_compiled=False)
    module = Path(os.environ["AITER_JIT_DIR"]) / "module_rmsnorm.so"
    module.touch()
    found = Machine.of(library)
    module.unlink()
    assert found == Machine(arch, has_compiled=True)
