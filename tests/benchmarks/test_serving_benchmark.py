"""What `make bench` is made of: its workloads, the bounds that it holds them against, and its picture."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")

from matplotlib import image

from tessera.values.model import ModelInfo
from tests.benchmarks.live_system import PRECISIONS
from tests.benchmarks.machine_limits import Limits, ModelSize, own_kernels
from tests.benchmarks.serving_picture import draw
from tests.benchmarks.workloads import WORKLOADS, Workload, chosen

MODEL = ModelInfo("m", "LlamaForCausalLM", 49_152, 8192, (2,), 1, "t", "w")
SIZE = ModelSize(layers=106_000_000, head=28_000_000)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_prompts_share_their_prefix_and_nothing_else(workload: Workload) -> None:
    prompts = workload.prompts(MODEL, 3)
    assert len(prompts) == workload.requests
    shared = workload.shared_prefix_tokens
    assert all(len(prompt) == shared + workload.input_tokens for prompt in prompts)
    warm = workload.warm_prompt(MODEL, 3)
    assert {tuple(prompt[:shared]) for prompt in [*prompts, warm]} == {tuple(warm[:shared])}
    assert len({tuple(prompt[shared:]) for prompt in [*prompts, warm]}) == workload.requests + 1
    assert prompts == workload.prompts(MODEL, 3) != workload.prompts(MODEL, 4)


def test_no_two_workloads_have_a_prompt_in_common() -> None:
    firsts = [tuple(workload.prompts(MODEL, 0)[0][:32]) for workload in WORKLOADS]
    assert len(set(firsts)) == len(WORKLOADS)


def test_a_name_that_no_workload_has_is_named() -> None:
    with pytest.raises(ValueError, match="no workload 'w9'"):
        chosen("w1c1,w9")


def test_bounds_read_weights_once_a_step_or_multiply_every_row() -> None:
    limits = Limits(10.0, "", 100.0, "", weight_bytes=134e6 * 2)
    one, many = chosen("w1c1,w1c32")
    reading_s, multiplying_s = 134e6 * 2 / 10e9, 32 * 2 * 134e6 / 100e9
    assert limits.decode_s(SIZE, 1) == pytest.approx(reading_s)
    assert limits.decode_s(SIZE, 32) == pytest.approx(multiplying_s)
    prompt_s = 2 * (128 * 106e6 + 28e6) / 100e9
    assert limits.tokens_per_s(SIZE, one) == pytest.approx(128 / (prompt_s + 127 * reading_s))
    assert (limits.binding(SIZE, one), limits.binding(SIZE, many)) == ("reading", "multiplying")
    (prompts,) = chosen("w2")
    assert limits.decode_s(SIZE, prompts.requests) == pytest.approx(reading_s), "its few decodes read"
    assert limits.binding(SIZE, prompts) == "multiplying", "but most of it is prompts"


def test_a_shared_prefix_is_computed_once_and_a_cached_one_never() -> None:
    cold, warm = chosen("w3,w3warm")
    assert (cold.computed_tokens, warm.computed_tokens) == (512 + 32 * 32, 32 * 32)


def test_the_picture_is_there(tmp_path: Path) -> None:
    bars = {precision: {name: (50.0, 45.0, 52.0, 80.0) for name in ("w1c1", "w2")} for precision in ("f32", "f16", "int8")}
    draw(bars, "a title", tmp_path / "bench.png")
    height, width, _ = image.imread(tmp_path / "bench.png").shape
    assert width > 600 and height > 500


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_limits_of_every_precision_are_measured_with_its_own_weights(precision: str) -> None:
    kernels, expected = own_kernels(precision, 1), {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "int8": "int8"}
    assert kernels is not None and kernels.weights_dtype == getattr(torch, expected[precision])
