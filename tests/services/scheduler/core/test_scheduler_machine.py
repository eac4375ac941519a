"""Random lives of a scheduler and its worker: whatever happens in whatever order, every request gets the output it would get alone."""

import copy
from collections import deque
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
from fake_worker import FakeWorker, reference_output
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_rig import WORKER, Rig, own_stop, submission

from services.scheduler.core.admission import Admitted, Refused
from services.scheduler.core.record import StoredState
from services.scheduler.core.recovery import GatewayClaim, join
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.worker_loss import LEFT
from tessera.values.batch import ScheduledBatchOutput
from tessera.values.config import POLICIES, PREEMPTION_MODES, PREEMPTION_POLICIES, PREFIX_INDEXES, QUEUE_ORDERS, Config
from tessera.values.finish import FinishReason
from tessera.values.identity import Epoch
from tessera.values.model import WorkerLimits
from tessera.values.request import Submission
from tessera.values.sampling import SamplingParams

BY_OWN_TOKENS = {
    FinishReason.EOS,
    FinishReason.STOP_SEQUENCE,
    FinishReason.STOP_TOKEN,
    FinishReason.MAX_TOKENS,
    FinishReason.MAX_MODEL_LEN,
}

PREFIXES = ([], [10, 11, 12, 13], [10, 11, 12, 13, 14, 15, 16, 17], [20, 21, 22, 23])
prompts = st.builds(
    lambda prefix, tail: prefix + tail, st.sampled_from(PREFIXES), st.lists(st.integers(30, 33), min_size=1, max_size=9)
)
token_ids = st.integers(0, 63)
samplings = st.builds(
    SamplingParams,
    seed=st.integers(0, 3),
    max_tokens=st.integers(1, 16),
    min_tokens=st.integers(0, 3),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(token_ids, max_size=6).map(tuple),
    stop_token_sequences=st.lists(st.tuples(token_ids), max_size=3).map(tuple),
)
own_fields = st.fixed_dictionaries(
    {
        "priority": st.integers(-1, 1),
        "max_model_length": st.sampled_from((0, 0, 10, 18)),
        "cache_salt": st.sampled_from(("", "", "a tenant")),
    }
)


def config_of(max_num_seqs: int, max_num_batched_tokens: int, num_speculative_tokens: int, **others: Any) -> Config:
    """A configuration with as many of the draft tokens as its budget holds."""
    num_drafts = min(num_speculative_tokens, max_num_batched_tokens // max_num_seqs - 1)
    return Config(max_num_seqs, max_num_batched_tokens, num_speculative_tokens=num_drafts, **others)


configs = st.builds(
    config_of,
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(5, 24),
    num_speculative_tokens=st.sampled_from((0, 0, 1, 4)),
    enable_prefix_caching=st.booleans(),
    prefix_index=st.sampled_from(PREFIX_INDEXES),
    secure_zero=st.booleans(),
    enable_chunked_prefill=st.booleans(),
    long_prefill_token_threshold=st.sampled_from((0, 0, 3)),
    policy=st.sampled_from(POLICIES),
    queue_order=st.sampled_from(QUEUE_ORDERS),
    preemption_mode=st.sampled_from(PREEMPTION_MODES),
    preemption_policy=st.sampled_from(PREEMPTION_POLICIES),
    scheduler_delay_factor=st.sampled_from((0.0, 0.0, 1.5)),
    itl_target_ms=st.sampled_from((0, 0, 1)),
    max_batches_in_flight=st.sampled_from((1, 2, 2)),
    result_retention_ms=st.just(20),
)


class SchedulerMachine(RuleBasedStateMachine):
    """One worker, one leader at a time; `submitted` is what clients asked for and have not been told the end of."""

    @initialize(
        config=configs,
        pool_tokens=st.integers(16, 48),
        host_tokens=st.sampled_from((0, 8, 64)),
        block_size=st.sampled_from((1, 2, 3, 4)),
        take_every=st.integers(1, 3),
    )
    def start(self, config: Config, pool_tokens: int, host_tokens: int, block_size: int, take_every: int) -> None:
        limits = WorkerLimits(max_num_seqs=6, max_num_batched_tokens=20, num_speculative_tokens=3)
        num_host_blocks = host_tokens // block_size
        self.rig = Rig(config, FakeWorker(pool_tokens // block_size, block_size, limits, num_host_blocks=num_host_blocks))
        self.rig.take_every = take_every
        self.outputs: deque[ScheduledBatchOutput] = deque()
        self.late: list[ScheduledBatchOutput] = []
        self.submitted: dict[bytes, Submission] = {}
        self.attempts: dict[bytes, int] = {}
        self.stored = StoredState()
        self.number = 0

    # -- requests

    @rule(requests=st.lists(st.tuples(prompts, samplings, own_fields), min_size=1, max_size=3))
    def submit(self, requests: list[tuple[list[int], SamplingParams, dict[str, Any]]]) -> None:
        for prompt, sampling, own in requests:
            self.submit_one(prompt, sampling, own)

    def submit_one(self, prompt: list[int], sampling: SamplingParams, own: dict[str, Any]) -> None:
        self.number += 1
        sampling = replace(sampling, min_tokens=min(sampling.min_tokens, sampling.max_tokens))
        request = submission(self.number, prompt, sampling, **own)
        result = self.rig.scheduler.submit(request, 0, (), self.rig.now_us)
        self.rig.check()
        if isinstance(result, Admitted):
            self.submitted[request.request_id] = request
        else:
            assert isinstance(result, Refused)
            budget = min(self.rig.config.max_num_batched_tokens, 20)
            own_room = (own["max_model_length"] or 64) - 1
            assert len(prompt) > min(self.rig.pool_tokens, own_room, budget), result

    @rule(count=st.integers(2, 4), own=own_fields, turns=st.integers(1, 12))
    def crowd(self, count: int, own: dict[str, Any], turns: int) -> None:
        """Requests that soon outgrow most pools together, and some undisturbed turns."""
        for seed in range(count):
            prompt = [30 + (self.number + seed) % 4, 31, 32]
            self.submit_one(prompt, SamplingParams(seed, max_tokens=16, ignore_eos=True), own)
        self.run(turns, 2)

    @precondition(lambda self: list(self.rig.scheduler.requests()))
    @rule(data=st.data(), sampling=samplings, count=st.integers(1, 2), own=own_fields)
    def fork(self, data: st.DataObject, sampling: SamplingParams, count: int, own: dict[str, Any]) -> None:
        """More outputs of the prompt of a request, wherever that is in its life; mostly for the same tenant."""
        parent = data.draw(st.sampled_from(list(self.rig.scheduler.requests()))).submission
        own = own | {"fork_of": parent.request_id}
        if data.draw(st.integers(0, 3)):
            own["cache_salt"] = parent.cache_salt
        for seed in range(count):
            self.submit_one(parent.prompt_token_ids.tolist(), replace(sampling, seed=seed), own)

    def live(self) -> list[Sequence]:
        return [sequence for sequence in self.rig.scheduler.requests() if sequence.finish is None]

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live()))
        self.rig.scheduler.abort(sequence.request_id, self.rig.now_us)
        self.rig.check()
        assert sequence.finish is not None and sequence.finish.reason is FinishReason.ABORTED

    @precondition(lambda self: list(self.rig.scheduler.requests()))
    @rule(data=st.data())
    def stop_found(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(list(self.rig.scheduler.requests())))
        before, length = sequence.finish, sequence.output_len
        output_len = data.draw(st.integers(0, length + 1))
        self.rig.scheduler.stop_found(sequence.request_id, output_len, "stop", self.rig.now_us)
        self.rig.check()
        if before is None and 0 < output_len <= length:
            assert sequence.finish is not None and sequence.output_len == output_len

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        """A gateway that holds tokens which the leader has not committed: they are the right ones all the same."""
        sequence = data.draw(st.sampled_from(self.live()))
        expected, _ = reference_output(sequence.submission, self.rig.pool_tokens)
        received = tuple(expected[: data.draw(st.integers(0, sequence.output_len + 2))])
        subscriber = data.draw(st.integers(max(0, sequence.subscriber - 1), sequence.subscriber + 1))
        self.rig.scheduler.claim(sequence.request_id, subscriber, received, self.rig.now_us)
        self.rig.check()

    @rule()
    def forget(self) -> None:
        self.rig.scheduler.forget_finished(self.rig.now_us)
        self.rig.check()

    # -- the loop

    @rule()
    def pause(self) -> None:
        """Until the next `resume`, leader, or the end."""
        self.rig.scheduler.pause()
        assert self.rig.schedule() is None

    @rule()
    def resume(self) -> None:
        """Whoever paused it may have done so for a fresh cache."""
        if self.number % 3 == 2:
            self.rig.scheduler.admin.reset_prefix_cache()
        self.rig.scheduler.resume()
        self.rig.check()

    @rule()
    def schedule(self) -> None:
        self.rig.schedule()

    @precondition(lambda self: self.rig.worker.queue)
    @rule()
    def execute(self) -> None:
        self.outputs.append(self.rig.execute())

    @precondition(lambda self: self.outputs)
    @rule()
    def post(self) -> None:
        self.rig.post(self.outputs.popleft())

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def post_late(self, data: st.DataObject) -> None:
        """An output of an earlier attach or leader, or one twice: a no-op."""
        before = [(s.request_id, s.output_token_ids(), s.status) for s in self.rig.scheduler.requests()]
        self.rig.post(data.draw(st.sampled_from(self.late)))
        assert before == [(s.request_id, s.output_token_ids(), s.status) for s in self.rig.scheduler.requests()]

    @rule(count=st.integers(1, 6), in_flight=st.integers(1, 3))
    def run(self, count: int, in_flight: int) -> None:
        """Some undisturbed turns."""
        while self.outputs:
            self.post()
        for _ in range(count):
            self.rig.step(in_flight)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def fail_row(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live()))
        self.rig.worker.fail_next_row(sequence.request_id)

    @rule(lag=st.integers(0, 2))
    def durable(self, lag: int) -> None:
        """The journal has acknowledged all but the last `lag` outputs."""
        replica = self.rig.scheduler.replica(WORKER)
        assert replica is not None
        self.rig.scheduler.set_durable_step(WORKER, replica.boot_id, max(0, replica.applied_step - lag))

    # -- what goes wrong

    def outputs_are_late(self) -> None:
        self.late += self.outputs
        self.outputs.clear()

    @rule()
    def reattach(self) -> None:
        """The stream broke: outputs on the way and batches not started are lost, everything held goes on."""
        self.outputs_are_late()
        held = {slot.request_id: slot.computed_len for slot in self.rig.worker.report().slots}
        self.rig.attach()
        replica = self.rig.scheduler.replica(WORKER)
        assert replica is not None
        for sequence in (*replica.running.values(), *replica.swapped.values()):
            assert sequence.ledger.computed_len == held[sequence.request_id]

    @rule()
    def restart_worker(self) -> None:
        self.outputs_are_late()
        self.rig.worker.restart()
        self.rig.attach()

    @rule(comes_back=st.booleans())
    def lose_worker(self, comes_back: bool) -> None:
        self.outputs_are_late()
        self.rig.scheduler.lose_worker(WORKER, LEFT, self.rig.now_us)
        self.rig.check()
        assert self.rig.schedule() is None
        if comes_back:
            self.rig.attach()

    @rule()
    def store(self) -> None:
        """What the store holds from now on, until the next time."""
        self.rig.take()
        self.stored = copy.deepcopy(self.rig.state)

    @rule(is_behind=st.booleans(), gateway_lag=st.integers(-2, 2), late=st.booleans())
    def take_over(self, is_behind: bool, gateway_lag: int, late: bool) -> None:
        """The leader dies; the next one joins store, gateways and worker. What the store does not know, gateways claim, maybe too late."""
        self.outputs_are_late()
        self.rig.take()
        received = {s.request_id: self.received_of(s, gateway_lag) for s in self.live()}
        rig = self.rig
        rig.epoch = Epoch(rig.epoch.number + 1, b"leader")
        rig.nonce = 1
        report = rig.worker.attach(rig.epoch, 1)
        rig.scheduler = Scheduler(rig.config, rig.epoch)
        claims = [GatewayClaim(request_id, 0, output) for request_id, output in received.items()]
        recovered = join(self.stored if is_behind else rig.state, {WORKER: report}, claims, own_stop)
        rig.scheduler.restore(recovered, {WORKER: report}, rig.now_us)
        rig.state = StoredState()
        self.attempts.clear()
        rig.check()
        if late:
            rig.scheduler.expire_orphans()
            rig.check()
        for request_id, output in received.items():
            if rig.scheduler.request(request_id) is None:
                rig.scheduler.submit(self.submitted[request_id], 1, output, rig.now_us)
                rig.check()
        rig.scheduler.expire_orphans()
        rig.check()
        assert rig.scheduler.load().recomputed_positions == 0

    def received_of(self, sequence: Sequence, lag: int) -> tuple[int, ...]:
        """What a gateway holds: it may be behind, or have come by more tokens than this worker's attempt has got to."""
        expected, _ = reference_output(sequence.submission, self.rig.pool_tokens)
        return tuple(expected[: max(0, sequence.output_len - lag)])

    # -- what always holds

    @invariant()
    def outputs_are_right(self) -> None:
        for sequence in self.rig.scheduler.requests() if hasattr(self, "rig") else ():
            assert sequence.attempt >= self.attempts.get(sequence.request_id, 0), "an attempt came again"
            self.attempts[sequence.request_id] = sequence.attempt
            output, finish = list(sequence.output_token_ids()), sequence.finish
            expected, expected_finish = reference_output(sequence.submission, self.rig.pool_tokens)
            assert output == expected[: len(output)]
            if finish is not None and finish.reason in BY_OWN_TOKENS:
                assert (output, finish) == (expected, expected_finish)

    def teardown(self) -> None:
        """Every request ends within a bound, and every block is free."""
        if not hasattr(self, "rig"):
            return
        self.outputs_are_late()
        self.rig.scheduler.resume()
        self.rig.attach()
        rig, load = self.rig, self.rig.scheduler.load()
        tokens = sum(s.ledger.prompt_len + s.submission.sampling.max_tokens for s in self.live())
        steps = rig.finish_all(in_flight=2, steps_max=20 + 3 * tokens)
        assert steps <= 20 + 3 * tokens
        assert rig.scheduler.load().num_swapped == 0
        replica = rig.scheduler.replica(WORKER)
        assert replica is not None and replica.manager.num_free_host_blocks == rig.worker.geometry.num_host_blocks
        preemptions = rig.scheduler.load().num_preemptions - load.num_preemptions
        assert preemptions <= tokens, "more preemptions than tokens"
        rig.take()
        assert not rig.worker.slots
        assert rig.free_blocks == rig.worker.geometry.num_blocks
        self.outputs_are_right()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
