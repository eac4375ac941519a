"""AITER's Triton attention over blocks, in the interpreter, against float32: every kind of row that a step can have."""

from collections.abc import Sequence

import pytest
import torch

from model_worker.kernels.aiter.triton_calls import KVCache, TritonCalls
from tests.aiter import references
from tests.aiter.references import PagedContext, error, ints, normal

ATTENTION_ERROR_MAX = 0.01
"""Of averages of normal values: half a step of bfloat16 at 2 is 0.0039, and probabilities are rounded to bfloat16 before they meet the values."""

FP8_ERROR_MAX = 0.15
"""8-bit floats have 3 bits behind the point: values up to 4 are rounded by up to 0.125."""

HEADS, KV_HEADS, SIZE = 4, 2, 32
SCALE = SIZE**-0.5


def contexts(lengths: Sequence[int], block_size: int = 16) -> tuple[PagedContext, list[torch.Tensor]]:
    keys = PagedContext.of(lengths, KV_HEADS, SIZE, block_size, seed=1)
    return keys, [normal(length, KV_HEADS, SIZE, seed=50 + row) for row, length in enumerate(lengths)]


KINDS = {
    "prefill": ([13, 5], [13, 5]),
    "one_token": ([1], [1]),
    "chunk_behind_a_cached_prefix": ([7, 3], [39, 20]),
    "decode": ([1, 1, 1], [33, 17, 16]),
    "decode_in_parts": ([1], [520]),
    "chunk_in_parts": ([3], [530]),
    "mixed": ([1, 6, 1, 2], [40, 6, 17, 34]),
    "several_queries_a_row": ([3, 3], [35, 18]),
}
"""Queries and context of each row. In parts: contexts above 512, which the kernel splits and joins."""


@pytest.mark.parametrize("kind", KINDS)
def test_rows(kind: str, triton_calls: TritonCalls) -> None:
    queries, lengths = KINDS[kind]
    keys, values = contexts(lengths)
    query = normal(sum(queries), HEADS, SIZE, seed=9)
    found = triton_calls.attention(query, references.cache_of(keys, values), keys.rows(queries), SCALE, None, None)
    expected = [
        references.attention(part, k, v, SCALE) for part, k, v in zip(query.split(queries), keys.contexts, values, strict=True)
    ]
    assert error(found, torch.cat(expected)) < ATTENTION_ERROR_MAX


@pytest.mark.parametrize("queries", [[1, 1], [9, 4]], ids=["decode", "chunk"])
@pytest.mark.parametrize(("window", "has_sinks"), [(8, False), (None, True), (20, True)])
def test_windows_and_sinks(queries: list[int], window: int | None, has_sinks: bool, triton_calls: TritonCalls) -> None:
    keys, values = contexts([41, 18])
    query = normal(sum(queries), HEADS, SIZE, seed=9)
    sinks = normal(HEADS, seed=10) if has_sinks else None
    found = triton_calls.attention(query, references.cache_of(keys, values), keys.rows(queries), SCALE, window, sinks)
    expected = [
        references.attention(part, k, v, SCALE, window, sinks)
        for part, k, v in zip(query.split(queries), keys.contexts, values, strict=True)
    ]
    assert error(found, torch.cat(expected)) < ATTENTION_ERROR_MAX


@pytest.mark.parametrize("queries", [[1, 1], [9, 4]], ids=["decode", "chunk"])
@pytest.mark.each_arch
def test_a_cache_of_8_bit_floats(queries: list[int], triton_calls: TritonCalls) -> None:
    keys, values = contexts([33, 18])
    query = normal(sum(queries), HEADS, SIZE, seed=9)
    whole = references.cache_of(keys, values)
    key_scale, value_scale = torch.tensor([0.5]), torch.tensor([0.25])
    narrow = KVCache(
        (whole.keys / key_scale).to(triton_calls.library.fp8),
        (whole.values / value_scale).to(triton_calls.library.fp8),
        key_scale,
        value_scale,
    )
    found = triton_calls.attention(query, narrow, keys.rows(queries), SCALE, None, None)
    expected = [
        references.attention(part, k, v, SCALE) for part, k, v in zip(query.split(queries), keys.contexts, values, strict=True)
    ]
    assert error(found, torch.cat(expected)) < FP8_ERROR_MAX


@pytest.mark.parametrize("block_size", [32, 64])
def test_larger_blocks(block_size: int, triton_calls: TritonCalls) -> None:
    keys, values = contexts([70, 33], block_size)
    query = normal(6, HEADS, SIZE, seed=9)
    found = triton_calls.attention(query, references.cache_of(keys, values), keys.rows([5, 1]), SCALE, None, None)
    expected = [
        references.attention(part, k, v, SCALE) for part, k, v in zip(query.split([5, 1]), keys.contexts, values, strict=True)
    ]
    assert error(found, torch.cat(expected)) < ATTENTION_ERROR_MAX


LATENT_RANK, ROTATED = 512, 64


@pytest.mark.parametrize("heads", [4, 16])
def test_latent_vectors_as_keys_and_values(heads: int, triton_calls: TritonCalls) -> None:
    lengths = [20, 9]
    latents = PagedContext.of(lengths, 1, LATENT_RANK + ROTATED, seed=3)
    pool = latents.laid_out(latents.contexts).flatten(0, 1)
    query = normal(2, heads, LATENT_RANK + ROTATED, seed=4)
    scale = 192**-0.5
    slots = torch.cat([latents.slots(row, length) for row, length in enumerate(lengths)]).int()
    found = triton_calls.latent_attention(query, pool, LATENT_RANK, (ints(0, 20, 29), slots), scale, num_splits=4)
    expected = [
        references.attention(part, context, context[..., :LATENT_RANK], scale)
        for part, context in zip(query.split(1), latents.contexts, strict=True)
    ]
    assert error(found, torch.cat(expected)) < ATTENTION_ERROR_MAX


def test_chosen_latent_vectors(triton_calls: TritonCalls) -> None:
    lengths, queries, heads, chosen_max = [40, 21], [1, 2], 16, 16
    latents = PagedContext.of(lengths, 1, LATENT_RANK + ROTATED, seed=3)
    query = normal(3, heads, LATENT_RANK + ROTATED, seed=4)
    scale = 192**-0.5
    order = torch.Generator().manual_seed(5)
    positions = [torch.randperm(40, generator=order)[:16], torch.randperm(20, generator=order)[:16], torch.arange(9)]
    chosen = torch.full((3, chosen_max), -1, dtype=torch.int32)
    for token, (row, own) in enumerate(zip([0, 1, 1], positions, strict=True)):
        chosen[token, : len(own)] = latents.slots(row, lengths[row])[own]
    found = triton_calls.chosen_latent_attention(
        query, latents.laid_out(latents.contexts), LATENT_RANK, chosen, latents.rows(queries), scale
    )
    expected = []
    for token, (row, own) in enumerate(zip([0, 1, 1], positions, strict=True)):
        context = latents.contexts[row][own]
        expected.append(references.attention(query[token : token + 1], context, context[..., :LATENT_RANK], scale))
    assert error(found, torch.cat(expected)) < ATTENTION_ERROR_MAX
