"""The scheduler: owns every request, decides what each worker computes next, and says what the journal has to learn.

Synchronous, without clock or I/O: the shell calls it from one event loop and passes the time as integer microseconds.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items

from services.scheduler.core.administration import Administration
from services.scheduler.core.admission import (
    RETRY_AFTER_MS,
    Admitted,
    Known,
    RefusalReason,
    Refused,
    Unknown,
)
from services.scheduler.core.batcher import Batcher
from services.scheduler.core.capacity_watch import CapacityWatch, Shortage
from services.scheduler.core.changes import Changes
from services.scheduler.core.group_load import LoadMeter
from services.scheduler.core.lifecycle import Lifecycle
from services.scheduler.core.load import Load, Totals
from services.scheduler.core.lockstep import Lockstep
from services.scheduler.core.outlook import AllocationStatus, NextBatchInfo, next_batch_info, room_for
from services.scheduler.core.output_commit import OutputCommit
from services.scheduler.core.record import Arrival
from services.scheduler.core.recovered import Recovered
from services.scheduler.core.replica import Replica
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.service_figures import ServiceFigures
from services.scheduler.core.spec_stats import SpecStats
from services.scheduler.core.step_plan import StepPlan
from services.scheduler.core.stop_rules import stop_string_wins
from services.scheduler.core.suspects import GUILTY_AFTER
from services.scheduler.core.takeover import adopt_orphans, attach, new_ledger, restore
from services.scheduler.core.validator import Validator
from services.scheduler.core.worker_loss import WorkerLoss
from tessera.values.batch import ScheduledBatch, ScheduledBatchOutput
from tessera.values.config import Config
from tessera.values.finish import Finish, FinishReason
from tessera.values.identity import Epoch
from tessera.values.report import WorkerReport
from tessera.values.request import Submission


class Scheduler:
    """One leader's term. Requests come in by `submit`, tokens by `schedule` and `postprocess`, per worker and by its name."""

    def __init__(self, config: Config, epoch: Epoch) -> None:
        self._config = config
        self._epoch = epoch
        self._lifecycle = Lifecycle(config.queue_order)
        self._book, self._waiting = self._lifecycle.book, self._lifecycle.waiting
        self._fleet = self._lifecycle.fleet
        self._batcher = Batcher(config, self._lifecycle)
        self._lockstep = Lockstep(self._fleet, self._batcher.plan, self._issue)
        self._is_paused = False
        self._validator = Validator(config, self._lifecycle)
        self.admin = Administration(self._lifecycle, self._validator)
        self._capacity = CapacityWatch(self._lifecycle, config.capacity_wait_ms)
        self._totals = Totals()
        self.load_meter = LoadMeter(self._lifecycle, self.load)
        self.spec_stats = SpecStats()
        self._commit = OutputCommit(self._lifecycle, self.spec_stats)
        self._forgotten: set[bytes] | None = set()  # who ended here, while slots of unknown requests are kept; then None
        self._removed_workers: list[str] = []

    # -- requests

    def submit(
        self, submission: Submission, subscriber: int, received: tuple[int, ...], now_us: int
    ) -> Admitted | Known | Refused:
        """Take in a request, or go on with the one that it is of (`find`), whose `claim` it then is; idempotent on its id.

        `received` are output tokens that its client or gateway holds already: a request unknown here goes on behind them, in the
        slot of an orphan of this id where the ids agree over what that has computed.
        """
        request_id = submission.request_id
        known = self.find(submission, subscriber)
        if known is not None:
            refused = self._validator.contradiction(known, submission, subscriber)
            return refused if refused is not None else self._claim(known, subscriber, received, now_us)
        has_output = bool(received) or any(request_id in replica.orphans for replica in self._fleet)
        refused = self._validator.refusal(submission, has_output or subscriber > 0, has_output)
        if refused is not None:
            return refused
        self._totals.num_submitted += 1
        sequence = self._sequence_of(submission, self._totals.num_submitted, now_us, received)
        sequence.subscriber = subscriber
        self._lifecycle.begin(sequence)
        self._totals.num_contradictions += adopt_orphans(self._lifecycle, sequence)
        self._lifecycle.end_if_stopped(sequence, 0, now_us)
        return Admitted(request_id)

    def claim(self, request_id: bytes, subscriber: int, received: tuple[int, ...], now_us: int) -> Known | Unknown:
        """A subscriber wants a request's output from now on; the highest number wins, a lower one changes nothing.

        Tokens it received are promised: where they go beyond the committed ones or contradict them, they replace them, and the
        request starts again behind them.
        """
        sequence = self._book.get(request_id)
        return Unknown(request_id) if sequence is None else self._claim(sequence, subscriber, received, now_us)

    def find(self, submission: Submission, subscriber: int) -> Sequence | None:
        """The request that a Submit is of; see `Validator.find`."""
        return self._validator.find(submission, subscriber)

    def abort(self, request_id: bytes, now_us: int) -> None:
        """End a request wherever it is, with its tokens so far. Finished and unknown ones stay as they are."""
        sequence = self._book.get(request_id)
        if sequence is not None and sequence.finish is None:
            self._lifecycle.end(sequence, Finish(FinishReason.ABORTED, sequence.output_len), now_us)

    def stop_found(self, request_id: bytes, output_len: int, stop_string: str, now_us: int) -> None:
        """A gateway found a stop string, completed by the last of the first `output_len` output tokens: the earliest end wins.

        Nothing changes for an unknown request, a length that it has not reached, or a finish that `stop_string_wins` keeps.
        """
        sequence = self._book.get(request_id)
        if sequence is None or not 0 < output_len <= sequence.output_len:
            return
        finish = Finish(FinishReason.STOP_STRING, output_len, stop_string=stop_string)
        if sequence.finish is None:
            self._lifecycle.end(sequence, finish, now_us)
        elif stop_string_wins(output_len, sequence.finish):
            self._book.end_earlier(sequence, finish)

    def forget_finished(self, now_us: int, is_owed: Callable[[bytes], bool] = lambda _: False) -> None:
        """Drop finished requests that nobody can read any more (`result_retention_ms`). `is_owed` tells of one that its subscriber has
        not been sent the end yet: it stays until then."""
        forgotten = self._book.forget_finished(now_us - 1000 * self._config.result_retention_ms, is_owed)
        if self._forgotten is not None:
            self._forgotten.update(forgotten)

    def end_unheld(self, now_us: int) -> Shortage | None:
        """End the requests that have waited for `capacity_wait_ms` for a larger worker than there is. Returns what is short; see `CapacityWatch`."""
        return self._capacity.look(now_us)

    def end_late(self, now_us: int) -> None:
        """End the requests of which a limit of `TimeLimits` is over."""
        self._lifecycle.end_late(now_us)

    # -- workers

    def attach_worker(self, name: str, report: WorkerReport, now_us: int) -> None:
        """Go on from what a worker holds: at its first attach, at a later one of the same boot, or after a restart.

        Sequences whose slots are reported go on in them, with the longer output; the worker's others wait. Batches in flight are void.
        Where none is there any more, one whose KV lies otherwise is taken as well: all is computed again for it, tokens are kept.
        Raises ModelMismatch, changing nothing.
        """
        self._fleet.check(name, report.description)
        geometry = report.description.geometry
        if self._fleet.layout not in (None, (geometry.block_size, geometry.kv_format)):
            self._forget_layout(now_us)
        attach(self._lifecycle, self._config, name, report, now_us, self._forgotten)
        self._lockstep.disturb(name)
        self._lifecycle.suspects.withdraw(report.description.boot_id)
        self._waiting.dissolve_all()  # whoever stands in a line chose it before this worker was there
        self._lifecycle.apply_rules(now_us)

    def lose_worker(self, name: str, loss: WorkerLoss, now_us: int) -> None:
        """A worker is gone: its sequences wait, with their tokens, and go on here or elsewhere. An attach of the same boot can still find
        their KV. A request that is proven to bring workers down ends."""
        replica = self._fleet.get(name)
        if replica is None or not replica.is_attached:
            return
        guilty = self._lifecycle.suspects.charge(replica.in_flight, replica.boot_id, loss)
        self._lifecycle.lose(replica)
        self._lockstep.disturb(name)
        for sequence in guilty:
            message = f"no worker can compute this request: {loss.text or 'the worker was lost'}, {GUILTY_AFTER} times with nothing else to do"
            self._lifecycle.end(sequence, Finish(FinishReason.ERROR, sequence.output_len, message=message), now_us)

    def worker_leaves(self, name: str) -> None:
        """A worker is to end: it is given no more requests, and its own go to others, as fast as these can take them. What nobody else
        can take goes on where it is until the worker is lost."""
        replica = self._fleet.get(name)
        if replica is not None and replica.is_attached:
            replica.is_ending = True
            self._waiting.dissolve(name)

    def remove_worker(self, name: str, now_us: int) -> None:
        """A worker is gone for good: as `lose_worker`, and nothing is kept of it, here or in the journal."""
        replica = self._fleet.get(name)
        if replica is None:
            return
        self._lifecycle.lose(replica)
        self._fleet.remove(name)
        self._lockstep.disturb(name)
        self._removed_workers.append(name)
        self._lifecycle.apply_rules(now_us)

    def schedule(self, name: str, now_us: int) -> ScheduledBatch | None:
        """The next batch for a worker; None while it is not attached, has enough in flight, or has nothing to do.

        A batch without rows only drops slots or swaps them. In a lockstep group everybody has a batch where anybody has.
        """
        replica = self._fleet.get(name)
        if replica is None or not replica.is_attached:
            return None
        if self._config.lockstep:
            return self._lockstep.next_batch(name, now_us, may_begin=not self._is_paused)
        if self._is_paused:
            return None
        if replica.is_full:
            late = self._batcher.plan_latecomers(replica, now_us) if self._waiting and replica.takes_latecomers else None
            return self._issue(replica, late, now_us) if late is not None and late.sequences else None
        plan = self._batcher.plan(replica, now_us)
        return self._issue(replica, plan, now_us) if plan.sequences or replica.has_orders else None

    @property
    def is_busy(self) -> bool:
        """Whether nobody can be given a batch before one has answered."""
        attached = self._fleet.attached
        return bool(attached) and all(replica.is_full and not replica.takes_latecomers for replica in attached)

    def pause(self) -> None:
        """Issue no more batches until `resume`. What is in flight ends and counts, in a lockstep group the round that has begun; running
        requests keep their slots, new ones wait; a next leader is not paused."""
        self._is_paused = True

    def resume(self) -> None:
        """Go on where a pause began."""
        self._is_paused = False

    def postprocess(self, name: str, output: ScheduledBatchOutput, now_us: int) -> None:
        """Commit what a batch sampled: tokens, computed blocks, stops.

        An output of another epoch, attach or step is a no-op, and so is a row whose sequence has moved on. Raises BadOutput, changing
        nothing, for columns that do not fit the batch.
        """
        replica = self._fleet.get(name)
        issued = replica.answered(output) if replica is not None and output.epoch == self._epoch else None
        if replica is None or issued is None:
            return
        latency_us, replica.progress_us = now_us - replica.progress_us, now_us
        if not issued.sequences:
            return
        num_decodes, num_positions, num_tokens = issued.num_decodes, issued.num_prefill_positions, len(output.token_ids)
        replica.step_times.answered(num_decodes, num_positions, output.compute_us, latency_us)
        self._lifecycle.figures.step(replica.pace, num_decodes, num_positions, num_tokens, output.compute_us, now_us)
        self._totals.num_sampled_tokens += num_tokens
        rest: Items[int] = range(len(issued.sequences))
        if not output.row_errors:
            rest = self._commit.lanes(replica, issued, output.token_ids, now_us)
        if rest:
            self._commit.rows(replica, issued, output, rest, now_us)
        if self._lifecycle.suspects:
            self._lifecycle.suspects.clear(issued.sequences)

    def set_durable_step(self, name: str, boot_id: bytes, step_id: int) -> None:
        """The journal has what outputs of this boot up to `step_id` changed: the worker may forget slots dropped until then."""
        replica = self._fleet.get(name)
        if replica is not None and replica.boot_id == boot_id:
            replica.durable_step = max(replica.durable_step, step_id)

    # -- recovery

    def restore(self, recovered: Recovered, reports: dict[str, WorkerReport], now_us: int) -> None:
        """Start from a join; only for a scheduler that has seen nothing yet. The first changes taken tell everything anew."""
        assert not len(self._book) and not list(self._fleet), "only a new scheduler restores"
        restore(self._lifecycle, self._config, recovered, reports, now_us)
        self._totals.num_contradictions += recovered.num_contradictions
        self._lifecycle.forget_counts()
        self._lifecycle.apply_rules(now_us)

    def expire_orphans(self) -> None:
        """The grace has ended: give up the slots that no request has claimed, and those that a worker still comes with."""
        self._forgotten = None
        for replica in self._fleet:
            for request_id in list(replica.orphans):
                replica.drop_orphan(request_id)

    # -- reading

    def request(self, request_id: bytes) -> Sequence | None:
        """A request that is live or can still be read; not to be changed."""
        return self._book.get(request_id)

    def requests(self) -> Iterator[Sequence]:
        """All of them."""
        return iter(self._book)

    def replica(self, name: str) -> Replica | None:
        """What is known of a worker; not to be changed."""
        return self._fleet.get(name)

    @property
    def attached(self) -> list[Replica]:
        """The workers that can compute at present; not to be changed."""
        return self._fleet.attached

    @property
    def layout(self) -> tuple[int, str] | None:
        """Block size and format of the workers' KV; None before the first attach."""
        return self._fleet.layout

    @property
    def request_len_max(self) -> int | None:
        """The longest request, prompt and output in tokens, that can run here; None before the first attach."""
        return self._fleet.request_len_max

    def load(self) -> Load:
        """Present counts, and totals since the start."""
        preemption = self._batcher.preemption
        return Load.of(
            self._lifecycle, self._totals, self._batcher.recomputed_positions, preemption.count, preemption.num_swap_outs
        )

    @property
    def figures(self) -> ServiceFigures:
        """How long requests waited and steps took; not to be changed."""
        return self._lifecycle.figures

    @property
    def num_unfinished(self) -> int:
        """Requests that wait, run or are swapped out (the low-level API's `get_num_unfinished_requests`)."""
        return self._book.num_unfinished

    @property
    def has_unfinished(self) -> bool:
        """Whether there are any (`has_unfinished_requests`)."""
        return self._book.num_unfinished > 0

    @property
    def num_submitted(self) -> int:
        """Requests taken in as new so far, recovered ones not among them."""
        return self._totals.num_submitted

    def next_batch_info(self, name: str) -> NextBatchInfo | None:
        """What a worker's next batch would be, with nothing changed; None while it is not attached."""
        replica = self._fleet.get(name)
        return next_batch_info(self._lifecycle, self._config, replica) if replica is not None and replica.is_attached else None

    def allocation_status(self, submission: Submission) -> AllocationStatus:
        """Whether a request, submitted now and at the head of the queue, would find room at once, later or never; takes nothing."""
        refused = self._validator.refusal(submission, False)
        if refused is not None:
            return refused
        room = room_for(self._lifecycle, self._sequence_of(submission, 0, 0, ()))
        return room or Refused(RefusalReason.NO_WORKER, "no model worker that can hold it is there", RETRY_AFTER_MS)

    def take_changes(self) -> Changes | None:
        """What the journal has to learn since the last call; None when that is nothing."""
        requests, decoded, forgotten = self._book.take_changes()
        blocks = tuple(delta for replica in self._fleet for delta in replica.take_block_deltas())
        removed, self._removed_workers = tuple(self._removed_workers), []
        if not (requests or decoded or blocks or forgotten or removed):
            return None
        return Changes(requests, blocks, forgotten, decoded, removed)

    def check_integrity(self) -> None:
        """Assert that all parts tell one story. Costs a pass over everything: for tests, and when idle."""
        self._lifecycle.check_integrity()

    # -- inside

    def _forget_layout(self, now_us: int) -> None:
        """The next worker's KV lies otherwise than that of all before, of which none is there: nothing of their pools is of use any more."""
        for replica in list(self._fleet):
            self.remove_worker(replica.name, now_us)
        for sequence in self._waiting:
            sequence.forget_digests()

    def _issue(self, replica: Replica, plan: StepPlan, now_us: int) -> ScheduledBatch:
        if not replica.in_flight:
            replica.progress_us = now_us
        return replica.issue(plan, self._epoch)

    def _claim(self, sequence: Sequence, subscriber: int, received: tuple[int, ...], now_us: int) -> Known:
        """See `claim`."""
        if subscriber < sequence.subscriber:
            return Known(sequence.request_id, sequence.subscriber)
        if subscriber > sequence.subscriber:
            sequence.subscriber = subscriber
            self._book.touch(sequence)
        output = sequence.output_token_ids()
        if output[: len(received)] != received:
            self._totals.num_contradictions += received[: len(output)] != output
            if sequence.finish is None:
                self._lifecycle.restart_from(sequence, received)
                self._lifecycle.end_if_stopped(sequence, 0, now_us)
        return Known(sequence.request_id, subscriber)

    def _sequence_of(self, submission: Submission, number: int, now_us: int, received: tuple[int, ...]) -> Sequence:
        """A request that is in no queue yet, under the rules of the workers that are there. Of one that comes from a larger pool nobody knows
        any more how long it may grow: as far as its own limits say."""
        ledger = new_ledger(submission, received)
        sequence = Sequence(submission, Arrival(self._epoch.number, number), now_us, ledger)
        len_max, model = self._fleet.request_len_max, self._fleet.model
        is_beyond = len_max is not None and ledger.num_tokens > len_max
        sequence.set_rules(self._fleet.rules(submission, model.max_model_len if is_beyond and model is not None else 0))
        return sequence
