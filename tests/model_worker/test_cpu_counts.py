"""How much a step of the compiled CPU kernels calls: times are the machine's, counts are ours."""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from model_worker.kernels.cpu.backend import CpuKernels
from model_worker.kernels.cpu.build import build, level_of, processor_flags
from model_worker.kernels.cpu.library import CpuLibrary
from model_worker.kernels.interface import LayerStack, PlainLayer
from model_worker.kv_pool import KVPool
from tests.model_worker.paged_driver import PagedDriver, Run
from tests.model_worker.random_llama import build as build_llama
from tests.model_worker.random_llama import config

PER_STEP = {"gather": 1, "rms_norm": 1, "multiply": 1}
"""Beside the layers: the embedding, the last norm, the head."""

STACKED = {"run_layers": 1}
"""All layers of a plain model together."""

PER_LAYER = {
    "rms_norm": 2,
    "multiply": 4,  # query, key and value; output; gate and up; down
    "rotate_and_store": 1,
    "attend": 1,
    "silu_and_mul": 1,
}
"""Where layers are run one by one, as those of other models are."""

PYTHON_CALLS_PER_LAYER_MAX = 85
ALL_CALLS_PER_LAYER_MAX = 150
"""With those of functions in C, torch's above all."""


class CountedLibrary(CpuLibrary):
    """`calls` by kernel, without the type it is for."""

    def __init__(self, threads: int) -> None:
        self.calls: Counter[str] = Counter()
        level = level_of(processor_flags())
        assert level is not None
        super().__init__(str(build(level)), threads)

    def _bound(self, name: str, signature: tuple[Any, ...]) -> Any:
        function, plain = super()._bound(name, signature), name.removesuffix("_f32").removesuffix("_f16").removesuffix("_i8")

        def counted(*arguments: Any) -> None:
            self.calls[plain] += 1
            function(*arguments)

        return counted


class OneByOne(CpuKernels):
    """Takes no model for a plain one."""

    def stack_layers(self, layers: Sequence[PlainLayer]) -> LayerStack | None:
        return None


class Decodes:
    """A model of so many layers and three sequences that decode; the weights are packed already."""

    def __init__(self, num_layers: int, *, is_stacked: bool, in_8_bits: bool = False) -> None:
        self.library = CountedLibrary(1)
        kernels = (CpuKernels if is_stacked else OneByOne)(self.library, torch.float16, in_8_bits=in_8_bits)
        model = build_llama(config(num_layers=num_layers), kernels)
        self._driver = PagedDriver(model, KVPool.of_shape(model.config.kv_shape, 64, 16, kernels.kv_store()))
        self._runs = [self._driver.start([1 + number, 2, 3, 4, 5]) for number in range(3)]
        self.step([(run, len(run.ids)) for run in self._runs])
        self.library.calls.clear()

    def step(self, rows: list[tuple[Run, int]] | None = None) -> None:
        """One token for each of them."""
        logits = self._driver.step(rows or [(run, 1) for run in self._runs])
        for run, token in zip(self._runs, logits.argmax(dim=1).tolist(), strict=True):
            run.ids.append(token)


@pytest.mark.parametrize("in_8_bits", [False, True], ids=["f16", "int8"])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_step_of_a_plain_model_is_four_calls(num_layers: int, in_8_bits: bool) -> None:
    decodes = Decodes(num_layers, is_stacked=True, in_8_bits=in_8_bits)
    decodes.step()
    assert decodes.library.calls == Counter(PER_STEP | STACKED)


@pytest.mark.parametrize("in_8_bits", [False, True], ids=["f16", "int8"])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_another_calls_each_kernel_as_often_as_its_layers_need_it(num_layers: int, in_8_bits: bool) -> None:
    decodes = Decodes(num_layers, is_stacked=False, in_8_bits=in_8_bits)
    decodes.step()
    layers = Counter({name: num_layers * count for name, count in PER_LAYER.items()})
    assert decodes.library.calls == layers + Counter(PER_STEP)


def test_a_prompt_is_one_pass_too() -> None:
    decodes = Decodes(2, is_stacked=True)
    prompt = decodes._driver.start(list(range(1, 120)))
    decodes._driver.step([(prompt, 119)])
    assert decodes.library.calls == Counter(PER_STEP | STACKED)


def called(run: Callable[[], None]) -> Counter[str]:
    """How many functions `run` calls, by kind: `call` in Python, `c_call` in C."""
    counts: Counter[str] = Counter()

    def note(_frame: Any, event: str, _argument: Any) -> None:
        counts[event] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return counts


def calls_per_layer(*, is_stacked: bool) -> dict[str, float]:
    """Of one step, kernels' own wrapper included."""
    few, many = Decodes(1, is_stacked=is_stacked), Decodes(5, is_stacked=is_stacked)
    fewer, more = called(few.step), called(many.step)
    return {kind: (more[kind] - fewer[kind]) / 4 for kind in ("call", "c_call")}


def test_a_layer_of_a_plain_model_calls_no_python_at_all() -> None:
    assert calls_per_layer(is_stacked=True) == {"call": 0, "c_call": 0}


def test_another_layer_calls_little_of_python() -> None:
    calls = calls_per_layer(is_stacked=False)
    python_calls = calls["call"] - sum(PER_LAYER.values())  # less the one that counts kernels
    assert 0 < python_calls <= PYTHON_CALLS_PER_LAYER_MAX
    assert python_calls + calls["c_call"] <= ALL_CALLS_PER_LAYER_MAX
