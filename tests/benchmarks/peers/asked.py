"""Engines that are asked for answers to prompts, in whatever way: what of a contender follows from that."""

import math
from abc import ABC, abstractmethod

from tessera.values.model import ModelInfo
from tests.benchmarks.peers.contender import Run, Timeline, arrivals, run_of
from tests.benchmarks.workloads import Workload

WARM_TOKENS = 2


class Asked(ABC):
    """A `Contender` but for how it is asked."""

    def __init__(self, model: ModelInfo) -> None:
        self._model = model

    def wake(self) -> None:  # noqa: B027 - nothing to do, whoever it is
        """See `Contender`; it is asked when it listens."""

    def run(self, workload: Workload, number: int, limit_s: float = math.inf) -> Run:
        """See `Contender`."""
        if workload.is_warm:
            self._ask([workload.warm_prompt(self._model, number)], WARM_TOKENS)
        prompts = workload.prompts(self._model, number)
        return run_of(self._ask(prompts, workload.output_tokens, limit_s=limit_s), workload, limit_s)

    def serve(self, workload: Workload, number: int, rate: float) -> Run:
        """See `Contender`."""
        prompts, arrivals_s = workload.prompts(self._model, number), arrivals(workload, number, rate)
        return run_of(self._ask(prompts, workload.output_tokens, arrivals_s), workload)

    @abstractmethod
    def _ask(
        self, prompts: list[list[int]], output_tokens: int, arrivals_s: list[float] | None = None, limit_s: float = math.inf
    ) -> list[Timeline]:
        """When each prompt was due, and when the tokens of its answer came. Raises RuntimeError where one is refused."""
