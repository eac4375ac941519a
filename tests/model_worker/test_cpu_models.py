"""Whole models on the compiled CPU kernels: every architecture against torch, and one context has one set of logits however it was come by."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from model_worker.kernels.cpu.backend import CpuKernels, can_read_cache
from model_worker.kernels.cpu.library import cpu_library
from model_worker.kernels.interface import PlainLayer
from model_worker.kv_pool import KVPool
from model_worker.layers.decoder import Decoder
from model_worker.models.causal_lm import CausalLM
from model_worker.models.model_config import ModelConfig
from tests.aiter.model_pairs import worst_error
from tests.model_worker.paged_driver import PagedDriver, build_batch
from tests.model_worker.random_llama import build, config
from tests.model_worker.shaped_models import tiny_shapes

LIBRARY = cpu_library(2)
BOUNDS = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Of a difference in logits, in their standard deviations: what another order of sums gives, and what a KV cache of 11 bits and inputs of 8 add."""


COMPARED = [
    (each, dtype) for dtype in BOUNDS for each in tiny_shapes() if (each, dtype) != ("DeepseekV32ForCausalLM", torch.bfloat16)
]
"""That one attends to the positions that rank highest: where inputs are rounded as much, they are others."""


@pytest.mark.parametrize(("architecture", "dtype"), COMPARED, ids=str)
def test_every_architecture_gives_the_logits_of_torch(architecture: str, dtype: torch.dtype) -> None:
    shape = tiny_shapes()[architecture]
    kernels = CpuKernels(LIBRARY, dtype, reads_cache=can_read_cache(shape, 16))
    assert worst_error(shape, kernels) < BOUNDS[dtype]


SHAPES = {
    "gqa": config(),
    "biases": config(num_heads=4, num_kv_heads=4, head_dim=24, attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    "qk-norm": config(architecture="Qwen3ForCausalLM", qk_norm=True),
    "long-sums": config(hidden_size=704, intermediate_size=1536, num_layers=1, num_heads=9, num_kv_heads=3, head_dim=64),
}


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest) -> CausalLM:
    return build(SHAPES[request.param], CpuKernels(LIBRARY, torch.float16))


def driver(model: CausalLM) -> PagedDriver:
    kernels = CpuKernels(LIBRARY, torch.float16)
    return PagedDriver(model, KVPool.of_shape(model.config.kv_shape, 128, 16, kernels.kv_store()))


def test_a_context_has_the_same_bits_however_it_was_computed(model: CausalLM) -> None:
    """Whole, in chunks beside others, and token by token among decodes."""
    draw = random.Random(5)
    ids = draw.choices(range(199), k=300)
    alone = driver(model)
    expected = alone.step([(alone.start(ids), len(ids))], every_logit=True)
    among = driver(model)
    run, others = among.start(ids), [among.start(draw.choices(range(199), k=60)) for _ in range(3)]
    among.step([(others[0], 40), (run, 130)])
    among.step([(others[1], 17), (others[2], 40), (run, 160)])
    for token in range(290, 300):
        logits = among.step([(others[0], 1), (run, 1), (others[2], 1)])
        assert torch.equal(logits[1], expected[token]), token


@pytest.mark.parametrize("wanted", [[0], [99, 40, 3], [150, 7, 7, 120, 159], []], ids=str)
def test_some_tokens_have_the_bits_that_they_have_among_all(model: CausalLM, wanted: list[int]) -> None:
    """The last layer computes for some alone, in any order."""
    draw = random.Random(6)
    prompts = [draw.choices(range(199), k=count) for count in (100, 60)]
    logits = []
    for every_logit in (True, False):
        paged = driver(model)
        runs = [paged.start(ids) for ids in prompts]
        for run in runs:
            run.table += paged.take_blocks(7)
        batch = build_batch([(run, len(run.ids)) for run in runs], 16, every_logit=True)
        logits.append(
            model.forward(
                batch if every_logit else replace(batch, logits_rows=torch.tensor(wanted, dtype=torch.int64)), paged.kv
            )
        )
    assert torch.equal(logits[1], logits[0][wanted])


class LayerByLayer(CpuKernels):
    """Runs layers one by one."""

    def stack_layers(self, layers: Sequence[PlainLayer]) -> None:
        return None


@pytest.mark.parametrize("in_8_bits", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_layers_in_one_piece_are_those_one_by_one(shape: ModelConfig, in_8_bits: bool) -> None:
    """Bit for bit, what is tapped in between too, over one pool and then another."""
    ids = random.Random(6).choices(range(199), k=70)
    results = []
    for kind in (CpuKernels, LayerByLayer):
        kernels = kind(LIBRARY, torch.float16, in_8_bits=in_8_bits)
        model = build(shape, kernels)
        assert isinstance(model, Decoder)
        taps = sorted({0, shape.num_layers - 1})
        for _ in range(2):
            kv = KVPool.of_shape(shape.kv_shape, 16, 16, kernels.kv_store())
            driven = PagedDriver(model, kv)
            run = driven.start(ids)
            first = driven.step([(run, 60)], every_logit=True)
            run.table += driven.take_blocks(1)
            logits, tapped = model.forward_tapped(build_batch([(run, 10)], 16), kv, taps)
        results.append((first, logits, tapped))
    for whole, single in zip(*results, strict=True):
        assert torch.equal(whole, single)
    assert results[0][2].shape == (10, len(taps) * shape.hidden_size)
