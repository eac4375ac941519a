"""A scheduler group on a table, made of its pure parts: leaders that die, a store that forgets, workers that check every position, and the
calls of clients at gateways. Nothing happens by itself: a test says who does what, and in which order.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from fake_worker import LIMITS, FakeWorker, prefix_digests, reference_output
from scheduler_rig import REQUEST_FIELDS, own_stop

from services.scheduler.core.admission import Refused, Unknown
from services.scheduler.core.committed_output import CommittedOutput
from services.scheduler.core.journal import Journal, WorkerStep
from services.scheduler.core.journal_call import Failed
from services.scheduler.core.recovered import Recovered
from services.scheduler.core.recovery import GatewayClaim, join
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.streams import Streams
from services.scheduler.core.worker_loss import LEFT, WorkerLoss
from services.scheduler.store.memory import MemoryStore
from tessera.values.batch import ScheduledBatchOutput
from tessera.values.config import Config
from tessera.values.finish import Finish
from tessera.values.identity import NO_EPOCH, Epoch
from tessera.values.logprobs import Logprobs, no_logprobs
from tessera.values.report import WorkerReport
from tessera.values.request import DetokenizeOptions, RequestOutput, Submission
from tessera.values.sampling import SamplingParams
from tessera.values.session import TakenOver
from tests.services.scheduler.core.fake_logprobs import expected_logprobs

WORKER, OTHER_WORKER = "worker:1", "worker:2"
CONFIG = Config(max_num_seqs=4, max_num_batched_tokens=16, gateway_grace_ms=1000)
STEP_US = 10_000


@dataclass
class Gateway:
    """One gateway process; it listens to nobody below the highest epoch that it has seen."""

    name: str
    calls: dict[bytes, "Call"] = field(default_factory=dict)
    highest: Epoch = NO_EPOCH

    def listens_to(self, epoch: Epoch) -> bool:
        return epoch.supersedes(self.highest)


@dataclass(slots=True, eq=False)
class Call:
    """One call of a client at a gateway, and what has come of it."""

    gateway: Gateway
    submission: Submission
    subscriber: int
    tokens: list[int]
    ends: list[Finish] = field(default_factory=list)
    is_taken_over: bool = False
    told: dict[int, Logprobs] = field(default_factory=dict)  # log-probabilities that came, by the token's offset
    prompt_logprobs: Logprobs | None = None

    @property
    def logprobs(self) -> list[Logprobs]:
        """Of `tokens`, one each, without entries where none came."""
        return [self.told.get(at, no_logprobs(1)) for at in range(len(self.tokens))]

    @property
    def received(self) -> tuple[int, ...]:
        return tuple(self.tokens)

    def take(self, output: RequestOutput) -> None:
        """What a client sees: dense offsets, as many log-probabilities as tokens, and nothing after the end."""
        assert output.subscriber == self.subscriber, "a frame for somebody else"
        assert not self.ends and not self.is_taken_over, "something came after the end"
        assert output.token_offset == len(self.tokens), f"{output.token_offset} came, {len(self.tokens)} was due"
        self.tokens += output.token_ids
        count = len(output.token_ids)
        assert output.logprobs is None or len(output.logprobs) == count
        if output.logprobs is not None:
            self.told.update(enumerate(output.logprobs.split([1] * count), output.token_offset))
        if output.prompt_logprobs is not None:
            assert not output.token_offset and count, "with the first token"
            self.prompt_logprobs = output.prompt_logprobs
        if output.finish is not None:
            self.ends.append(output.finish)

    def check_logprobs(self) -> int:
        """All that came are the right ones; returns how many tokens, of prompt and output, were to have some and have none."""
        ids = [*self.submission.prompt_token_ids.tolist(), *self.tokens]
        output, prompt = expected_logprobs(self.submission, self.tokens, prefix_digests(ids))
        found = [*self.logprobs, *(self.prompt_logprobs or no_logprobs(len(prompt))).split([1] * len(prompt))]
        num_missing = 0
        for mine, right in zip(found, [*output, *prompt], strict=True):
            is_missing = not mine.counts.any() and bool(right.counts.any())
            assert is_missing or mine == right
            num_missing += is_missing
        return num_missing


class Lead:
    """One leader: what `Leader` does with the same parts, one event at a time."""

    def __init__(self, house: "House", epoch: Epoch, recovered: Recovered, reports: dict[str, WorkerReport]) -> None:
        self.house, self.epoch = house, epoch
        self.scheduler = Scheduler(house.config, epoch)
        self.journal = Journal(house.config, epoch.number, recovered.last_record)
        self.streams: Streams[str] = Streams(house.config, self._read)
        self.nonces = dict.fromkeys(reports, 1)
        self.refused_sends = 0
        self.scheduler.restore(recovered, reports, house.now_us)
        self.settle()

    def settle(self, step: WorkerStep | None = None) -> None:
        """Batches leave, then changes become a record, then what may be seen is shown. The record is not written yet."""
        for name in self.nonces:
            while (batch := self.scheduler.schedule(name, self.house.now_us)) is not None:
                worker = self.house.workers[name]
                if worker.epoch == self.epoch:
                    worker.enqueue(batch)
                else:
                    self.refused_sends += 1
        changes = self.scheduler.take_changes()
        if changes is not None:
            self.streams.add(self.journal.add(changes, self.house.now_us, step), self.house.now_us)
        self.release()

    def release(self) -> None:
        self.streams.release(self.journal.acked, self.journal.is_durable(self.house.now_us))
        for name in self.nonces:
            replica = self.scheduler.replica(name)
            assert replica is not None
            step_id = self.journal.durable_step(name, replica.boot_id)
            self.scheduler.set_durable_step(name, replica.boot_id, step_id)
        self.scheduler.check_integrity()

    def hear(self, name: str, output: ScheduledBatchOutput) -> None:
        replica = self.scheduler.replica(name)
        assert replica is not None
        self.scheduler.postprocess(name, output, self.house.now_us)
        self.settle(WorkerStep(name, replica.boot_id, output.step_id))

    def attach(self, name: str) -> None:
        """Attach a worker, or attach it again."""
        self.nonces[name] = self.nonces.get(name, 0) + 1
        report = self.house.workers[name].attach(self.epoch, self.nonces[name])
        self.scheduler.attach_worker(name, report, self.house.now_us)
        self.settle()

    def lose(self, name: str, loss: WorkerLoss = LEFT) -> None:
        self.scheduler.lose_worker(name, loss, self.house.now_us)
        self.settle()

    def _read(self, request_id: bytes, first: int, end: int) -> CommittedOutput:
        sequence = self.scheduler.request(request_id)
        assert sequence is not None
        return sequence.committed_output(first, end)


class House:
    """`lead` is the present leader, `now_us` the clock of everybody. All workers have `num_blocks`, unless the second is to have `other_blocks`."""

    def __init__(
        self, num_blocks: int = 64, num_workers: int = 1, num_host_blocks: int = 0, other_blocks: int = 0, **config: object
    ) -> None:
        self.config = replace(CONFIG, **config)
        names = (WORKER, OTHER_WORKER)[:num_workers]
        limits = replace(LIMITS, num_speculative_tokens=self.config.num_speculative_tokens)
        blocks = {WORKER: num_blocks, OTHER_WORKER: other_blocks or num_blocks}
        self.workers = {name: FakeWorker(blocks[name], 4, limits, num_host_blocks=num_host_blocks) for name in names}
        self.store = MemoryStore()
        self.gateways: dict[str, Gateway] = {}
        self.now_us = 1_000_000
        self.outputs: dict[str, list[ScheduledBatchOutput]] = {name: [] for name in names}
        self.attempts: dict[tuple[str, Epoch, int, bytes], int] = {}  # the highest that entered under an attach
        self.term = 0
        self.lead = self.take_over()

    @property
    def worker(self) -> FakeWorker:
        return self.workers[WORKER]

    # -- leaders

    def take_over(self, late: tuple[str, ...] = (), late_workers: tuple[str, ...] = ()) -> Lead:
        """Whoever led is dead: the next one attaches, reads, hears all gateways but the `late` ones, joins and leads. Outputs on the way
        are lost. `late_workers` are not reachable yet."""
        self.term += 1
        epoch = Epoch(self.term, bytes([self.term]) * 16)
        self.store.epoch = epoch
        reports = {name: worker.attach(epoch, 1) for name, worker in self.workers.items() if name not in late_workers}
        for outputs in self.outputs.values():
            outputs.clear()
        present = [gateway for name, gateway in self.gateways.items() if name not in late]
        claims = [
            GatewayClaim(request_id, call.subscriber, call.received)
            for gateway in present
            for request_id, call in gateway.calls.items()
        ]
        recovered = join(self.store.stored().state, reports, claims, own_stop)
        self.lead = Lead(self, epoch, recovered, reports)
        for gateway in present:
            self.say_hello(gateway.name)
        return self.lead

    def say_hello(self, name: str) -> None:
        """A gateway opens a session with the present leader; what that does not know it submits again."""
        gateway, lead = self.gateways[name], self.lead
        gateway.highest = lead.epoch
        for request_id, call in list(gateway.calls.items()):
            answer = lead.scheduler.claim(request_id, call.subscriber, call.received, self.now_us)
            if isinstance(answer, Unknown):
                self._submit(lead, call)
            else:
                self._claim(lead, call, request_id)
        lead.settle()

    # -- workers

    def execute(self, name: str = WORKER) -> None:
        """A worker computes its oldest batch; the output is on its way. No attempt of a request comes twice to a worker: neither one that
        it still holds something of, nor one that entered under the same attach."""
        self.now_us += STEP_US
        worker = self.workers[name]
        for entry in worker.queue[0].entries:
            key = name, worker.epoch, worker.nonce, entry.request_id
            held = [slot.attempt for slot in (*worker.slots.values(), *worker.dropped) if slot.request_id == entry.request_id]
            assert entry.attempt > max([0, *held, self.attempts.get(key, 0)]), "an attempt came again"
            self.attempts[key] = entry.attempt
        self.outputs[name].append(self.workers[name].step())

    def hear(self, name: str = WORKER) -> None:
        """The leader gets the oldest output; it reads none of a worker that it has not attached."""
        output = self.outputs[name].pop(0)
        if name in self.lead.nonces:
            self.lead.hear(name, output)

    # -- the store

    def write(self, calls_max: int = 1000) -> None:
        """The store carries out what the leader asks, and answers."""
        lead = self.lead
        while calls_max and (call := lead.journal.next_call(self.now_us)) is not None:
            calls_max -= 1
            lead.journal.on_reply(self.store.execute(lead.epoch, call), self.now_us)
            lead.release()

    def write_unheard(self) -> None:
        """The store carries out the next call, if there is one; the answer is lost."""
        call = self.lead.journal.next_call(self.now_us)
        if call is not None:
            self.store.execute(self.lead.epoch, call)
            self.lead.journal.on_reply(Failed("the connection broke"), self.now_us)

    # -- gateways and their clients

    def call(
        self,
        number: int,
        prompt: list[int],
        gateway: str = "g1",
        subscriber: int = 0,
        received: tuple[int, ...] = (),
        name: str = "",
        **given: object,
    ) -> Call:
        """A client calls; `number` is the internal id that its gateway draws. `given` are sampling parameters, and fields of
        `REQUEST_FIELDS`."""
        own = {field: given.pop(field) for field in REQUEST_FIELDS if field in given}
        params = replace(SamplingParams(seed=7, ignore_eos=True), **given)
        request_id, prompt_ids = number.to_bytes(16, "big"), np.array(prompt, np.int32)
        request = Submission(request_id, prompt_ids, params, DetokenizeOptions(), name, "someone", **own)
        call = Call(self._gateway(gateway), request, subscriber, list(received))
        call.gateway.calls[request.request_id] = call
        self._submit(self.lead, call)
        self.lead.settle()
        return call

    def resume(self, call: Call, number: int, gateway: str, subscriber: int, received: tuple[int, ...] | None = None) -> Call:
        """The client of `call` goes on at a gateway, behind what it has."""
        request = replace(call.submission, request_id=number.to_bytes(16, "big"))
        tokens = call.received if received is None else received
        again = Call(self._gateway(gateway), request, subscriber, list(tokens))
        again.told = {at: logprobs for at, logprobs in call.told.items() if at < len(tokens)}
        again.prompt_logprobs = call.prompt_logprobs if tokens else None
        again.gateway.calls[request.request_id] = again
        self._submit(self.lead, again)
        self.lead.settle()
        return again

    def abort(self, call: Call, request_id: bytes | None = None) -> None:
        """The gateway of a call says that its client has left."""
        session = self._session(self.lead, call.gateway)
        known = self.lead.streams.claimed_by(session, request_id or call.submission.request_id, call.subscriber)
        if known is not None:
            self.lead.scheduler.abort(known, self.now_us)
        self.lead.settle()

    def stop_found(self, call: Call, output_len: int) -> None:
        session = self._session(self.lead, call.gateway)
        known = self.lead.streams.claimed_by(session, call.submission.request_id, call.subscriber)
        if known is not None:
            self.lead.scheduler.stop_found(known, output_len, "stop", self.now_us)
        self.lead.settle()

    def read(self, lead: Lead | None = None) -> None:
        """All gateways take what a leader has for them; one of an earlier epoch is not listened to."""
        lead = lead or self.lead
        for gateway in self.gateways.values():
            outputs = lead.streams.take_frame(self._session(lead, gateway))
            if not gateway.listens_to(lead.epoch):
                continue
            gateway.highest = lead.epoch
            for output in outputs:
                call = gateway.calls.get(output.request_id)
                if call is not None:
                    call.take(output)
                    if call.ends:
                        del gateway.calls[output.request_id]

    # -- all together

    def turn(self, count: int = 1, writes: bool = True) -> None:
        """So many undisturbed steps of every worker that has a batch."""
        for _ in range(count):
            for name, worker in self.workers.items():
                if worker.queue:
                    self.execute(name)
                    self.hear(name)
            if writes:
                self.write()
            self.read()

    def run(self, turns_max: int = 500) -> None:
        """Until nothing is left to do."""
        self.write()
        for _ in range(turns_max):
            if not any(worker.queue for worker in self.workers.values()):
                break
            self.turn()
        load = self.lead.scheduler.load()
        assert load.num_running == load.num_swapped == load.num_waiting == 0, "something is left"
        self.read()

    def assert_as_undisturbed(self, *calls: Call) -> None:
        """What the clients have is what one undisturbed run gives, with one end each; nothing is left behind anywhere."""
        for call in calls:
            expected, finish = reference_output(call.submission, self.worker.geometry.num_tokens)
            assert call.tokens == expected, f"{call.tokens} instead of {expected}"
            assert call.ends == [finish]
            call.check_logprobs()
        self.assert_clean()

    def assert_clean(self) -> None:
        lead = self.lead
        lead.scheduler.check_integrity()
        load = lead.scheduler.load()
        assert load.num_free_blocks == load.num_blocks, "blocks leaked"
        for name in lead.nonces:
            replica = lead.scheduler.replica(name)
            assert replica is not None
            num_host_blocks = replica.description.geometry.num_host_blocks
            assert replica.manager.num_free_host_blocks == num_host_blocks, "host blocks leaked"
        assert load.num_contradictions == 0
        state = self.store.stored().state
        assert lead.journal.acked == lead.journal.last_record == state.last
        for sequence in lead.scheduler.requests():
            stored = state.requests[sequence.request_id]
            assert (tuple(stored.output_token_ids), stored.finish) == (sequence.output_token_ids(), sequence.finish)

    def assert_nothing_recomputed(self, *calls: Call) -> None:
        """By the counter, and by what the workers really did: every position once."""
        assert self.lead.scheduler.load().recomputed_positions == 0
        computed = sum(worker.computed_positions for worker in self.workers.values())
        assert computed == sum(len(call.submission.prompt_token_ids) + len(call.tokens) - 1 for call in calls)

    # -- inside

    def _gateway(self, name: str) -> Gateway:
        return self.gateways.setdefault(name, Gateway(name))

    def _session(self, lead: Lead, gateway: Gateway) -> str:
        return f"{gateway.name} with {lead.epoch.number}"

    def _submit(self, lead: Lead, call: Call) -> None:
        answer = lead.scheduler.submit(call.submission, call.subscriber, call.received, self.now_us)
        assert not isinstance(answer, Refused), answer
        self._claim(lead, call, answer.request_id)

    def _claim(self, lead: Lead, call: Call, request_id: bytes) -> None:
        """As `Leader` does; what it would post is done at the gateways at once."""
        submitted_id = call.submission.request_id
        alias = None if submitted_id == request_id else submitted_id
        session = self._session(lead, call.gateway)
        answer = lead.streams.claim(session, request_id, call.subscriber, len(call.tokens), alias)
        if isinstance(answer, TakenOver):
            self._take_over_call(call.gateway, answer.request_id, answer.subscriber)
            return
        if alias is not None:  # known as another: this gateway's earlier call of that ends
            del call.gateway.calls[submitted_id]
            if request_id in call.gateway.calls:
                self._take_over_call(call.gateway, request_id, call.gateway.calls[request_id].subscriber)
            call.submission = replace(call.submission, request_id=request_id)
            call.gateway.calls[request_id] = call
        if answer.replaced is not None:
            name = answer.replaced.session.split(" with ")[0]
            self._take_over_call(self.gateways[name], request_id, answer.replaced.subscriber)

    def _take_over_call(self, gateway: Gateway, request_id: bytes, subscriber: int) -> None:
        call = gateway.calls.get(request_id)
        if call is not None and call.subscriber == subscriber:
            call.is_taken_over = True
            del gateway.calls[request_id]
