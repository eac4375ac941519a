"""The workers of one scheduler, and the one model that they all serve."""

from collections.abc import Iterator

from services.scheduler.core.admission import request_len_max
from services.scheduler.core.errors import ModelMismatch
from services.scheduler.core.replica import Replica
from services.scheduler.core.stop_rules import StopRules
from tessera.values.model import ModelInfo, WorkerDescription
from tessera.values.request import Submission


class Fleet:
    """Replicas by name. A request must fit every worker, so that any of them can run it."""

    __slots__ = ("_replicas", "model")

    def __init__(self) -> None:
        self._replicas: dict[str, Replica] = {}
        self.model: ModelInfo | None = None  # of the first worker that attached

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def get(self, name: str) -> Replica | None:
        """The worker of this name."""
        return self._replicas.get(name)

    def put(self, replica: Replica) -> None:
        """Take in a worker, in place of its earlier replica."""
        self._replicas[replica.name] = replica

    def check_model(self, name: str, description: WorkerDescription) -> None:
        """Raise ModelMismatch unless the worker serves the group's model; the first one decides which that is."""
        if self.model is None:
            self.model = description.model
        if description.model != self.model:
            raise ModelMismatch(
                f"worker {name} serves {description.model.name} (weights {description.model.weights_digest}, tokenizer "
                f"{description.model.tokenizer_digest}); the group serves {self.model.name} (weights "
                f"{self.model.weights_digest}, tokenizer {self.model.tokenizer_digest})"
            )

    @property
    def request_len_max(self) -> int | None:
        """The longest request, prompt and output in tokens, that runs on every worker; None before the first attach."""
        return min((request_len_max(replica.description.model, replica.description.geometry) for replica in self), default=None)

    @property
    def step_tokens_max(self) -> int | None:
        """Positions that every worker can compute in one step; None before the first attach."""
        return min((replica.tokens_max for replica in self), default=None)

    def rules(self, submission: Submission) -> StopRules | None:
        """The stop rules of a request here; None before the first attach."""
        if self.model is None:
            return None
        pool_len_max = min(replica.description.geometry.num_tokens for replica in self) + 1
        return StopRules.of(submission, self.model, pool_len_max)
