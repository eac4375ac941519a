"""How fast this machine can read memory and multiply, measured, and what a workload would take at that pace.

The bound of a workload counts the linear layers and the head alone: every prompt position is multiplied once, and a decode step either reads
all weights once or multiplies its rows, whichever takes longer. Attention, everything else a model does, scheduling and streaming come on top.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from model_worker.kernels.cpu.backend import CpuKernels
from model_worker.kernels.cpu.library import KernelsMissing, cpu_library
from model_worker.kernels.interface import Product
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.models.registry import build_model
from model_worker.weights.open_model import open_model
from tests.benchmarks.workloads import Workload

BYTES_PER_WEIGHT = {"f32": 4.0, "f16": 2.0, "int8": 1.125}
"""int8: with a float32 scale for each 32."""

MEASURE_S = 1.5
"""The best of as many repeats as go into this: whoever else computes now and then does not lower a limit."""

SQUARE, PROMPT_ROWS = 2048, 512


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Weights of a dense model that each token is multiplied by: those of its layers, and the head's."""

    layers: int
    head: int

    @classmethod
    def of(cls, name: str) -> "ModelSize":
        """Of a known name, a directory or a file; no weights are read."""
        config = open_model(name).config
        slots = build_model(config, TorchKernels()).slots()
        layers = sum(slot.view.numel() for key, slot in slots.items() if ".layers." in key and slot.view.dim() == 2)
        return cls(layers, config.vocab_size * config.hidden_size)

    def bytes_in(self, precision: str) -> float:
        """All of them."""
        return (self.layers + self.head) * BYTES_PER_WEIGHT[precision]


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one precision on this machine. `*_by`: what reached them."""

    read_gb_per_s: float
    read_by: str
    gflop_per_s: float
    gflop_by: str

    def decode_s(self, size: ModelSize, precision: str, rows: int) -> float:
        """One step of so many decodes."""
        reading_s = size.bytes_in(precision) / (1e9 * self.read_gb_per_s)
        return max(reading_s, 2 * rows * (size.layers + size.head) / (1e9 * self.gflop_per_s))

    def tokens_per_s(self, size: ModelSize, precision: str, workload: Workload) -> float:
        """Output tokens of a workload, see above."""
        flop = 2 * (workload.computed_tokens * size.layers + workload.requests * size.head)
        prompts_s = flop / (1e9 * self.gflop_per_s)
        decodes_s = (workload.output_tokens - 1) * self.decode_s(size, precision, workload.requests)
        return workload.tokens_out / (prompts_s + decodes_s)

    def binding(self, size: ModelSize, precision: str, workload: Workload) -> str:
        """Which of the two a decode step of the workload runs into."""
        reading_s = size.bytes_in(precision) / (1e9 * self.read_gb_per_s)
        return "reading" if self.decode_s(size, precision, workload.requests) <= reading_s else "multiplying"


@torch.inference_mode()
def measured_limits(size: ModelSize, precision: str) -> Limits:
    """The better of torch and of our own kernels, each with all cores that this process may use."""
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    weight_bytes = size.bytes_in(precision)
    values = torch.ones(int(weight_bytes) // 4)
    reads = {"torch's sum": weight_bytes / _best_s(values.sum)}
    del values
    square = torch.randn(SQUARE, SQUARE)
    products = {"torch, f32": 2 * SQUARE**3 / _best_s(lambda: square @ square)}
    kernels = _own_kernels(precision, threads)
    if kernels is not None:
        large, row = _packed(kernels, (size.layers + size.head) // SQUARE), torch.randn(1, SQUARE)
        reads["our kernel"] = weight_bytes / _best_s(lambda: large(row, None))
        del large
        product, rows = _packed(kernels, SQUARE), torch.randn(PROMPT_ROWS, SQUARE)
        products["our kernel"] = 2 * PROMPT_ROWS * SQUARE**2 / _best_s(lambda: product(rows, None))
    read_by, gflop_by = max(reads, key=reads.__getitem__), max(products, key=products.__getitem__)
    return Limits(reads[read_by] / 1e9, read_by, products[gflop_by] / 1e9, gflop_by)


def _own_kernels(precision: str, threads: int) -> CpuKernels | None:
    try:
        library = cpu_library(threads)
    except KernelsMissing:
        return None
    return CpuKernels(library, torch.float32 if precision == "f32" else torch.float16, in_8_bits=precision == "int8")


def _packed(kernels: CpuKernels, outputs: int) -> Product:
    """A weight `[outputs, SQUARE]`."""
    product = kernels.pack(torch.randn(outputs, SQUARE))
    assert product is not None
    return product


def _best_s(call: Callable[[], object]) -> float:
    call()
    best_s, end_s = float("inf"), time.perf_counter() + MEASURE_S
    while time.perf_counter() < end_s:
        began_s = time.perf_counter()
        call()
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s
