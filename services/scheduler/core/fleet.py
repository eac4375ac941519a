"""The workers of one scheduler, and the one model that they all serve."""

from collections.abc import Iterator

from services.scheduler.core.admission import request_len_max
from services.scheduler.core.errors import ModelMismatch
from services.scheduler.core.replica import Replica
from services.scheduler.core.stop_rules import StopRules
from tessera.values.model import KVGeometry, ModelInfo, WorkerDescription
from tessera.values.request import Submission


class Fleet:
    """Replicas by name. Their pools may differ: a request has to fit the largest, and runs only where it fits to its end."""

    __slots__ = ("_replicas", "largest", "model")

    def __init__(self) -> None:
        self._replicas: dict[str, Replica] = {}
        self.model: ModelInfo | None = None  # of the first worker that attached
        self.largest: KVGeometry | None = None  # the largest pool; as it was where no worker is left

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def get(self, name: str) -> Replica | None:
        """The worker of this name."""
        return self._replicas.get(name)

    def put(self, replica: Replica) -> None:
        """Take in a worker, in place of its earlier replica."""
        self._replicas[replica.name] = replica
        self._measure()

    def remove(self, name: str) -> None:
        """Forget a worker."""
        del self._replicas[name]
        self._measure()

    @property
    def attached(self) -> list[Replica]:
        """Those that can compute at present."""
        return [replica for replica in self if replica.is_attached]

    def check(self, name: str, description: WorkerDescription) -> None:
        """Raise ModelMismatch unless the worker serves the group's model, and its KV lies as that of the workers that are there. The first
        one decides; where none is there any more, the next one says anew how KV lies."""
        if self.model is None:
            self.model = description.model
        check_model(name, description, self.model)
        for replica in self.attached:
            if replica.name != name:
                check_layout(name, description.geometry, replica.description.geometry)

    @property
    def layout(self) -> tuple[int, str] | None:
        """Block size and format of KV, as at the latest attach; None before the first."""
        return (self.largest.block_size, self.largest.kv_format) if self.largest is not None else None

    @property
    def request_len_max(self) -> int | None:
        """The longest request, prompt and output in tokens, that runs here; None before the first attach."""
        return request_len_max(self.model, self.largest) if self.model is not None and self.largest is not None else None

    @property
    def step_tokens_max(self) -> int | None:
        """Positions that some worker can compute in one step; None while there is no worker."""
        return max((replica.tokens_max for replica in self), default=None)

    def rules(self, submission: Submission, promised_len: int) -> StopRules | None:
        """The stop rules of a request which was promised to grow to `promised_len` tokens, prompt and output, and that may grow to what the
        largest pool holds; None before the first attach."""
        if self.model is None or self.largest is None:
            return None
        return StopRules.of(submission, self.model, max(self.largest.num_tokens + 1, promised_len))

    def _measure(self) -> None:
        pools = [replica.description.geometry for replica in self]
        self.largest = max(pools, key=lambda pool: pool.num_tokens, default=self.largest)


def check_model(name: str, description: WorkerDescription, model: ModelInfo) -> None:
    """Raise ModelMismatch unless a worker serves `model`."""
    own = description.model
    if own != model:
        raise ModelMismatch(
            f"worker {name} serves {own.name} (weights {own.weights_digest}, tokenizer {own.tokenizer_digest}, at most "
            f"{own.max_model_len} tokens); the group serves {model.name} (weights {model.weights_digest}, tokenizer "
            f"{model.tokenizer_digest}, at most {model.max_model_len} tokens)"
        )


def check_layout(name: str, own: KVGeometry, others: KVGeometry) -> None:
    """Raise ModelMismatch unless a worker's KV lies as that of the workers that are there."""
    if (own.block_size, own.kv_format) != (others.block_size, others.kv_format):
        raise ModelMismatch(
            f"worker {name} has KV blocks of {own.block_size} tokens ({own.kv_format}); the group has blocks of "
            f"{others.block_size} tokens ({others.kv_format}): start all workers of a group with the same --block-size, of one "
            f"release and on one kind of device, or stop the others first"
        )
