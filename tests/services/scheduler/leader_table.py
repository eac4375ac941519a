"""One leader's term on a table: a checking worker, a store that can fail, gateways that come and go."""

from collections import deque

import numpy as np
from core.fake_worker import MODEL, FakeWorker, reference_output

from services.rpc.spans import Tracing
from services.scheduler.core.journal_call import Failed
from services.scheduler.core.recovery import join
from services.scheduler.leader import Leader
from services.scheduler.request_traces import RequestTraces
from services.scheduler.sessions import GatewaySession
from services.scheduler.store.memory import MemoryStore
from tessera.values.batch import ScheduledBatch
from tessera.values.config import Config
from tessera.values.finish import FinishReason
from tessera.values.identity import NO_EPOCH, Epoch
from tessera.values.load import GroupLoad
from tessera.values.request import DetokenizeOptions, Submission
from tessera.values.sampling import SamplingParams
from tessera.values.session import Hello, HelloAck, KnownAs, LiveRequest, Rejected, Submit, TakenOver

WORKER = "worker:1"
CONFIG = Config(max_num_seqs=8, max_num_batched_tokens=64, gateway_grace_ms=1000, result_retention_ms=500)


class Table:
    """A leader with everything around it; `run` lets worker and store answer until nothing is left to do."""

    def __init__(
        self,
        worker: FakeWorker | None = None,
        store: MemoryStore | None = None,
        term: int = 1,
        tracing: Tracing | None = None,
    ) -> None:
        self.now_us = 1_000_000 * term
        self.worker = worker or FakeWorker()
        self.store = store or MemoryStore()
        self.store_answers = True
        self.may_speak = True
        self.num_gateways = 0
        self.outbox: deque[ScheduledBatch] = deque()
        epoch = Epoch(term, bytes([term]) * 16)
        self.store.epoch = epoch
        report = self.worker.attach(epoch, 1)
        recovered = join(self.store.stored().state, {WORKER: report}, [], lambda *_: None)
        last, clock = recovered.last_record, lambda: self.now_us
        self.leader = Leader(CONFIG, epoch, MODEL, last, lambda: None, clock, lambda: self.may_speak)
        if tracing is not None:
            self.leader.traces = RequestTraces(tracing, term, self.leader.scheduler, clock, lambda: 1000 * self.now_us)
            self.leader.traces.take_over(recovered)
        self.leader.lead(recovered, {WORKER: report}, {WORKER: self.outbox.append})
        if self.leader.traces is not None:
            self.leader.traces.begun()
        self.run()

    def run(self, steps: int = 1000) -> None:
        """Execute at most `steps` batches, and answer every journal call."""
        self.write()
        while self.outbox and steps:
            steps -= 1
            self.worker.enqueue(self.outbox.popleft())
            self.leader.worker_output(WORKER, self.worker.step())
            self.write()

    def write(self) -> None:
        while (call := self.leader.next_journal_call()) is not None:
            if not self.store_answers:
                self.leader.journal_replied(Failed("away"))
                return
            self.leader.journal_replied(self.store.execute(self.leader.epoch, call))

    def gateway(self, live: tuple[LiveRequest, ...] = (), gateway_id: bytes = b"") -> "Gateway":
        """A session of another gateway than all before, unless `gateway_id` names one."""
        self.num_gateways += 1
        return Gateway(self, live, gateway_id or self.num_gateways.to_bytes(16, "big"))

    def later(self, ms: int) -> None:
        self.now_us += 1000 * ms
        self.leader.tick()
        self.run()


class Gateway:
    """What one gateway sees; `tokens` per request, checked for gaps and repeats."""

    def __init__(self, table: Table, live: tuple[LiveRequest, ...], gateway_id: bytes) -> None:
        self.table = table
        self.session = GatewaySession(gateway_id)
        self.loads: list[GroupLoad] = []  # as told
        self.tokens = {entry.request_id: list(entry.token_ids) for entry in live}
        self.finishes: dict[bytes, FinishReason] = {}
        hello = Hello(NO_EPOCH, MODEL.tokenizer_digest, gateway_id, live)
        self.ack: HelloAck = table.leader.session_opened(self.session, hello)

    def submit(self, submission: Submission, subscriber: int = 0, received: tuple[int, ...] = ()) -> bytes:
        tokens = self.tokens.setdefault(submission.request_id, list(received))
        self.table.leader.heard(self.session, Submit(submission, subscriber, tuple(tokens)))
        return submission.request_id

    def read(self) -> list[Rejected | TakenOver | KnownAs]:
        """Take everything due; returns the control messages but loads. What is known under another id goes on under that."""
        posted = []
        for message in self.session.take_posted():
            self.loads.append(message) if isinstance(message, GroupLoad) else posted.append(message)
        for message in posted:
            if isinstance(message, KnownAs):
                self.tokens[message.known_request_id] = self.tokens.pop(message.request_id)
                self.finishes.pop(message.known_request_id, None)
        for output in self.table.leader.take_frame(self.session):
            tokens = self.tokens[output.request_id]
            assert output.token_offset == len(tokens), "a gap, or tokens sent twice"
            assert output.request_id not in self.finishes, "something came after the end"
            tokens.extend(output.token_ids)
            if output.finish is not None:
                self.finishes[output.request_id] = output.finish.reason
        return posted


def submission(number: int, prompt: list[int], max_tokens: int = 8, name: str = "") -> Submission:
    sampling = SamplingParams(seed=number, max_tokens=max_tokens, ignore_eos=True)
    return Submission(bytes([number]) * 16, np.array(prompt, np.int32), sampling, DetokenizeOptions(), name)


def expected(request: Submission) -> list[int]:
    return reference_output(request, 1000)[0]
