"""What must be equal: each backend's models and those of the torch backend in float32 on the CPU; decodes replayed and computed anew."""

from dataclasses import dataclass

import torch

from model_worker.graphs.graphed_model import GraphedModel
from model_worker.graphs.padded_sizes import PaddedSizes
from tests.aiter.model_pairs import worst_error
from tests.aiter.model_shapes import MORE_SHAPES, SHAPES
from tests.gpu.backends import Backend, Machine
from tests.gpu.llamas import Llama, ModelConfig

BOUND = 0.2
"""Standard deviations of the logits. bfloat16 costs less than a tenth over two layers; a wrong position or a wrong head costs more than one."""

GRAPH_BOUND = 0.1
"""The same, between two ways of the same kernels: a backend may cut long contexts in another way where it knows the longest."""

ROWS = (1, 2, 3, 7, 8)


@dataclass(frozen=True, slots=True)
class Equality:
    """One comparison; `error` in standard deviations of the logits, or None with the reason why it was not made."""

    backend: str
    what: str
    error: float | None
    bound: float
    reason: str = ""

    @property
    def holds(self) -> bool:
        """Not where it was not made."""
        return self.error is not None and self.error <= self.bound

    @property
    def fails(self) -> bool:
        """Whether it was made and does not hold; NaN does not."""
        return self.error is not None and not self.error <= self.bound


def model_equalities(backend: Backend) -> list[Equality]:
    """Prompts in chunks, a shared block, decodes and a verification, through the worker's engine, per architecture."""
    found = []
    for name, shape in {**SHAPES, **MORE_SHAPES}.items():
        obstacle, error = backend.obstacle(shape), None
        if obstacle is None:
            error = worst_error(shape, backend.make(torch.bfloat16))
        found.append(Equality(backend.name, name, error, BOUND, obstacle or ""))
    return found


@torch.inference_mode()
def graph_equalities(machine: Machine, backend: Backend, shape: ModelConfig, what: str) -> Equality:
    """Decodes of several numbers of rows, padded and replayed, against the same decodes without graphs, on the same pool."""
    obstacle = backend.obstacle(shape)
    if obstacle is not None:
        return Equality(backend.name, what, None, GRAPH_BOUND, obstacle)
    llama = Llama.random(shape, backend.make(torch.bfloat16), max(ROWS), context=256)
    graphed = GraphedModel(llama.model, llama.kv, PaddedSizes((2, 4, 8)), shape.max_model_len, machine.recorder())
    worst = 0.0
    for rows in ROWS:
        batch = llama.decodes(rows, first_id=rows)
        eager = llama.model.forward(batch, llama.kv)
        replayed = graphed.forward(batch, llama.kv)
        error = float((replayed - eager).abs().max() / eager.std())
        worst = max(worst, error) if error == error else error
    return Equality(backend.name, what, worst, GRAPH_BOUND)
