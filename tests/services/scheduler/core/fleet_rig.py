"""A scheduler and several deterministic workers on a table, with the journal replayed beside them; any of them can be lost, cut off or killed."""

from dataclasses import replace

from fake_worker import FakeWorker, reference_output
from scheduler_rig import IGNORE_EOS, REQUEST_FIELDS, submission

from services.scheduler.core.admission import Admitted
from services.scheduler.core.record import Record, StoredState
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.worker_loss import LossKind, WorkerLoss
from tessera.values.batch import ScheduledBatch
from tessera.values.config import Config
from tessera.values.identity import Epoch
from tessera.values.model import WorkerLimits

BROKEN = WorkerLoss(LossKind.BROKEN, text="the stream broke")
LIMITS = WorkerLimits(max_num_seqs=16, max_num_batched_tokens=64)


class FleetRig:
    """`turn` lets every worker take what it is given and execute one batch. `poison` are requests that kill whoever computes them at
    that position; `num_killed` counts what they cost."""

    def __init__(self, num_workers: int = 2, num_blocks: int = 40, num_host_blocks: int = 0, **config: object) -> None:
        self.num_host_blocks = num_host_blocks
        self.config = Config(**{"max_num_seqs": 16, "max_num_batched_tokens": 64, **config})
        self.epoch = Epoch(1, b"leader")
        self.scheduler = Scheduler(self.config, self.epoch)
        self.workers: dict[str, FakeWorker] = {}
        self.state = StoredState()
        self.poison: dict[bytes, int] = {}
        self.num_killed = 0
        self.now_us = 1_000_000
        self.nonce = 0
        for number in range(num_workers):
            self.join(f"worker:{number}", num_blocks)

    def join(self, name: str, num_blocks: int = 40) -> FakeWorker:
        limits = replace(LIMITS, num_speculative_tokens=self.config.num_speculative_tokens)
        worker = self.workers[name] = FakeWorker(num_blocks, 4, limits, num_host_blocks=self.num_host_blocks)
        worker.boots = 100 * len(self.workers)  # boot ids differ between workers
        worker.restart()
        self.attach(name)
        return worker

    def attach(self, name: str) -> None:
        self.nonce += 1
        self.scheduler.attach_worker(name, self.workers[name].attach(self.epoch, self.nonce), self.now_us)
        self.check()

    def lose(self, name: str, loss: WorkerLoss = BROKEN) -> None:
        self.scheduler.lose_worker(name, loss, self.now_us)
        self.check()

    def kill(self, name: str) -> None:
        """The process dies; another boot is to be attached."""
        self.workers[name].restart()
        self.lose(name)

    def submit(self, number: int, prompt: list[int], **given: object) -> Sequence:
        """`given` are sampling parameters, and fields of `REQUEST_FIELDS`."""
        own = {name: given.pop(name) for name in REQUEST_FIELDS if name in given}
        request = submission(number, prompt, replace(IGNORE_EOS, **given), **own)
        answer = self.scheduler.submit(request, 0, (), self.now_us)
        assert isinstance(answer, Admitted), answer
        self.check()
        return self.sequence(number)

    def sequence(self, number: int) -> Sequence:
        found = self.scheduler.request(number.to_bytes(16, "big"))
        assert found is not None
        return found

    def schedule(self, name: str) -> ScheduledBatch | None:
        batch = self.scheduler.schedule(name, self.now_us)
        if batch is not None:
            self.workers[name].enqueue(batch)
        self.check()
        return batch

    def execute(self, name: str) -> bool:
        """One batch, and its output; False where it killed the worker, which is attached again at once."""
        self.now_us += 1000
        worker = self.workers[name]
        batch = worker.queue[0]
        entered = {entry.slot: entry.request_id for entry in batch.entries}
        for slot, count, length in zip(batch.slots.tolist(), batch.num_scheduled_tokens, batch.context_lens, strict=True):
            if batch.is_dummy_run:
                break
            request_id = entered.get(slot) or worker.slots[slot].request_id
            if length - count <= self.poison.get(request_id, -1) < length:
                self.num_killed += 1
                self.kill(name)
                self.attach(name)
                return False
        self.scheduler.postprocess(name, worker.step(), self.now_us)
        self.check()
        return True

    def turn(self, in_flight: int = 2) -> bool:
        """False when nobody had anything to do."""
        for name, worker in self.workers.items():
            while len(worker.queue) < in_flight and self.schedule(name) is not None:
                pass
        busy = [name for name, worker in self.workers.items() if worker.queue]
        for name in busy:
            self.execute(name)
        return bool(busy)

    def finish_all(self, turns_max: int = 500) -> None:
        for _ in range(turns_max):
            if not self.turn():
                load = self.scheduler.load()
                assert load.num_running == load.num_swapped == load.num_waiting == 0, (
                    "nothing is scheduled, but requests are left"
                )
                assert load.num_free_blocks == load.num_blocks
                return
        raise AssertionError(f"not done after {turns_max} turns")

    def check(self) -> None:
        self.scheduler.check_integrity()
        changes = self.scheduler.take_changes()
        if changes is not None:
            record = Record(
                self.state.last + 1,
                changes.requests,
                changes.blocks,
                changes.forgotten,
                changes.decoded,
                changes.removed_workers,
            )
            self.state.apply(record)
            self.state.apply(replace(record, number=record.number + 1))
        for sequence in self.scheduler.requests():
            stored = self.state.requests[sequence.request_id]
            told = (tuple(stored.output_token_ids), stored.status, stored.worker, stored.finish, stored.tokens_max)
            assert told == (
                sequence.output_token_ids(),
                sequence.status,
                sequence.worker,
                sequence.finish,
                sequence.tokens_max,
            )

    def assert_as_alone(self, number: int) -> None:
        sequence = self.sequence(number)
        expected, finish = reference_output(sequence.submission, 1 << 20)
        assert sequence.finish == finish
        assert list(sequence.output_token_ids()) == expected
