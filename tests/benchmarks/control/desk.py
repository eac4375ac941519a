"""A leader over one worker that computes nothing and one gateway: what a turn of it costs in process CPU.

Everything between an output and its frame counts: postprocess, the next batch, the record, its acknowledgement, the frame. The store's calls
are the journal's own budget (`journal_layout.py`), so they are made between the measured pieces.
"""

import gc
from collections import deque
from time import process_time_ns

import numpy as np

from services.scheduler.core.journal_call import Append, Applied, EndRewrite
from services.scheduler.core.recovered import Recovered
from services.scheduler.leader import Leader
from services.scheduler.sessions import GatewaySession
from tessera.values.batch import ScheduledBatch, ScheduledBatchOutput
from tessera.values.config import Config
from tessera.values.identity import Epoch
from tessera.values.model import KVGeometry, ModelInfo, WorkerDescription, WorkerLimits
from tessera.values.report import WorkerReport
from tessera.values.request import RequestOutput, Submission
from tessera.values.sampling import SamplingParams
from tessera.values.session import Hello, Submit

WORKER, EPOCH = "worker", Epoch(1, b"e" * 16)
VOCABULARY, STOP_IDS = 49_152, (49_150, 49_151)
MODEL = ModelInfo("bench", "LlamaForCausalLM", VOCABULARY, 1 << 20, (2,), 1, "t", "w")
SAMPLED = 300  # an ordinary token


def worker_report(num_blocks: int, block_size: int, seqs_max: int) -> WorkerReport:
    """A fresh worker."""
    geometry = KVGeometry(num_blocks, block_size, 1, "bench")
    description = WorkerDescription(b"b" * 16, MODEL, geometry, WorkerLimits(seqs_max, 1 << 24))
    return WorkerReport(1, description, 0, (), (), np.zeros(num_blocks, np.int64))


def submission(number: int, prompt: np.ndarray, max_tokens: int, priority: int = 0) -> Submission:
    """A request with stop token ids that its output does not meet."""
    sampling = SamplingParams(seed=number, max_tokens=max_tokens, stop_token_ids=STOP_IDS)
    return Submission(number.to_bytes(16, "big"), prompt, sampling, priority=priority)


def output_of(batch: ScheduledBatch, held: np.ndarray) -> ScheduledBatchOutput:
    """What the worker answers: every row that reaches the end of its slot's ids samples a token. `held` counts the slots' ids."""
    for entry in batch.entries:
        held[entry.slot] = len(entry.token_ids)
    counts = (batch.context_lens == held[batch.slots]).astype(np.int32)
    held[batch.slots] += counts
    token_ids = np.full(int(counts.sum()), SAMPLED + batch.step_id % 7, np.int32)
    return ScheduledBatchOutput(batch.epoch, batch.nonce, batch.step_id, counts, token_ids)


class Desk:
    """`spent_ns` is the CPU that this process has spent in the leader since it was last set to 0."""

    def __init__(self, config: Config, num_blocks: int, block_size: int, seqs_max: int) -> None:
        self.session = GatewaySession(b"g" * 16)
        self.spent_ns = 0
        self._batches: deque[ScheduledBatch] = deque()
        self._held = np.zeros(seqs_max, np.int32)
        self.leader = Leader(config, EPOCH, MODEL, 0, lambda: None)
        report = worker_report(num_blocks, block_size, seqs_max)
        self.leader.lead(Recovered(0, (), (), (), ()), {}, {})
        self.leader.worker_attached(WORKER, report, self._batches.append)
        self.leader.session_opened(self.session, Hello(EPOCH, MODEL.tokenizer_digest, self.session.gateway_id))
        self._acknowledge()

    def submit(self, request: Submission) -> None:
        """One message of the gateway."""
        begun = process_time_ns()
        self.leader.heard(self.session, Submit(request))
        self.spent_ns += process_time_ns() - begun

    def step(self) -> list[RequestOutput]:
        """The worker answers its oldest batch; returns the frame that results."""
        output = output_of(self._batches.popleft(), self._held)
        begun = process_time_ns()
        self.leader.worker_output(WORKER, output)
        self.spent_ns += process_time_ns() - begun
        self._acknowledge()
        begun = process_time_ns()
        frame = self.leader.take_frame(self.session)
        self.spent_ns += process_time_ns() - begun
        return frame

    def settle(self) -> None:
        """A turn in which nothing came from outside."""
        self.leader.worker_leaving("nobody")
        self._acknowledge()
        self.leader.take_frame(self.session)

    @property
    def is_computing(self) -> bool:
        """Whether the worker has a batch to answer."""
        return bool(self._batches)

    def _acknowledge(self) -> None:
        while (call := self.leader.next_journal_call()) is not None:
            last = call.last if isinstance(call, Append | EndRewrite) else 0
            begun = process_time_ns()
            self.leader.journal_replied(Applied(last))
            self.spent_ns += process_time_ns() - begun


def prompts(count: int, length: int, shared: int, seed: int) -> list[np.ndarray]:
    """Random prompts, int32 `[length]`, that begin with the same `shared` tokens."""
    random = np.random.default_rng(seed)
    table = random.integers(3, 49_000, (count, length), np.int32)
    table[:, :shared] = table[0, :shared]
    return [row.copy() for row in table]  # each is its own, as out of a message


def decoding(count: int, context: int, num_blocks: int, block_size: int = 16) -> Desk:
    """`count` requests that decode at about `context` tokens, with lengths spread over a block."""
    config = Config(max_num_seqs=count, max_num_batched_tokens=1 << 24, max_queued_tokens=1 << 30)
    desk = Desk(config, num_blocks, block_size, count)
    for number, prompt in enumerate(prompts(count, context, 0, 7)):
        desk.submit(submission(number, prompt[: context - number % block_size], 1 << 16))
    while len(desk.step()) < count:
        pass
    gc.collect()
    return desk
