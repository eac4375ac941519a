"""How fast this machine can read memory and multiply, measured, and what a workload would take at that pace.

The bound of a workload counts the linear layers and the head alone: every prompt position is multiplied once, and a decode step either reads
all weights once, in as many bytes as they are kept in, or multiplies its rows, whichever takes longer. Attention, everything else a model does,
scheduling and streaming come on top.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from model_worker.kernels.cpu.backend import CpuKernels
from model_worker.kernels.cpu.library import KernelsMissing, cpu_library
from model_worker.kernels.cpu.packed_weight import PackedWeight
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.models.registry import build_model
from model_worker.weights.open_model import load_model, open_model
from tests.benchmarks.live_system import PRECISIONS
from tests.benchmarks.workloads import Workload

BYTES_PER_WEIGHT = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "int8": 1.0625}
"""Without kernels of our own. int8: with a scale for each 32."""

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


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one precision on this machine. `*_by`: what reached them. `weight_bytes`: of all weights that a step reads."""

    read_gb_per_s: float
    read_by: str
    gflop_per_s: float
    gflop_by: str
    weight_bytes: float

    @property
    def reading_s(self) -> float:
        """All weights, once."""
        return self.weight_bytes / (1e9 * self.read_gb_per_s)

    def decode_s(self, size: ModelSize, rows: int) -> float:
        """One step of so many decodes."""
        return max(self.reading_s, 2 * rows * (size.layers + size.head) / (1e9 * self.gflop_per_s))

    def tokens_per_s(self, size: ModelSize, workload: Workload) -> float:
        """Output tokens of a workload, see above."""
        decodes_s = (workload.output_tokens - 1) * self.decode_s(size, workload.requests)
        return workload.tokens_out / (self._prompts_s(size, workload) + decodes_s)

    def binding(self, size: ModelSize, workload: Workload) -> str:
        """Which of the two most of the workload's time goes into."""
        is_reading = self.decode_s(size, workload.requests) <= self.reading_s
        decodes_s = (workload.output_tokens - 1) * self.reading_s
        return "reading" if is_reading and decodes_s > self._prompts_s(size, workload) else "multiplying"

    def _prompts_s(self, size: ModelSize, workload: Workload) -> float:
        flop = 2 * (workload.computed_tokens * size.layers + workload.requests * size.head)
        return flop / (1e9 * self.gflop_per_s)


@torch.inference_mode()
def measured_limits(model: str, precision: str) -> Limits:
    """The better of torch and of our own kernels, each with all cores that this process may use; of torch also the products of the instructions
    that a precision may use: dot products of bfloat16 or of 8 bits where the processor has them."""
    threads, size = len(os.sched_getaffinity(0)), ModelSize.of(model)
    torch.set_num_threads(threads)
    weights = size.layers + size.head
    weight_bytes = weights * BYTES_PER_WEIGHT[precision]
    values = torch.ones(weights)
    reads = {"torch's sum": 4 * weights / _best_s(values.sum)}
    del values
    products = {f"torch, {kind}": 2 * SQUARE**3 / _best_s(product) for kind, product in _torch_products(precision).items()}
    kernels = own_kernels(precision, threads)
    if kernels is not None:
        load_model(open_model(model), kernels)
        weight_bytes = weights * kernels.packed_bytes / kernels.packed_numbers
        large, row = _packed(kernels, weights // SQUARE), torch.randn(1, SQUARE)
        reads["our kernel"] = large.nbytes / _best_s(lambda: large(row, None))
        del large
        product, rows = _packed(kernels, SQUARE), torch.randn(PROMPT_ROWS, SQUARE)
        products["our kernel"] = 2 * PROMPT_ROWS * SQUARE**2 / _best_s(lambda: product(rows, None))
    read_by, gflop_by = max(reads, key=reads.__getitem__), max(products, key=products.__getitem__)
    return Limits(reads[read_by] / 1e9, read_by, products[gflop_by] / 1e9, gflop_by, weight_bytes)


def _torch_products(precision: str) -> dict[str, Callable[[], torch.Tensor]]:
    """Of two squares. float32 is in all of them: a processor without the other dot products has no faster one."""
    square = torch.randn(SQUARE, SQUARE)
    products: dict[str, Callable[[], torch.Tensor]] = {"f32": lambda: square @ square}
    if precision == "bf16":
        half = square.bfloat16()
        products["bf16"] = lambda: half @ half
    if precision == "int8":
        byte = torch.randint(-127, 128, (SQUARE, SQUARE), dtype=torch.int8)
        products["int8"] = lambda: torch._int_mm(byte, byte)
    return products


class WeighingKernels(CpuKernels):
    """Count what they pack."""

    packed_bytes = packed_numbers = 0

    def pack_table(self, weight: torch.Tensor) -> PackedWeight:
        packed = super().pack_table(weight)
        self.packed_bytes += packed.nbytes
        self.packed_numbers += weight.numel()
        return packed


def own_kernels(precision: str, threads: int) -> WeighingKernels | None:
    """Of such weights; None where this machine has none."""
    try:
        library = cpu_library(threads)
    except KernelsMissing:
        return None
    options = PRECISIONS[precision]
    dtype = getattr(torch, options.get("dtype", "float16"))  # of 8-bit weights it is the cache's alone
    return WeighingKernels(library, dtype, in_8_bits=options.get("quantization") == "int8")


def _packed(kernels: CpuKernels, outputs: int) -> PackedWeight:
    """A weight `[outputs, SQUARE]`."""
    return kernels.pack_table(torch.randn(outputs, SQUARE))


def _best_s(call: Callable[[], object]) -> float:
    call()
    best_s, end_s = float("inf"), time.perf_counter() + MEASURE_S
    while time.perf_counter() < end_s:
        began_s = time.perf_counter()
        call()
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s
