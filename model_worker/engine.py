"""One model replica: holds slots and KV, executes one batch after the other, reports what it holds.

A batch either is refused whole and changes nothing, or runs in this order: drops, swap outs, copies, swap ins, zero, entries, new
blocks, compute, sample. A row that fails (its forward pass, or its logits) fails alone: its slot gets no token, its computed length
stays, and it takes part in nothing until the scheduler drops it.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from torch import Tensor

from model_worker.batch_check import check_batch
from model_worker.device_sampler import DeviceSampler
from model_worker.input_batch import Rows, Spans, build_batch, build_dummy_batch
from model_worker.joined_batch import can_join, joined
from model_worker.kernels.best_tokens import FindBest, first_best
from model_worker.kv_blocks import KVBlocks, LocalBlocks, Moves
from model_worker.kv_pool import KVPool
from model_worker.logprobs import NO_IDS, logprobs_of
from model_worker.models.causal_lm import CausalLM, TappedLM
from model_worker.prompt_targets import prompt_targets
from model_worker.ranks.lockstep_model import LockstepModel
from model_worker.row_results import RowResults
from model_worker.row_selection import select_rows
from model_worker.sample_rows import SampleRows
from model_worker.sampler import NO_TOKEN, NOT_FINITE, Sampler
from model_worker.sampling_table import OFF, SamplingTable
from model_worker.slot_table import SlotTable
from model_worker.speculation.proposer import Drafts, Follower, Passed, Proposer
from model_worker.speculation.rejection import RejectionSampler
from model_worker.speculation.verification import accepted
from tessera.values.batch import NO_DRAFTS, RowError, ScheduledBatch, ScheduledBatchOutput
from tessera.values.logprobs import Logprobs, PromptLogprobs, joined_logprobs
from tessera.values.model import WorkerDescription
from tessera.values.report import WorkerReport

_log = logging.getLogger(__name__)

SLOTS_PER_SEQUENCE = 2
"""Slot numbers per row of the largest batch: a new leader may run a full batch beside the slots that it has not placed yet."""

FAILURE_TEXT_MAX = 256


def _nothing() -> None:
    """Nobody has anything to do before a pass."""


@dataclass(slots=True)
class _Computed:
    """What became of `rows`: `done` (bool `[R]`) were computed; `logits` float32 `[sum of their logits_counts, vocab]`, on the model's device; `prompt_logprobs` of
    all rows; `hidden` `[T, W]` as the follower wants it, None where there is none or the pass took several."""

    rows: Rows
    done: np.ndarray
    logits: Tensor
    prompt_logprobs: PromptLogprobs | None
    failures: dict[int, str] = field(default_factory=dict)
    hidden: Tensor | None = None
    bad_drafts: dict[int, int] = field(default_factory=dict)  # by row: its last positions, of drafts, that gave no number


@dataclass(frozen=True, slots=True, eq=False)
class BlockContent:
    """One block of the KV pool: the step that last wrote it (0 for never), and `kv`, see `KVPool.read_block`. Of the host pool steps are not
    kept: 0."""

    block_id: int
    last_write_step: int
    kv: np.ndarray


class Engine:
    """Not thread-safe: one thread executes, and reports only between two batches. Owns the model's KV pool, and `blocks`; without these it
    makes the host pool that `description` names."""

    def __init__(
        self,
        model: CausalLM,
        kv: KVPool,
        description: WorkerDescription,
        proposer: Proposer | None = None,
        blocks: KVBlocks | None = None,
        *,
        rejects: bool = False,
        find_best: FindBest = first_best,
    ) -> None:
        """`find_best`: that of the model's kernels. `rejects`: drafts are verified by rejection sampling (see `model_worker.speculation.rejection`) instead of the model's own draws."""
        assert proposer is not None or not description.limits.num_speculative_tokens, "nobody to make the drafts"
        self.description = description
        self.last_step = 0  # highest step executed
        self._model = model
        self._kv = kv
        self._blocks = blocks or LocalBlocks(kv, description.geometry.num_host_blocks)
        self._proposer = proposer
        self._follower = proposer if isinstance(proposer, Follower) else None
        sampler = Sampler(description.model.eos_token_ids, torch.get_num_threads())
        self._sampler = DeviceSampler(sampler, find_best)
        self._rejection = RejectionSampler(sampler) if rejects else None
        self._in_lockstep = isinstance(model, LockstepModel)  # others wait for a pass of each batch, whoever's it is
        num_slots = SLOTS_PER_SEQUENCE * description.limits.max_num_seqs
        self._slots = SlotTable(num_slots, description.model.max_model_len, description.geometry)
        self._sampling = SamplingTable(num_slots, description.model.vocab_size)
        self._last_write_step = np.zeros(description.geometry.num_blocks, dtype=np.int64)
        self._before_pass = _nothing

    def execute(self, batch: ScheduledBatch, before_pass: Callable[[], None] = _nothing) -> ScheduledBatchOutput:
        """Run one batch to its end; `before_pass` is called when nothing is left to do but the forward pass, maybe never, maybe again. Raises
        BatchRefused, having changed nothing, for a batch that does not fit (see `check_batch`)."""
        self._before_pass = before_pass
        check_batch(batch, self._slots, self.description, self.last_step)
        self._apply(batch)
        started_ns = time.perf_counter_ns()
        results = RowResults.none(batch.num_rows)
        if batch.is_dummy_run:
            row_errors = self._run_dummy(batch)
        else:
            results = self._run(batch)
            row_errors = self._row_errors(batch)
        self.last_step = batch.step_id
        return ScheduledBatchOutput(
            epoch=batch.epoch,
            nonce=batch.nonce,
            step_id=batch.step_id,
            token_counts=results.token_counts.astype(np.int32),
            token_ids=results.token_ids[results.token_ids != NO_TOKEN],
            row_errors=row_errors,
            compute_us=(time.perf_counter_ns() - started_ns) // 1000,
            draft_counts=results.draft_counts if results.draft_counts.any() else NO_DRAFTS,
            logprobs=results.logprobs,
            prompt_logprobs=results.prompt_logprobs,
        )

    def execute_both(
        self, first: ScheduledBatch, second: ScheduledBatch, before_pass: Callable[[], None] = _nothing
    ) -> tuple[ScheduledBatch, ScheduledBatchOutput]:
        """Run two batches of which the second can join the first (see `joins`) in one pass; returns them as one, and its output. Raises
        BatchRefused, having changed nothing, where one of them does not fit: run by themselves it shows which."""
        both = joined(first, second)
        alive = ~np.isin(first.slots, list(self._slots.failures))
        output = self.execute(both, before_pass)
        if alive.any():
            counts = first.num_scheduled_tokens[alive].astype(np.int64)
            spans = Spans(first.slots[alive].astype(np.int64), first.context_lens[alive] - counts, counts)
            self._last_write_step[spans.slot_mapping(self._slots, self._kv.block_size) // self._kv.block_size] = first.step_id
        return both, output

    def joins(self, first: ScheduledBatch, second: ScheduledBatch) -> bool:
        """Whether `execute_both` takes them. Not where drafts are made, since what they leave of their room counts by steps, nor in lockstep: the
        others run a pass for each batch."""
        return not (self._in_lockstep or self.description.limits.num_speculative_tokens) and can_join(first, second)

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
        contents = self._blocks.read(block_ids, is_host=is_host)
        steps = [0 if is_host else int(self._last_write_step[block_id]) for block_id in block_ids]
        return [BlockContent(*each) for each in zip(block_ids, steps, contents, strict=True)]

    def _apply(self, batch: ScheduledBatch) -> None:
        """All of a batch but its computing."""
        for drop in batch.drops:
            self._slots.drop(drop, batch.step_id)
        self._slots.forget_dropped(batch.durable_step)
        self._slots.unused_room.forget_until(batch.seen_step)
        if batch.moves_blocks:
            self._move(batch)
        for entry in batch.entries:
            self._slots.enter(entry)
            self._sampling.set(entry.slot, entry.sampling)
        self._slots.append_blocks(batch.slots, batch.new_block_counts, batch.new_block_ids)

    def _move(self, batch: ScheduledBatch) -> None:
        """Swap outs, copies, swap ins, zero."""
        self._blocks.move(Moves.of(batch))
        for swap in batch.swap_outs:
            self._slots.swap(swap.slot, swap.block_table, is_out=True)
        for swap in batch.swap_ins:
            self._slots.swap(swap.slot, swap.block_table, is_out=False)
            self._last_write_step[swap.pairs[:, 1]] = batch.step_id
        self._last_write_step[batch.copies[:, 1]] = batch.step_id
        self._last_write_step[batch.zero_blocks] = batch.step_id

    def _run_dummy(self, batch: ScheduledBatch) -> tuple[RowError, ...]:
        """Compute rows that are nobody's. Returns an error for each where that failed."""
        counts, context_lens = batch.num_scheduled_tokens.astype(np.int64), batch.context_lens.astype(np.int64)
        try:
            self._compute_dummy(counts, context_lens, batch.num_decodes)
        except Exception as error:  # noqa: BLE001 - as for rows that are somebody's
            _log.warning("step %d, a dummy run, failed: %s", batch.step_id, _text(error), exc_info=error)
            return tuple(RowError(row, _text(error)) for row in range(batch.num_rows))
        return ()

    def _compute_dummy(self, counts: np.ndarray, context_lens: np.ndarray, num_decodes: int) -> None:
        """See `build_dummy_batch`; leaves no trace."""
        try:
            self._model.forward(build_dummy_batch(counts, context_lens, num_decodes, self._kv), self._kv)
        finally:
            self._blocks.move(Moves(zero_blocks=np.array([self._kv.null_block])))

    def _run(self, batch: ScheduledBatch) -> RowResults:
        """Compute the rows of a batch."""
        rows, order = select_rows(batch, self._slots, self._propose)
        if not len(order):
            if self._in_lockstep:
                self._compute_dummy(np.ones(1, np.int64), np.ones(1, np.int64), 1)
            return RowResults.none(batch.num_rows)
        results = self._advance(rows, batch.step_id).of_batch(order, batch.num_rows)
        room = batch.num_scheduled_tokens[: batch.num_decodes]
        if room.max(initial=1) > 1:
            unused = np.where(room > 1, room - results.token_counts[: batch.num_decodes], 0)
            self._slots.unused_room.note(batch.step_id, batch.slots[: batch.num_decodes], unused)
        return results

    def _propose(self, slots: np.ndarray, rooms: np.ndarray) -> Drafts:
        """Drafts for these slots; none where making them fails."""
        assert self._proposer is not None, "a batch with room for drafts is refused"
        try:
            return self._proposer.propose(slots, rooms, self._slots, self._sampling)
        except Exception as error:  # noqa: BLE001 - whoever guesses must not end what it guesses about
            _log.warning("no drafts: %s", _text(error), exc_info=error)
            return Drafts.none(len(slots))

    def _advance(self, rows: Rows, step_id: int) -> RowResults:
        """Compute, sample and remember."""
        computed = self._compute(rows, step_id)
        rows, drafts = computed.rows, computed.rows.drafts
        token_ids, logprobs = np.full((len(rows.slots), 1 + drafts.token_ids.shape[1]), NO_TOKEN, np.int32), None
        if computed.done.any():
            token_ids, logprobs = self._sample(computed, token_ids)
        for row, text in computed.failures.items():
            _log.error("step %d: the row of slot %d fails: %s", step_id, rows.slots[row], text)
            self._slots.failures[int(rows.slots[row])] = text
            computed.done[row] = False
        if computed.failures or computed.bad_drafts:
            self._clear(rows, computed.bad_drafts | {row: rows.num_scheduled_tokens[row] for row in computed.failures})
        counts = np.count_nonzero(token_ids != NO_TOKEN, axis=1)
        computed_lens = rows.context_lens - np.where(rows.samples, rows.logits_counts - counts, 0)
        self._slots.computed_lens[rows.slots[computed.done]] = computed_lens[computed.done]
        self._slots.append_tokens(rows.slots, counts, token_ids[token_ids != NO_TOKEN])
        if self._follower is not None and computed.done.any():
            self._follow(self._follower, computed, computed_lens)
        return RowResults(token_ids, drafts.counts, logprobs, computed.prompt_logprobs)

    def _clear(self, rows: Rows, counts: dict[int, int]) -> None:
        """Clear the last `counts` positions that these rows have computed. What they hold may be no number, and some kernels multiply what lies
        behind a context by zero, so whoever is given the block next would be hit."""
        which, how_many = np.array(list(counts)), np.array(list(counts.values()))
        spans = Spans(rows.slots[which], rows.context_lens[which] - how_many, how_many)
        self._blocks.move(Moves(zero_positions=spans.slot_mapping(self._slots, self._kv.block_size)))

    def _follow(self, follower: Follower, computed: _Computed, computed_lens: np.ndarray) -> None:
        """Tell the follower of a pass, after which its rows have KV up to `computed_lens`, int64 `[R]`."""
        if follower.taps is not None and computed.hidden is None:
            return
        rows, done = computed.rows, np.flatnonzero(computed.done)
        starts = rows.context_lens - rows.num_scheduled_tokens
        offsets = np.cumsum(rows.num_scheduled_tokens) - rows.num_scheduled_tokens
        passed = Passed(rows.slots[done], starts[done], (computed_lens - starts)[done], offsets[done], computed.hidden)
        try:
            follower.follow(passed, self._slots)
        except Exception as error:  # noqa: BLE001 - as in `_propose`
            _log.warning("whoever drafts has lost track of %d rows: %s", len(done), _text(error), exc_info=error)

    def _sample(self, computed: _Computed, targets: np.ndarray) -> tuple[np.ndarray, Logprobs | None]:
        """Draw from the logits of every computed position, into `targets` (int32 `[R, W]`, NO_TOKEN everywhere). Returns the tokens of the rows,
        and their log-probabilities. A row fails where its first position does; where a later one does, the tokens before it stand, and
        the next step finds out whether it was a draft's fault."""
        table, rows, done = self._slots, computed.rows, np.flatnonzero(computed.done)
        counts, samples = rows.logits_counts[done], rows.samples.copy()
        samples[list(computed.failures)] = False
        row_of = np.repeat(done, counts)
        places = np.arange(len(row_of)) - np.repeat(np.cumsum(counts) - counts, counts)
        slots = rows.slots[row_of]
        # Unfinished prefill chunks too, for the check of their logits: KV with a NaN must not count as computed.
        sample_rows = SampleRows(
            self._sampling, table.token_ids, slots, table.prompt_lens[slots], table.num_ids[slots] + places, samples[row_of]
        )
        wanted = self._sampling.logprobs[slots] != OFF
        if self._rejection is not None and rows.drafts.counts.any():
            drafts, odds = rows.drafts.at(row_of, places)
            drawn = self._sampler.draw(computed.logits, sample_rows, wanted | (drafts >= 0))
            drawn.revise(self._rejection, sample_rows, drafts, odds)
        else:
            drawn = self._sampler.draw(computed.logits, sample_rows, wanted)
        targets[row_of, places] = drawn.token_ids
        computed.failures.update({int(row_of[at]): text for at, text in drawn.failures.items() if not places[at]})
        for at in sorted(drawn.failures, reverse=True):  # the first of a row decides
            computed.bad_drafts[int(row_of[at])] = int(rows.logits_counts[row_of[at]] - places[at])
        token_ids = accepted(targets, rows.drafts.token_ids)
        kept = token_ids[row_of, places]
        logprobs = drawn.held.logprobs(kept, sample_rows)
        return token_ids, None if logprobs is None else logprobs.of(np.flatnonzero(kept != NO_TOKEN))

    def _compute(self, rows: Rows, step_id: int) -> _Computed:
        """All rows in one pass; where that fails again without drafts, one row after the other, so that only the cause fails. KV that a
        failed pass wrote lies beyond every computed length, and the next pass writes it again."""
        everyone = np.ones(len(rows.slots), dtype=np.bool_)
        for attempt in (1, 2):
            try:
                logits, prompt_logprobs, hidden = self._forward(rows, step_id)
                return _Computed(rows, everyone, logits, prompt_logprobs, _prompt_failures(prompt_logprobs), hidden)
            except Exception as error:  # noqa: BLE001 - whatever a model or a kernel raises must not end its neighbours
                _log.warning("step %d failed, try %d: %s", step_id, attempt, _text(error), exc_info=error)
            rows = rows.without_drafts()
        parts: list[Tensor] = []
        failures: dict[int, str] = {}
        prompts: dict[int, PromptLogprobs] = {}
        for row in range(len(rows.slots)):
            try:
                logits, prompt_logprobs, _ = self._forward(rows.only(row), step_id)
                parts.append(logits.clone())
                if prompt_logprobs is not None:
                    prompts[row] = prompt_logprobs
            except Exception as error:  # noqa: BLE001 - as above
                failures[row] = _text(error)
                everyone[row] = False
        prompt_logprobs = _in_one(prompts, len(rows.slots))
        logits = torch.cat(parts) if parts else torch.empty(0, self.description.model.vocab_size)
        return _Computed(rows, everyone, logits, prompt_logprobs, failures | _prompt_failures(prompt_logprobs))

    def _forward(self, rows: Rows, step_id: int) -> tuple[Tensor, PromptLogprobs | None, Tensor | None]:
        """Logits of every row's last `logits_counts` positions, where the model computes them, float32 `[sum, vocab]`, valid until the next call; what the
        prompts' own tokens had; the hidden states that the follower wants."""
        wanted = self._sampling.prompt_logprobs
        targets = prompt_targets(rows, self._slots, wanted != OFF)
        batch = build_batch(rows, self._slots, self._kv.block_size, targets.places)
        self._last_write_step[batch.slot_mapping.numpy() // self._kv.block_size] = step_id
        hidden, taps = None, self._follower.taps if self._follower is not None else None
        self._before_pass()
        if taps is None:
            logits = self._model.forward(batch, self._kv)
        else:
            logits, hidden = cast(TappedLM, self._model).forward_tapped(batch, self._kv, taps)
        if logits.device.type != "cpu":
            logits[:1, :1].cpu()  # waits: what a device finds wrong with a pass is to be known here
        num_logits, num_targets = int(rows.logits_counts.sum()), len(targets.rows)
        if not num_targets:
            return logits, None, hidden
        num_top = wanted[rows.slots[targets.rows]]
        tokens = logprobs_of(logits[num_logits:].cpu().numpy(), targets.token_ids, num_top, [NO_IDS] * num_targets)
        row_counts = np.bincount(targets.rows, minlength=len(rows.slots)).astype(np.int32)
        return logits[:num_logits], PromptLogprobs(row_counts, tokens), hidden

    def _row_errors(self, batch: ScheduledBatch) -> tuple[RowError, ...]:
        failures = self._slots.failures
        if not failures:
            return ()
        return tuple(RowError(row, failures[slot]) for row, slot in enumerate(batch.slots.tolist()) if slot in failures)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:FAILURE_TEXT_MAX]


def _prompt_failures(prompt_logprobs: PromptLogprobs | None) -> dict[int, str]:
    """The rows whose prompt has a log-probability that is no number: the logits were none."""
    if prompt_logprobs is None or np.isfinite(prompt_logprobs.tokens.logprobs).all():
        return {}
    row_of = np.repeat(np.arange(len(prompt_logprobs.row_counts)), prompt_logprobs.row_counts)
    entry_rows = np.repeat(row_of, prompt_logprobs.tokens.counts)
    return {int(row): NOT_FINITE for row in np.unique(entry_rows[~np.isfinite(prompt_logprobs.tokens.logprobs)])}


def _in_one(prompts: dict[int, PromptLogprobs], num_rows: int) -> PromptLogprobs | None:
    """Those of passes of one row each, by row in ascending order."""
    if not prompts:
        return None
    row_counts = np.zeros(num_rows, dtype=np.int32)
    for row, prompt in prompts.items():
        row_counts[row] = prompt.row_counts[0]
    return PromptLogprobs(row_counts, joined_logprobs([prompt.tokens for prompt in prompts.values()]))
