"""The engine of a real worker, with the deterministic model, in the place of the fake one; batches and outputs cross the wire's format."""

from dataclasses import replace

from fake_worker import LIMITS, MODEL, FakeWorker

from model_worker.engine import Engine
from model_worker.kv_pool import KVPool
from model_worker.models.causal_lm import CausalLM
from model_worker.models.deterministic import DeterministicLM, deterministic_config, next_tokens
from services.worker import convert
from tessera.values.batch import ScheduledBatch, ScheduledBatchOutput
from tessera.values.identity import NO_EPOCH
from tessera.values.model import KVGeometry, WorkerDescription, WorkerLimits
from tessera.values.report import WorkerReport
from tessera.worker.v1 import worker_pb2


class EngineWorker(FakeWorker):
    """What it holds lies in `engine`; of the fake worker only the queue and the checks of a batch's columns are left."""

    def __init__(self, num_blocks: int, block_size: int, limits: WorkerLimits = LIMITS, num_host_blocks: int = 0) -> None:
        super().__init__(num_blocks, block_size, limits, num_host_blocks=num_host_blocks)

    def restart(self) -> None:
        """A new boot: everything it held is gone."""
        super().restart()
        model = self.build_model()
        shape = model.config
        kv = KVPool(shape.num_layers, self.geometry.num_blocks, self.geometry.block_size, shape.num_kv_heads, shape.head_dim)
        self.geometry = KVGeometry(
            kv.num_blocks, kv.block_size, kv.bytes_per_token, kv.geometry.kv_format, self.geometry.num_host_blocks
        )
        self.description = WorkerDescription(self.description.boot_id, self.model, self.geometry, self.limits)
        self.engine = self.build_engine(model, kv)
        self.executed: list[ScheduledBatch] = []

    def build_model(self) -> CausalLM:
        """What a new boot loads."""
        return DeterministicLM(deterministic_config(self.model.vocab_size, self.model.max_model_len))

    def build_engine(self, model: CausalLM, kv: KVPool) -> Engine:
        """The engine of a new boot."""
        return Engine(model, kv, self.description)

    def report(self) -> WorkerReport:
        """Everything held now."""
        return convert.report_from_proto(list(convert.report_to_proto(self.engine.report(self.nonce))))

    def step(self) -> ScheduledBatchOutput:
        """Execute the oldest batch and return its output. Raises BatchRefused."""
        issued = self.queue.popleft()
        message = convert.batch_to_proto(
            replace(issued, epoch=NO_EPOCH)
        )  # the ids of the tests' leaders are too short for the wire
        batch = convert.batch_from_proto(worker_pb2.ScheduledBatch.FromString(message.SerializeToString()))
        output = self.engine.execute(batch)
        self.executed.append(batch)
        return replace(convert.output_from_proto(convert.output_to_proto(output)), epoch=issued.epoch)


def greedy_output(prompt: list[int], count: int) -> list[int]:
    """The first `count` greedy tokens after `prompt`, whatever stops them."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_tokens(ids, MODEL.vocab_size)[0])
    return ids[len(prompt) :]
