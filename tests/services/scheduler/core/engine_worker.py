"""The engine of a real worker, with the deterministic model, in the place of the fake one; batches and outputs cross the wire's format."""

from dataclasses import replace
from random import Random

import numpy as np
from fake_worker import LIMITS, MODEL, FakeWorker

from model_worker.batch_refused import BatchRefused
from model_worker.engine import Engine
from model_worker.joined_batch import parted
from model_worker.kv_pool import KVPool
from model_worker.kv_shape import KVShape
from model_worker.models.causal_lm import CausalLM
from model_worker.models.deterministic import FIRST_LOGIT, SECOND_LOGIT, DeterministicLM, deterministic_config, next_tokens
from model_worker.sample_rows import SampleRows
from model_worker.sampler import Sampler
from model_worker.sampling_table import SamplingTable
from model_worker.slot_table import SlotTable
from model_worker.speculation.proposer import Drafts, Proposer
from services.worker import convert
from tessera.values.batch import ScheduledBatch, ScheduledBatchOutput
from tessera.values.identity import NO_EPOCH, Epoch
from tessera.values.model import KVGeometry, ModelInfo, WorkerDescription, WorkerLimits
from tessera.values.report import WorkerReport
from tessera.values.sampling import SamplingParams
from tessera.worker.v1 import worker_pb2


class KnowingProposer:
    """Proposes what the deterministic model likes best, or anything else: each draft is right with this chance, and there may be fewer than
    there is room for. The same for the same seed."""

    def __init__(self, seed: int, right: float) -> None:
        self._rng = Random(seed)
        self._right = right

    def propose(self, slots: np.ndarray, rooms: np.ndarray, table: SlotTable, sampling: SamplingTable) -> Drafts:
        rng, drafts = self._rng, Drafts(np.zeros(len(slots), np.int64), np.full((len(slots), int(rooms.max())), -1, np.int32))
        for row, (slot, room) in enumerate(zip(slots.tolist(), rooms.tolist(), strict=True)):
            ids = table.token_ids[slot, : table.num_ids[slot]].tolist()
            drafts.counts[row] = rng.choice((room, rng.randint(0, room)))
            for place in range(drafts.counts[row]):
                wrong = rng.random() >= self._right
                ids.append((next_tokens(ids, MODEL.vocab_size)[0] + wrong) % MODEL.vocab_size)
                drafts.token_ids[row, place] = ids[-1]
        return drafts


class EngineWorker(FakeWorker):
    """What it holds lies in `engine`; of the fake worker only the queue and the checks of a batch's columns are left."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        limits: WorkerLimits = LIMITS,
        num_host_blocks: int = 0,
        proposer: Proposer | None = None,
        model: ModelInfo = MODEL,
    ) -> None:
        self.proposer = proposer
        self._done: dict[int, ScheduledBatchOutput] = {}  # of batches that joined the one before, until asked for
        super().__init__(num_blocks, block_size, limits, model, num_host_blocks)

    def restart(self) -> None:
        """A new boot: everything it held is gone."""
        super().restart()
        model = self.build_model()
        geometry = self.geometry
        kv = KVPool.of_shape(model.config.kv_shape, geometry.num_blocks, geometry.block_size, paired=self.paired_shape(model))
        self.geometry = KVGeometry(
            kv.num_blocks, kv.block_size, kv.bytes_per_token, kv.geometry.kv_format, self.geometry.num_host_blocks
        )
        self.description = WorkerDescription(self.description.boot_id, self.model, self.geometry, self.limits)
        self.engine = self.build_engine(model, kv)
        self.executed: list[ScheduledBatch] = []
        self.num_joined = 0

    def build_model(self) -> CausalLM:
        """What a new boot loads."""
        return DeterministicLM(deterministic_config(self.model.vocab_size, self.model.max_model_len))

    def paired_shape(self, model: CausalLM) -> KVShape | None:
        """What whoever drafts keeps of a position."""
        return None

    def build_engine(self, model: CausalLM, kv: KVPool) -> Engine:
        """The engine of a new boot."""
        return Engine(model, kv, self.description, self.proposer)

    def attach(self, epoch: Epoch, nonce: int) -> WorkerReport:
        """See `FakeWorker`. What has joined another batch was started."""
        self._done.clear()
        return super().attach(epoch, nonce)

    def report(self) -> WorkerReport:
        """Everything held now."""
        return convert.report_from_proto(list(convert.report_to_proto(self.engine.report(self.nonce))))

    def step(self) -> ScheduledBatchOutput:
        """Execute the oldest batch and return its output. Raises BatchRefused."""
        issued = self.queue.popleft()
        output = self._done.pop(issued.step_id, None)
        if output is None:
            output = self._execute(_over_the_wire(issued))
        return replace(convert.output_from_proto(convert.output_to_proto(output)), epoch=issued.epoch)

    def _execute(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        """Together with the next that waits, where that can join it."""
        late = _over_the_wire(self.queue[0]) if self.queue else None
        if late is not None and self.engine.joins(batch, late):
            try:
                both, output = self.engine.execute_both(batch, late)
            except BatchRefused:
                pass
            else:
                self.executed.append(both)
                self.num_joined += 1
                output, self._done[late.step_id] = parted(output, batch)
                return output
        output = self.engine.execute(batch)
        self.executed.append(batch)
        return output


def _over_the_wire(issued: ScheduledBatch) -> ScheduledBatch:
    message = convert.batch_to_proto(
        replace(issued, epoch=NO_EPOCH)
    )  # the ids of the tests' leaders are too short for the wire
    return convert.batch_from_proto(worker_pb2.ScheduledBatch.FromString(message.SerializeToString()))


def greedy_output(prompt: list[int], count: int) -> list[int]:
    """The first `count` greedy tokens after `prompt`, whatever stops them."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_tokens(ids, MODEL.vocab_size)[0])
    return ids[len(prompt) :]


def output_alone(prompt: list[int], count: int, sampling: SamplingParams) -> list[int]:
    """The first `count` tokens after `prompt`, whatever stops them, drawn one after the other from the model's logits."""
    ids, sampler, table = (
        np.array([prompt + [0] * count], np.int32),
        Sampler(MODEL.eos_token_ids),
        SamplingTable(1, MODEL.vocab_size),
    )
    table.set(0, sampling)
    slot, prompt_len = np.zeros(1, np.int64), np.array([len(prompt)])
    for index in range(len(prompt), len(prompt) + count):
        logits = np.zeros((1, MODEL.vocab_size), np.float32)
        first, second = next_tokens(ids[0, :index].tolist(), MODEL.vocab_size)
        logits[0, second], logits[0, first] = SECOND_LOGIT, FIRST_LOGIT
        rows = SampleRows(table, ids, slot, prompt_len, np.array([index]), np.ones(1, np.bool_))
        ids[0, index] = sampler.sample(logits, rows).token_ids[0]
    return ids[0, len(prompt) :].tolist()
