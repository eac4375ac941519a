"""One model replica: holds slots and KV, executes one batch after the other, reports what it holds.

A batch either is refused whole and changes nothing, or runs in this order: drops, swap outs, copies, swap ins, zero, entries, new
blocks, compute, sample. A row that fails (its forward pass, or its logits) fails alone: its slot gets no token, its computed length
stays, and it takes part in nothing until the scheduler drops it.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from model_worker.batch_check import check_batch
from model_worker.host_pool import HostPool
from model_worker.input_batch import Rows, build_batch, build_dummy_batch
from model_worker.kv_pool import KVPool
from model_worker.models.causal_lm import CausalLM
from model_worker.sampler import Sampler
from model_worker.slot_table import SlotTable
from tessera.values.batch import RowError, ScheduledBatch, ScheduledBatchOutput
from tessera.values.model import WorkerDescription
from tessera.values.report import WorkerReport

_log = logging.getLogger(__name__)

SLOTS_PER_SEQUENCE = 2
"""Slot numbers per row of the largest batch: a new leader may run a full batch beside the slots that it has not placed yet."""

FAILURE_TEXT_MAX = 256


@dataclass(slots=True)
class _Computed:
    """What became of rows: `done` (bool `[R]`) were computed; `logits` float32 `[number of them, vocab]` of their last positions."""

    done: np.ndarray
    logits: np.ndarray
    failures: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class BlockContent:
    """One block of the KV pool: the step that last wrote it (0 for never), and `kv`, see `read_block`. Of the host pool steps are not
    kept: 0."""

    block_id: int
    last_write_step: int
    kv: np.ndarray


class Engine:
    """Not thread-safe: one thread executes, and reports only between two batches. Owns the model's KV pool, and makes the host pool
    that `description` names."""

    def __init__(self, model: CausalLM, kv: KVPool, description: WorkerDescription) -> None:
        self.description = description
        self.last_step = 0  # highest step executed
        self._model = model
        self._kv = kv
        self._host = HostPool(kv, description.geometry.num_host_blocks)
        self._sampler = Sampler(description.model.eos_token_ids)
        num_slots = SLOTS_PER_SEQUENCE * description.limits.max_num_seqs
        self._slots = SlotTable(num_slots, description.model.max_model_len, description.geometry)
        self._last_write_step = np.zeros(description.geometry.num_blocks, dtype=np.int64)

    def execute(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        """Run one batch to its end. Raises BatchRefused, having changed nothing, for a batch that does not fit (see `check_batch`)."""
        check_batch(batch, self._slots, self.description, self.last_step)
        self._apply(batch)
        started_ns = time.perf_counter_ns()
        token_ids = np.full(batch.num_rows, -1, dtype=np.int32)
        if batch.is_dummy_run:
            row_errors = self._run_dummy(batch)
        else:
            alive = np.ones(batch.num_rows, dtype=np.bool_)
            if self._slots.failures:
                alive = ~np.isin(batch.slots, list(self._slots.failures))
            if alive.any():
                token_ids[alive] = self._advance(self._select(batch, alive), batch.step_id)
            row_errors = self._row_errors(batch)
        self.last_step = batch.step_id
        return ScheduledBatchOutput(
            epoch=batch.epoch,
            nonce=batch.nonce,
            step_id=batch.step_id,
            token_counts=(token_ids >= 0).astype(np.int32),
            token_ids=token_ids[token_ids >= 0],
            row_errors=row_errors,
            compute_us=(time.perf_counter_ns() - started_ns) // 1000,
        )

    def report(self, nonce: int) -> WorkerReport:
        """All that this worker holds, as copies. Call it between two batches."""
        return WorkerReport(
            nonce=nonce,
            description=self.description,
            last_step=self.last_step,
            slots=self._slots.reports(),
            dropped=tuple(self._slots.dropped()),
            last_write_step=self._last_write_step.copy(),
        )

    @property
    def num_slots_held(self) -> int:
        """Slots that somebody holds."""
        return int(self._slots.held.sum())

    def read_blocks(self, block_ids: Sequence[int], *, is_host: bool = False) -> list[BlockContent]:
        """Blocks of the pool (or of the host pool) as they are now, as copies. Call it between two batches."""
        if is_host:
            return [BlockContent(block_id, 0, self._host.block(block_id)) for block_id in block_ids]
        return [
            BlockContent(block_id, int(self._last_write_step[block_id]), self._kv.block(block_id)) for block_id in block_ids
        ]

    def _apply(self, batch: ScheduledBatch) -> None:
        """All of a batch but its computing."""
        for drop in batch.drops:
            self._slots.drop(drop, batch.step_id)
        self._slots.forget_dropped(batch.durable_step)
        if batch.moves_blocks:
            self._move(batch)
        for entry in batch.entries:
            self._slots.enter(entry)
        self._slots.append_blocks(batch.slots, batch.new_block_counts, batch.new_block_ids)

    def _move(self, batch: ScheduledBatch) -> None:
        """Swap outs, copies, swap ins, zero."""
        for swap in batch.swap_outs:
            self._host.swap_out(swap.pairs)
            self._slots.swap(swap.slot, swap.block_table, is_out=True)
        self._kv.copy_blocks(batch.copies)
        for swap in batch.swap_ins:
            self._host.swap_in(swap.pairs)
            self._slots.swap(swap.slot, swap.block_table, is_out=False)
            self._last_write_step[swap.pairs[:, 1]] = batch.step_id
        self._kv.zero_blocks(batch.zero_blocks)
        self._last_write_step[batch.copies[:, 1]] = batch.step_id
        self._last_write_step[batch.zero_blocks] = batch.step_id

    def _run_dummy(self, batch: ScheduledBatch) -> tuple[RowError, ...]:
        """Compute rows that are nobody's. Returns an error for each where that failed."""
        counts, context_lens = batch.num_scheduled_tokens.astype(np.int64), batch.context_lens.astype(np.int64)
        try:
            self._model.forward(build_dummy_batch(counts, context_lens, batch.num_decodes, self._kv), self._kv)
        except Exception as error:  # noqa: BLE001 - as for rows that are somebody's
            _log.warning("step %d, a dummy run, failed: %s", batch.step_id, _text(error), exc_info=error)
            return tuple(RowError(row, _text(error)) for row in range(batch.num_rows))
        finally:
            self._kv.zero_blocks(np.array([self._kv.null_block]))
        return ()

    def _select(self, batch: ScheduledBatch, alive: np.ndarray) -> Rows:
        slots, context_lens = batch.slots[alive].astype(np.int64), batch.context_lens[alive].astype(np.int64)
        return Rows(
            slots=slots,
            num_scheduled_tokens=batch.num_scheduled_tokens[alive].astype(np.int64),
            context_lens=context_lens,
            samples=context_lens == self._slots.num_ids[slots],
            num_decodes=int(np.count_nonzero(alive[: batch.num_decodes])),
        )

    def _advance(self, rows: Rows, step_id: int) -> np.ndarray:
        """Compute, sample and remember. Returns the token of every row, int32 `[R]`, -1 where it has none."""
        computed = self._compute(rows, step_id)
        token_ids = np.full(len(rows.slots), -1, dtype=np.int32)
        done = np.flatnonzero(computed.done)
        if len(done):
            slots = rows.slots[done]
            output_indices = (self._slots.num_ids[slots] - self._slots.prompt_lens[slots]).tolist()
            params = [self._slots.sampling[slot] for slot in slots.tolist()]
            # Unfinished prefill chunks are sampled too, for the check of their logits: KV with a NaN must not count as computed.
            sampled = self._sampler.sample(computed.logits, params, output_indices)
            token_ids[done] = np.where(rows.samples[done], sampled.token_ids, -1)
            computed.failures.update({int(done[row]): text for row, text in sampled.failures.items()})
        for row, text in computed.failures.items():
            _log.error("step %d: the row of slot %d fails: %s", step_id, rows.slots[row], text)
            self._slots.failures[int(rows.slots[row])] = text
            computed.done[row] = False
            token_ids[row] = -1
        self._slots.computed_lens[rows.slots[computed.done]] = rows.context_lens[computed.done]
        sampled_rows = token_ids >= 0
        self._slots.append_tokens(rows.slots[sampled_rows], token_ids[sampled_rows])
        return token_ids

    def _compute(self, rows: Rows, step_id: int) -> _Computed:
        """All rows in one pass; after two failures one row after the other, so that only the cause fails. KV that a failed
        pass wrote lies beyond every computed length, and the next pass writes it again."""
        everyone = np.ones(len(rows.slots), dtype=np.bool_)
        for attempt in (1, 2):
            try:
                return _Computed(everyone, self._forward(rows, step_id))
            except Exception as error:  # noqa: BLE001 - whatever a model or a kernel raises must not end its neighbours
                _log.warning("step %d failed, try %d: %s", step_id, attempt, _text(error), exc_info=error)
        parts, failures = [np.empty((0, self.description.model.vocab_size), dtype=np.float32)], {}
        for row in range(len(rows.slots)):
            try:
                parts.append(self._forward(rows.only(row), step_id).copy())
            except Exception as error:  # noqa: BLE001 - as above
                failures[row] = _text(error)
                everyone[row] = False
        return _Computed(everyone, np.concatenate(parts), failures)

    def _forward(self, rows: Rows, step_id: int) -> np.ndarray:
        """Logits of every row's last position, on the host, float32 `[R, vocab]`; valid until the next call."""
        batch = build_batch(rows, self._slots, self._kv.block_size)
        self._last_write_step[batch.slot_mapping.numpy() // self._kv.block_size] = step_id
        return self._model.forward(batch, self._kv).cpu().numpy()

    def _row_errors(self, batch: ScheduledBatch) -> tuple[RowError, ...]:
        failures = self._slots.failures
        if not failures:
            return ()
        return tuple(RowError(row, failures[slot]) for row, slot in enumerate(batch.slots.tolist()) if slot in failures)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:FAILURE_TEXT_MAX]
