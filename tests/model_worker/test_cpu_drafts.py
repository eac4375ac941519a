"""Whoever drafts over the pool of the compiled CPU kernels: the same tokens as without drafts, and drafts like those of torch."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model_worker.kernels.cpu.backend import CpuKernels
from model_worker.kernels.cpu.library import cpu_library
from model_worker.kernels.interface import Kernels
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kv_pool import KVPool
from model_worker.layers.decoder import Decoder
from model_worker.models.mtp_head import MtpHead
from model_worker.weights.open_model import load_model, open_model
from services.worker.drafter import LoadedModel
from tests.model_worker.paged_driver import PagedDriver, build_batch
from tests.model_worker.random_llama import build, fill
from tests.model_worker.shaped_models import tiny_shapes
from tests.parity.eagle_reference import EagleReference
from tests.parity.mode import PLAIN, SPECULATIVE, Mode, drafter_modes
from tests.parity.tiny_models import VOCAB_SIZE, save_random, tiny_configs

PROMPTS = [[(5 * place + 3 * row) % VOCAB_SIZE for place in range(length)] for row, length in enumerate((9, 24, 2, 40))]
COUNTS = [24, 9, 20, 16]


def ours(dtype: torch.dtype = torch.float16) -> CpuKernels:
    return CpuKernels(cpu_library(1), dtype)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_change_no_token(tmp_path: Path, temperature: float) -> None:
    """Not even one that is nearly tied: each row has the same bits in a batch of any size."""
    model = save_random(tiny_configs()["LlamaForCausalLM"][0], tmp_path / "model")
    EagleReference(model, (0, 1, 2), torch.arange(0, VOCAB_SIZE, 2)).save(tmp_path / "head")
    source, kernels = open_model(str(tmp_path / "model")), ours()
    loaded = LoadedModel(load_model(source, kernels), source.info, source, kernels, kernels, kernels.kv_store())

    def outputs(mode: Mode) -> tuple[list[list[int]], int]:
        system = mode.system(loaded)
        found = system.generate(PROMPTS, COUNTS, temperature=temperature)
        return found, system.spec_stats.num_accepted

    expected, _ = outputs(PLAIN[0])
    for mode in (SPECULATIVE, *drafter_modes(str(tmp_path / "model"), str(tmp_path / "head"))):
        found, accepted = outputs(mode)
        assert found == expected, mode.label
        assert mode.proposer != "draft_model" or accepted > 0, "the model's own drafts are right"


def draft_logits(kernels: Kernels) -> torch.Tensor:
    """Of the layers behind the last of a small GLM."""
    shape = replace(tiny_shapes()["Glm4MoeForCausalLM"], num_mtp_layers=1)
    model = build(shape, kernels)
    assert isinstance(model, Decoder)
    head = MtpHead(shape, kernels, model, given=())
    fill(head.slots())
    kv = KVPool.of_shape(head.kv_shape, 4, 16, kernels.kv_store())
    driver = PagedDriver(model, kv)
    run, hidden = driver.start(PROMPTS[1]), torch.randn(24, shape.hidden_size, generator=torch.Generator().manual_seed(3))
    run.table += driver.take_blocks(2)
    with torch.inference_mode():
        (layer,) = head.forward(build_batch([(run, 24)], 16), hidden, hidden.new_empty(0, 1, shape.hidden_size), kv)
        return head.logits(layer, 0)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.float16, 2e-2)], ids=["f32", "f16"])
def test_layers_that_draft_give_the_logits_of_torch(dtype: torch.dtype, bound: float) -> None:
    expected = draft_logits(TorchKernels())
    assert (draft_logits(ours(dtype)) - expected).abs().max() / expected.std() < bound
