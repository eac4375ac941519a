"""The batch-invariant kernels give one context one set of logits, bit for bit, with every architecture that they can run."""

import random
from pathlib import Path

import pytest
import torch
from paged_driver import PagedDriver

from model_worker.kernels.invariant_backend import InvariantKernels
from model_worker.kv_pool import KVPool
from model_worker.models.causal_lm import CausalLM
from model_worker.weights.open_model import load_model, open_model
from tessera.values.config import ConfigError
from tests.parity.tiny_models import VOCAB_SIZE, save_random, tiny_configs

KERNELS = InvariantKernels()
REFUSED = {"GptOssForCausalLM": "sinks", "DeepseekV32ForCausalLM": "chosen positions"}
CASES = [(name, index) for name, configs in tiny_configs().items() for index in range(len(configs)) if name not in REFUSED]


def tiny(architecture: str, shape: int, directory: Path) -> CausalLM:
    save_random(tiny_configs()[architecture][shape], directory)
    return load_model(open_model(str(directory)), KERNELS)


def driver(model: CausalLM) -> PagedDriver:
    return PagedDriver(model, KVPool.of_shape(model.config.kv_shape, 80, 4))


@pytest.mark.parametrize(("architecture", "shape"), CASES)
def test_alone_or_in_any_batch_whole_or_in_pieces(architecture: str, shape: int, tmp_path: Path) -> None:
    model = tiny(architecture, shape, tmp_path)
    draw = random.Random(1)
    prompts = [draw.choices(range(VOCAB_SIZE), k=length) for length in (50, 33, 7, 41)]
    expected = []
    for ids in prompts:
        alone = driver(model)
        expected.append(alone.step([(alone.start(ids), len(ids))], every_logit=True))
    at = driver(model)
    runs = [at.start(ids) for ids in prompts]
    while any(run.computed < len(run.ids) for run in runs):
        left = [(run, len(run.ids) - run.computed) for run in runs if run.computed < len(run.ids)]
        rows = sorted(((run, min(rest, draw.choice((1, 1, 5, 11)))) for run, rest in left), key=lambda row: row[1])
        starts = [run.computed for run, _ in rows]
        logits = at.step(rows, every_logit=True)
        for (run, count), start in zip(rows, starts, strict=True):
            own, logits = logits[:count], logits[count:]
            assert torch.equal(own, expected[runs.index(run)][start : start + count])


@pytest.mark.parametrize(("architecture", "lacking"), REFUSED.items())
def test_attention_without_such_kernels_is_refused(architecture: str, lacking: str, tmp_path: Path) -> None:
    model = tiny(architecture, 0, tmp_path)
    at = driver(model)
    with pytest.raises(ConfigError, match=rf"batch_invariant: .*{lacking}"):
        at.step([(at.start([1, 2, 3]), 3)])
