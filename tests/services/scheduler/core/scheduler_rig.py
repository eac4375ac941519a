"""A scheduler and one deterministic worker on a table: what a shell does, step by step, with the journal replayed beside it."""

from dataclasses import replace
from typing import Any

import numpy as np
from fake_worker import MODEL, FakeWorker, reference_output

from services.scheduler.core.admission import Admitted, Known, Refused
from services.scheduler.core.record import Record, StoredState
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.stop_rules import StopRules
from tessera.values.batch import ScheduledBatch, ScheduledBatchOutput
from tessera.values.config import Config
from tessera.values.finish import Finish, FinishReason
from tessera.values.identity import Epoch
from tessera.values.request import DetokenizeOptions, Submission
from tessera.values.sampling import SamplingParams

WORKER = "worker:1"
CONFIG = Config(max_num_seqs=8, max_num_batched_tokens=64)
REQUEST_FIELDS = ("priority", "cache_salt", "max_model_length", "fork_of", "is_seed_given", "limits")
IGNORE_EOS = SamplingParams(seed=7, temperature=0.0, ignore_eos=True)


def submission(
    number: int, prompt: list[int], sampling: SamplingParams = IGNORE_EOS, client_request_id: str = "", **own: Any
) -> Submission:
    """A request whose internal id is `number`; `own` are the fields of `REQUEST_FIELDS`."""
    request_id, prompt_ids = number.to_bytes(16, "big"), np.array(prompt, np.int32)
    return Submission(request_id, prompt_ids, sampling, DetokenizeOptions(), client_request_id, "someone", **own)


def own_stop(request: Submission, output: tuple[int, ...]) -> Finish | None:
    """The stop rules of the fake model, for a join."""
    return StopRules.of(request, MODEL, 1 << 20).first_stop(output)


class Rig:
    """`submit`, then `step` or `finish_all`; `worker` executes what `schedule` issues, and outputs wait in `outputs` until posted."""

    def __init__(self, config: Config = CONFIG, worker: FakeWorker | None = None, attach: bool = True) -> None:
        self.config = config
        self.worker = worker or FakeWorker()
        self.epoch = Epoch(1, b"leader")
        self.scheduler = Scheduler(config, self.epoch)
        self.nonce = 0
        self.now_us = 1_000_000
        self.state = StoredState()
        self.batches: list[ScheduledBatch] = []
        self.take_every, self.num_checks = 1, 0  # a journal may ask less often than things change
        if attach:
            self.attach()

    @property
    def pool_tokens(self) -> int:
        return self.worker.geometry.num_tokens

    @property
    def free_blocks(self) -> int:
        return self.scheduler.load().num_free_blocks

    def attach(self) -> None:
        """Attach, or attach again: what was queued at the worker and not stepped is discarded."""
        self.nonce += 1
        self.scheduler.attach_worker(WORKER, self.worker.attach(self.epoch, self.nonce), self.now_us)
        self.check()

    def submit(self, number: int, prompt: list[int], client_request_id: str = "", **given: object) -> bytes:
        """Submit and expect admission; returns the id. `given` are sampling parameters, and fields of `REQUEST_FIELDS`."""
        result = self.try_submit(number, prompt, client_request_id, **given)
        assert isinstance(result, Admitted), result
        return result.request_id

    def try_submit(
        self, number: int, prompt: list[int], client_request_id: str = "", **given: object
    ) -> Admitted | Known | Refused:
        own = {name: given.pop(name) for name in REQUEST_FIELDS if name in given}
        request = submission(number, prompt, replace(IGNORE_EOS, **given), client_request_id, **own)
        result = self.scheduler.submit(request, 0, (), self.now_us)
        self.check()
        return result

    def sequence(self, number: int) -> Sequence:
        found = self.scheduler.request(number.to_bytes(16, "big"))
        assert found is not None
        return found

    def output(self, number: int) -> list[int]:
        return list(self.sequence(number).output_token_ids())

    def reason(self, number: int) -> FinishReason:
        finish = self.sequence(number).finish
        assert finish is not None
        return finish.reason

    def schedule(self) -> ScheduledBatch | None:
        """Issue a batch to the worker's queue."""
        batch = self.scheduler.schedule(WORKER, self.now_us)
        if batch is not None:
            self.batches.append(batch)
            self.worker.enqueue(batch)
        self.check()
        return batch

    def execute(self) -> ScheduledBatchOutput:
        """The worker's oldest batch."""
        self.now_us += 1000
        return self.worker.step()

    def post(self, output: ScheduledBatchOutput) -> None:
        self.scheduler.postprocess(WORKER, output, self.now_us)
        self.check()

    def step(self, in_flight: int = 1) -> bool:
        """One turn of the loop with up to `in_flight` batches out; False when there was nothing to do."""
        while len(self.worker.queue) < in_flight and self.schedule() is not None:
            pass
        if not self.worker.queue:
            return False
        self.post(self.execute())
        return True

    def finish_all(self, in_flight: int = 1, steps_max: int = 500) -> int:
        """Run until nothing is left to do; returns the number of steps."""
        for count in range(steps_max):
            if not self.step(in_flight):
                load = self.scheduler.load()
                num_left = load.num_running + load.num_swapped + load.num_waiting
                assert num_left == 0, "nothing is scheduled, but requests are left"
                return count
        raise AssertionError(f"not done after {steps_max} steps")

    def check(self) -> None:
        """Integrity, and every `take_every` times the journal."""
        self.scheduler.check_integrity()
        self.num_checks += 1
        if self.num_checks % self.take_every == 0:
            self.take()

    def take(self) -> None:
        """Replaying the journal gives the live state."""
        changes = self.scheduler.take_changes()
        if changes is not None:
            record = Record(self.state.last + 1, changes.requests, changes.blocks, changes.forgotten, changes.decoded)
            self.state.apply(record)
            self.state.apply(replace(record, number=record.number + 1))  # absolute: twice is once
        assert_replayed(self.state, self.scheduler)

    def assert_as_alone(self, *numbers: int) -> None:
        """Requests that ended by themselves have the output they would have had alone."""
        for number in numbers:
            sequence = self.sequence(number)
            assert sequence.finish is not None
            expected, finish = reference_output(sequence.submission, self.pool_tokens, self.worker.model)
            assert (self.output(number), sequence.finish) == (expected, finish)


def batch_short_of_a_block(rig: Rig, *max_tokens: int) -> ScheduledBatch:
    """The batch in which the second of two requests has to go, whose row at position 7 is still in flight. Four blocks of 4 tokens, and
    prompts of 7: position 8 of the first needs the block that only the second can give."""
    for number, limit in enumerate(max_tokens, 1):
        rig.submit(number, list(range(20 * number, 20 * number + 7)), max_tokens=limit)
    rig.schedule()
    rig.post(rig.execute())
    rig.schedule()
    batch = rig.schedule()
    assert batch is not None
    return batch


def assert_replayed(state: StoredState, scheduler: Scheduler) -> None:
    """The state that the journal tells is the live one, but for blocks that batches in flight appended."""
    assert state.requests.keys() == {sequence.request_id for sequence in scheduler.requests()}
    for sequence in scheduler.requests():
        stored = state.requests[sequence.request_id]
        told = (stored.submission, stored.arrival, stored.status, stored.subscriber, stored.attempt, stored.worker)
        live = (sequence.submission, sequence.arrival, sequence.status, sequence.subscriber, sequence.attempt, sequence.worker)
        assert told == live
        told = (stored.num_cached_tokens, stored.finish, stored.timings, stored.tokens_max)
        assert told == (sequence.num_cached_tokens, sequence.finish, sequence.timings, sequence.tokens_max)
        assert tuple(stored.output_token_ids) == sequence.output_token_ids()
        assert sequence.table.block_ids[: len(stored.block_ids)] == stored.block_ids
    replica = scheduler.replica(WORKER)
    if replica is not None:
        assert state.blocks.get((WORKER, replica.boot_id), {}) == {
            entry.block_id: entry for entry in replica.manager.published()
        }
