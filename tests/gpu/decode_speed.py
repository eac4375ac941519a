"""Tokens per second of decodes, against what the memory allows: a pass reads every weight once, and the KV of every context."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from model_worker.graphs.graphed_model import GraphedModel
from model_worker.graphs.padded_sizes import PaddedSizes
from model_worker.models.model_config import ModelConfig
from tests.gpu.backends import Backend, Machine
from tests.gpu.llamas import Llama


@dataclass(frozen=True, slots=True)
class Speed:
    """Of the forward pass alone, without sampling: `rows` decodes with contexts of `context` tokens. `floor_ms` is `bytes_read` over the bandwidth
    that was measured."""

    backend: str
    shape: str
    rows: int
    context: int
    eager_ms: float
    graph_ms: float | None
    floor_ms: float

    @property
    def tokens_per_s(self) -> float:
        """The better way's."""
        return self.rows / min(self.eager_ms, self.graph_ms or self.eager_ms) * 1000

    @property
    def of_floor(self) -> float:
        """How much of what the memory allows is reached."""
        return self.floor_ms / min(self.eager_ms, self.graph_ms or self.eager_ms)


def bandwidth(machine: Machine) -> float:
    """Bytes per second read of the device's memory: of the sums of a large tensor."""
    values = torch.ones((1 << 31 if machine.is_gpu else 1 << 26) // 4, device=machine.device)
    seconds = _best_ms(machine, lambda: values.sum(), 8) / 1000
    return values.numel() * 4 / seconds


@torch.inference_mode()
def speeds(
    machine: Machine, backend: Backend, name: str, shape: ModelConfig, all_rows: tuple[int, ...], context: int, rate: float
) -> list[Speed]:
    """One model at several batch sizes; none where the backend cannot serve it."""
    if backend.obstacle(shape) is not None:
        return []
    kernels = backend.make(torch.bfloat16)
    llama = Llama.random(shape, kernels, max(all_rows), context)
    sizes = PaddedSizes(all_rows).within(kernels.captured_tokens_max // shape.max_model_len)
    graphed = GraphedModel(llama.model, llama.kv, sizes, shape.max_model_len, machine.recorder())
    found = []
    for rows in all_rows:
        batch = llama.decodes(rows)
        eager_ms = _best_ms(machine, lambda batch=batch: llama.model.forward(batch, llama.kv), 5)
        graph_ms = None
        if sizes.holding(rows) is not None:
            graph_ms = _best_ms(machine, lambda batch=batch: graphed.forward(batch, llama.kv), 10)
        floor_ms = llama.bytes_read(rows) / rate * 1000
        found.append(Speed(backend.name, name, rows, context, eager_ms, graph_ms, floor_ms))
    return found


def _best_ms(machine: Machine, run: Callable[[], object], times: int) -> float:
    """The fastest of so many, after two that nobody counts."""
    best = float("inf")
    for attempt in range(times + 2):
        machine.wait()
        started = time.perf_counter()
        run()
        machine.wait()
        if attempt >= 2:
            best = min(best, time.perf_counter() - started)
    return best * 1000
