"""What a worker shows to Prometheus beside its calls."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric

from model_worker.batch_refused import BatchRefused
from services.rpc.metric_families import Families
from services.worker.engine_thread import Outcome
from tessera.values.batch import ScheduledBatch
from tessera.values.model import WorkerDescription

STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class StepMetrics:
    """Counts what an engine has computed, a step at a time; called in its thread."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        labels = ("model_name",)
        seconds = Histogram(
            "tessera:worker_step_seconds",
            "Time of one step in the engine: decodes, prompts, or both (mixed).",
            (*labels, "phase"),
            buckets=STEP_S,
            registry=registry,
        )
        self._seconds = {phase: seconds.labels(model, phase) for phase in ("decode", "prefill", "mixed")}
        text = "Positions that steps computed."
        self._positions = Counter("tessera:worker_positions", text, labels, registry=registry).labels(model)
        text = "Batches refused because they do not fit what the worker holds."
        self._refused = Counter("tessera:worker_refused_batches", text, labels, registry=registry).labels(model)

    def note(self, batch: ScheduledBatch, outcome: Outcome) -> None:
        """One batch was executed, or refused."""
        if isinstance(outcome, BatchRefused):
            self._refused.inc()
        elif batch.num_rows:
            phase = "mixed" if 0 < batch.num_decodes < batch.num_rows else "decode" if batch.num_decodes else "prefill"
            self._seconds[phase].observe(outcome.compute_us / 1e6)
            self._positions.inc(batch.total_tokens)


def worker_metrics(description: WorkerDescription) -> Iterable[Metric]:
    """What a worker is, which does not change."""
    families, geometry = Families(model_name=description.model.name), description.geometry
    families.gauge("tessera:worker_kv_blocks", "Blocks of the worker's KV cache.", geometry.num_blocks)
    families.gauge("tessera:worker_host_blocks", "Blocks of host memory for swapped requests.", geometry.num_host_blocks)
    return families.metrics
