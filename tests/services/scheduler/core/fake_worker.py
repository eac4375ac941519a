"""A deterministic model worker in memory: it really executes batches, and checks that the KV it reads is what was written.

The KV of a position is a digest of all ids up to it, kept per block. Before a row computes, every position it attends to must
hold the digest of the slot's own ids; anything else means that a table, a prefix hit or a freed block was wrong. Swaps, copies and
zeroed blocks really happen too, so a wrong pair, a missing one or a host block given away too early is found in the same way.
A sampled token is a function of (ids, seed), so the output of a request is known without running it: `reference_output`. Drafts, some of
them wrong, are verified against that, so they change no token; those rejected leave wrong KV behind.
"""

from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random

import numpy as np

from tessera.values.batch import RowError, ScheduledBatch, ScheduledBatchOutput, SlotDrop, SlotEntry, SlotSwap
from tessera.values.finish import Finish, FinishReason
from tessera.values.identity import NO_EPOCH, Epoch
from tessera.values.logprobs import Logprobs, PromptLogprobs, joined_logprobs, no_logprobs
from tessera.values.model import KVGeometry, ModelInfo, WorkerDescription, WorkerLimits
from tessera.values.report import DroppedSlot, SlotReport, WorkerReport
from tessera.values.request import Submission
from tessera.values.sampling import SamplingParams
from tests.services.scheduler.core.fake_logprobs import logprobs_behind, sampled_logprobs

MODEL = ModelInfo(
    name="fake",
    architecture="FakeForCausalLM",
    vocab_size=64,
    max_model_len=64,
    eos_token_ids=(2, 9),
    bos_token_id=1,
    tokenizer_digest="0" * 64,
    weights_digest="1" * 64,
)

LIMITS = WorkerLimits(max_num_seqs=8, max_num_batched_tokens=64)

_EMPTY_PREFIX = 0


def extend_digest(digest: int, token_id: int) -> int:
    """Digest of a prefix with one more id (63 bits, so that it fits int64)."""
    raw = blake2b(digest.to_bytes(8, "little") + token_id.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(raw, "little") >> 1


def prefix_digests(token_ids: Sequence[int], digests: list[int] | None = None) -> list[int]:
    """Digest of every prefix of `token_ids`, the empty one left out; `digests` of a shorter prefix are extended in place."""
    digests = [] if digests is None else digests
    for token_id in token_ids[len(digests) :]:
        digests.append(extend_digest(digests[-1] if digests else _EMPTY_PREFIX, int(token_id)))
    return digests


def salt_mark(cache_salt: str) -> int:
    """What tells this tenant's KV from that of every other (63 bits)."""
    return extend_digest(int.from_bytes(blake2b(cache_salt.encode(), digest_size=7).digest(), "little"), 0) if cache_salt else 0


def sample(digest: int, output_len: int, sampling: SamplingParams, model: ModelInfo = MODEL) -> int:
    """The next token after ids with this digest: an EOS or stop token id is never drawn before `min_tokens` outputs."""
    token_id = extend_digest(digest, sampling.seed) % model.vocab_size
    if output_len < sampling.min_tokens:
        masked = {*model.eos_token_ids, *sampling.stop_token_ids}
        while token_id in masked:
            token_id = (token_id + 1) % model.vocab_size
    return token_id


def reference_output(
    submission: Submission, pool_tokens: int, model: ModelInfo = MODEL, output_max: int = 1 << 20
) -> tuple[list[int], Finish | None]:
    """Output tokens and finish of a request that runs alone, token by token; the oracle for every schedule.

    Cut after `output_max` tokens, then without a finish. A pool of `pool_tokens` positions ends a request by length at one token more.
    """
    sampling, prompt_len = submission.sampling, len(submission.prompt_token_ids)
    ids = [int(token_id) for token_id in submission.prompt_token_ids]
    output: list[int] = []
    digests: list[int] = []
    while len(output) < output_max:
        token_id = sample(prefix_digests(ids, digests)[-1], len(output), sampling, model)
        ids.append(token_id)
        output.append(token_id)
        len_max = min(model.max_model_len, pool_tokens + 1, submission.max_model_length or model.max_model_len)
        finish = _reference_finish(output, len_max - prompt_len, sampling, model)
        if finish is not None:
            return output, finish
    return output, None


def _reference_finish(output: list[int], output_len_max: int, sampling: SamplingParams, model: ModelInfo) -> Finish | None:
    count, last = len(output), output[-1]
    if count >= sampling.min_tokens:
        if any(output[-len(stop) :] == list(stop) for stop in sampling.stop_token_sequences):
            return Finish(FinishReason.STOP_SEQUENCE, count)
        if last in model.eos_token_ids and not sampling.ignore_eos:
            return Finish(FinishReason.EOS, count, stop_token_id=last)
        if last in sampling.stop_token_ids:
            return Finish(FinishReason.STOP_TOKEN, count, stop_token_id=last)
    if count >= sampling.max_tokens:
        return Finish(FinishReason.MAX_TOKENS, count)
    if count >= output_len_max:
        return Finish(FinishReason.MAX_MODEL_LEN, count)
    return None


@dataclass(slots=True)
class _Slot:
    request_id: bytes
    attempt: int
    prompt_len: int
    token_ids: list[int]
    block_table: list[int]
    computed_len: int
    sampling: SamplingParams
    digests: list[int] = field(default_factory=list)
    failed: str = ""
    is_swapped: bool = False
    cache_salt: str = ""
    unused: list[tuple[int, int]] = field(default_factory=list)  # (step, positions for drafts that came to nothing)

    def report(self, slot: int) -> SlotReport:
        ids, table = np.array(self.token_ids, np.int32), np.array(self.block_table, np.int32)
        return SlotReport(
            slot,
            self.request_id,
            self.attempt,
            self.prompt_len,
            ids,
            table,
            self.computed_len,
            self.is_swapped,
            self.cache_salt,
        )

    def kv_of(self, first: int, stop: int) -> np.ndarray:
        """KV of these positions, int64: of its own prefix and tenant."""
        prefix_digests(self.token_ids, self.digests)
        return np.array(self.digests[first:stop], np.int64) ^ salt_mark(self.cache_salt)

    def logprobs(self, count: int) -> list[Logprobs]:
        """Of the last `count` tokens."""
        digests, first = prefix_digests(self.token_ids, self.digests), len(self.token_ids) - count
        pairs = zip(digests[first - 1 :], self.token_ids[first:], strict=False)
        return [sampled_logprobs(digest, token_id, self.sampling) for digest, token_id in pairs]

    def prompt_logprobs(self, first: int, stop: int) -> Logprobs:
        """Of the prompt tokens that a row of these positions comes past."""
        num_top, digests = self.sampling.prompt_logprobs, prefix_digests(self.token_ids, self.digests)
        if num_top is None:
            return no_logprobs(0)
        ids = self.token_ids[first + 1 : min(stop + 1, self.prompt_len)]
        found = [logprobs_behind(digest, one, num_top, ()) for digest, one in zip(digests[first:], ids, strict=False)]
        return joined_logprobs([no_logprobs(0), *found])


def _told(prompts: list[Logprobs]) -> PromptLogprobs | None:
    """Of each row; None where no row has any."""
    row_counts = np.array([len(logprobs) for logprobs in prompts], np.int32)
    return PromptLogprobs(row_counts, joined_logprobs(prompts)) if row_counts.any() else None


class RandomDrafts:
    """How many drafts there are where `room` fit, and how many of the first of them are right: anything, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)

    def __call__(self, room: int) -> tuple[int, int]:
        num_drafts = self._rng.choice((room, self._rng.randint(0, room)))
        return num_drafts, self._rng.randint(0, num_drafts)


class FakeWorker:
    """One worker: `enqueue` a batch, `step` executes the oldest one; a started batch is one that was stepped."""

    def __init__(
        self,
        num_blocks: int = 16,
        block_size: int = 4,
        limits: WorkerLimits = LIMITS,
        model: ModelInfo = MODEL,
        num_host_blocks: int = 0,
    ) -> None:
        self.geometry = KVGeometry(num_blocks, block_size, 8, "fake/int64", num_host_blocks)
        self.limits, self.model = limits, model
        self.propose: Callable[[int], tuple[int, int]] = RandomDrafts(
            num_blocks
        )  # room for drafts -> how many, the right ones in front
        self.boots = 0
        self.epoch, self.nonce = NO_EPOCH, 0
        self.restart()

    def restart(self) -> None:
        """A new boot: everything it held is gone."""
        self.boots += 1
        self.description = WorkerDescription(self.boots.to_bytes(16, "big"), self.model, self.geometry, self.limits)
        self.epoch, self.nonce = NO_EPOCH, 0
        self.last_step = 0
        self.slots: dict[int, _Slot] = {}
        self.dropped: list[DroppedSlot] = []
        self.queue: deque[ScheduledBatch] = deque()
        self.kv = np.full((self.geometry.num_blocks, self.geometry.block_size), -1, np.int64)
        self.host_kv = np.full((self.geometry.num_host_blocks, self.geometry.block_size), -1, np.int64)
        self.last_write_step = np.zeros(self.geometry.num_blocks, np.int64)
        self.computed_positions = 0
        self._row_errors: dict[bytes, str] = {}

    # -- the contract

    def attach(self, epoch: Epoch, nonce: int) -> WorkerReport:
        """Fence everything older, discard what was not started, report. The (epoch, nonce) must be above the last."""
        assert epoch.supersedes(self.epoch) and (epoch != self.epoch or nonce > self.nonce), "older epoch or nonce"
        self.epoch, self.nonce = epoch, nonce
        self.queue.clear()
        return self.report()

    def report(self) -> WorkerReport:
        """Everything held now."""
        slots = tuple(slot.report(number) for number, slot in sorted(self.slots.items()))
        return WorkerReport(
            self.nonce, self.description, self.last_step, slots, tuple(self.dropped), self.last_write_step.copy()
        )

    def enqueue(self, batch: ScheduledBatch) -> None:
        """Accept a batch; what the contract forbids is an assertion."""
        assert (batch.epoch, batch.nonce) == (self.epoch, self.nonce), "a batch of another attach"
        assert len(self.queue) < self.limits.max_batches_in_flight, "too many batches in flight"
        assert batch.num_rows <= self.limits.max_num_seqs, f"{batch.num_rows} rows"
        assert batch.total_tokens <= self.limits.max_num_batched_tokens, f"{batch.total_tokens} tokens"
        columns = (batch.slots, batch.num_scheduled_tokens, batch.context_lens, batch.new_block_counts, batch.new_block_ids)
        assert all(column.dtype == np.int32 for column in columns)
        assert all(len(column) == batch.num_rows for column in columns[:4])
        assert batch.new_block_counts.sum() == len(batch.new_block_ids)
        assert batch.is_dummy_run or len(set(batch.slots.tolist())) == batch.num_rows, "a slot in two rows"
        assert not (batch.is_dummy_run and (batch.entries or len(batch.new_block_ids))), "a dummy with work"
        self.queue.append(batch)

    def fail_next_row(self, request_id: bytes, message: str = "logits are not finite") -> None:
        """The next row of this request fails alone."""
        self._row_errors[request_id] = message

    def step(self) -> ScheduledBatchOutput:
        """Execute the oldest batch and return its output."""
        batch = self.queue.popleft()
        assert batch.step_id > self.last_step, f"step {batch.step_id} after {self.last_step}"
        self._start(batch)
        counts, token_ids, errors, draft_counts = [], [], [], [0] * batch.num_rows
        logprobs, prompts = [no_logprobs(0)], [no_logprobs(0)] * batch.num_rows
        for row in range(batch.num_rows):
            if batch.is_dummy_run:
                counts.append(0)
                continue
            slot = self.slots[int(batch.slots[row])]
            slot.failed = slot.failed or self._row_errors.pop(slot.request_id, "")
            if slot.failed:
                errors.append(RowError(row, slot.failed))
                counts.append(0)
                continue
            context_len, count = int(batch.context_lens[row]), int(batch.num_scheduled_tokens[row])
            if row < batch.num_decodes:
                sampled, draft_counts[row] = self._decode(slot, context_len, count, batch)
            else:
                sampled = self._prefill(slot, context_len, count, batch.step_id)
                prompts[row] = slot.prompt_logprobs(context_len - count, context_len)
            counts.append(len(sampled))
            token_ids.extend(sampled)
            logprobs += slot.logprobs(len(sampled))
        self.last_step = batch.step_id
        return ScheduledBatchOutput(
            batch.epoch,
            batch.nonce,
            batch.step_id,
            np.array(counts, np.int32),
            np.array(token_ids, np.int32),
            tuple(errors),
            draft_counts=np.array(draft_counts if any(draft_counts) else (), np.int32),
            logprobs=joined if (joined := joined_logprobs(logprobs)).counts.any() else None,
            prompt_logprobs=_told(prompts),
        )

    # -- inside

    def _start(self, batch: ScheduledBatch) -> None:
        for drop in batch.drops:
            self._drop(drop, batch.step_id)
        self.dropped = [slot for slot in self.dropped if slot.drop_step > batch.durable_step]
        if batch.moves_blocks:
            self._move(batch)
        if batch.is_dummy_run:
            return
        entered = {entry.slot for entry in batch.entries}
        assert entered <= set(batch.slots.tolist()), "an entry without a row"
        for entry in batch.entries:
            self._enter(entry)
        first = 0
        for slot, count, context_len in zip(batch.slots.tolist(), batch.new_block_counts, batch.context_lens, strict=True):
            assert not (count and slot in entered), "an entering row brings its whole table"
            self.slots[slot].block_table.extend(batch.new_block_ids[first : first + count].tolist())
            first += count
            assert len(self.slots[slot].block_table) * self.geometry.block_size >= context_len, "the table is too short"
        self._check_owners()

    def _move(self, batch: ScheduledBatch) -> None:
        """Swap outs, copies, swap ins, zero: in this order, each only where nobody's KV is overwritten."""
        swapped = [swap.slot for swap in batch.swap_outs + batch.swap_ins]
        assert len(set(swapped)) == len(swapped), "a slot is swapped twice"
        for swap in batch.swap_outs:
            self._swap_out(swap)
        sources, targets = batch.copies.T
        self._check_targets(targets)
        assert not set(targets.tolist()) & set(sources.tolist()), "a copy's target is a source"
        self.kv[targets] = self.kv[sources]
        self.last_write_step[targets] = batch.step_id
        for swap in batch.swap_ins:
            self._swap_in(swap, batch)
        filled = {block_id for swap in batch.swap_ins for block_id in swap.pairs[:, 1].tolist()} | set(targets.tolist())
        assert not filled & set(batch.zero_blocks.tolist()), "what was copied is zeroed"
        self._check_targets(batch.zero_blocks, {swap.slot for swap in batch.swap_ins})
        self.kv[batch.zero_blocks] = -1
        self.last_write_step[batch.zero_blocks] = batch.step_id

    def _swap_out(self, swap: SlotSwap) -> None:
        slot = self._swapping(swap)
        assert not slot.is_swapped, f"slot {swap.slot} is swapped out already"
        taken = {block_id for other in self.slots.values() if other.is_swapped for block_id in other.block_table}
        table = swap.block_table.tolist()
        assert len(set(table)) == len(table) and not taken & set(table), "a host block has two owners"
        assert len(table) * self.geometry.block_size >= slot.computed_len, "the host table is too short"
        assert swap.pairs.tolist() == [[*pair] for pair in zip(slot.block_table, table, strict=False)], "pairs out of order"
        self.host_kv[swap.pairs[:, 1]] = self.kv[swap.pairs[:, 0]]
        slot.is_swapped, slot.block_table = True, table

    def _swap_in(self, swap: SlotSwap, batch: ScheduledBatch) -> None:
        slot = self._swapping(swap)
        assert slot.is_swapped, f"slot {swap.slot} is not swapped out"
        table = swap.block_table.tolist()
        assert len(table) * self.geometry.block_size >= slot.computed_len, "the table is too short"
        places = dict(zip(slot.block_table, table, strict=False))
        sources, targets = swap.pairs.T
        assert all(places.get(source) == target for source, target in swap.pairs.tolist()), "a pair is not in both tables"
        self._check_targets(targets)
        assert not set(targets.tolist()) & set(batch.copies[:, 0].tolist()), "copied before it is swapped in"
        self.kv[targets] = self.host_kv[sources]
        self.last_write_step[targets] = batch.step_id
        slot.is_swapped, slot.block_table = False, table

    def _swapping(self, swap: SlotSwap) -> _Slot:
        slot = self.slots[swap.slot]
        assert (slot.request_id, slot.attempt) == (swap.request_id, swap.attempt), f"slot {swap.slot} is somebody else's"
        assert swap.block_table.dtype == np.int32 and swap.pairs.dtype == np.int32 and swap.pairs.shape[1:] == (2,)
        return slot

    def _check_targets(self, block_ids: np.ndarray, new: Container[int] = ()) -> None:
        """Blocks about to be overwritten: none comes twice, and none is computed in a table, nor in one at all but those of `new` slots."""
        targets, size = set(block_ids.tolist()), self.geometry.block_size
        assert len(targets) == len(block_ids), "a block is written twice"
        for number, slot in self.slots.items():
            table = slot.block_table[: -(-slot.computed_len // size)] if number in new else slot.block_table
            assert slot.is_swapped or not targets & set(table), f"a block of {slot.request_id.hex()} is overwritten"

    def _drop(self, drop: SlotDrop, step_id: int) -> None:
        held = self.slots.get(drop.slot)
        if held is None or (held.request_id, held.attempt) != (drop.request_id, drop.attempt):
            return
        del self.slots[drop.slot]
        if held.is_swapped:
            held.block_table, held.computed_len = [], 0
        report = held.report(drop.slot)
        self.dropped.append(
            DroppedSlot(
                report.request_id,
                report.attempt,
                report.prompt_len,
                report.token_ids,
                report.block_table,
                report.computed_len,
                drop.finish,
                step_id,
                report.cache_salt,
            )
        )

    def _enter(self, entry: SlotEntry) -> None:
        assert entry.slot not in self.slots, f"slot {entry.slot} is held"
        assert 0 <= entry.slot < self.limits.max_num_seqs, f"slot {entry.slot} is beyond the limit"
        assert entry.token_ids.dtype == np.int32 and entry.block_table.dtype == np.int32
        assert 0 <= entry.num_cached_tokens < len(entry.token_ids)
        self.slots[entry.slot] = _Slot(
            entry.request_id,
            entry.attempt,
            entry.prompt_len,
            entry.token_ids.tolist(),
            entry.block_table.tolist(),
            entry.num_cached_tokens,
            entry.sampling,
            cache_salt=entry.cache_salt,
        )

    def _check_owners(self) -> None:
        """A block lies in two tables only where both have computed it full, with the same ids, for the same tenant."""
        size = self.geometry.block_size
        owners: dict[int, tuple[str, list[int]] | None] = {}
        for slot in self.slots.values():
            for index, block_id in enumerate([] if slot.is_swapped else slot.block_table):
                end = (index + 1) * size
                content = (slot.cache_salt, slot.token_ids[:end]) if end <= slot.computed_len else None
                if block_id in owners:
                    assert content is not None and owners[block_id] == content, f"block {block_id} has two owners"
                owners[block_id] = content

    def _prefill(self, slot: _Slot, context_len: int, count: int, step_id: int) -> list[int]:
        """A chunk; it samples one token where it reaches the end."""
        assert context_len <= len(slot.token_ids), f"row ends at {context_len}, {len(slot.token_ids)} ids are known"
        prefix_digests(slot.token_ids, slot.digests)
        self._write(slot, context_len - count, slot.digests[context_len - count : context_len], step_id)
        slot.computed_len = context_len
        self.computed_positions += count
        if context_len < len(slot.token_ids):
            return []
        slot.token_ids.append(self._next_token(slot, slot.digests[-1], 0))
        return slot.token_ids[-1:]

    def _decode(self, slot: _Slot, context_len: int, count: int, batch: ScheduledBatch) -> tuple[list[int], int]:
        """The last token and the drafts behind it: what they sample, and how many drafts there were."""
        slot.unused = [(step, number) for step, number in slot.unused if step > batch.seen_step]
        start = context_len - count - sum(number for _, number in slot.unused)
        assert count - 1 <= self.limits.num_speculative_tokens, f"{count - 1} drafts"
        assert start == len(slot.token_ids) - 1, f"a decode at {start}, {len(slot.token_ids)} ids are known"
        prefix_digests(slot.token_ids, slot.digests)
        num_drafts, num_right = self.propose(count - 1) if count > 1 else (0, 0)
        assert 0 <= num_right <= num_drafts < count
        sampled, written = [self._next_token(slot, slot.digests[-1], 0)], slot.digests[-1:]
        for _ in range(num_right):
            written.append(extend_digest(written[-1], sampled[-1]))
            sampled.append(self._next_token(slot, written[-1], len(sampled)))
        for _ in range(num_drafts - num_right):
            written.append(extend_digest(written[-1], sampled[-1] + 1))
        self._write(slot, start, written, batch.step_id)
        slot.token_ids += sampled
        slot.computed_len = start + len(sampled)
        slot.unused.append((batch.step_id, count - len(sampled)))
        self.computed_positions += len(sampled)
        return sampled, num_drafts

    def _write(self, slot: _Slot, start: int, digests: list[int], step_id: int) -> None:
        """KV of the positions from `start` on, once all before them have been read."""
        size = self.geometry.block_size
        assert not slot.is_swapped, "a row of a slot that is swapped out"
        assert digests and start == slot.computed_len, f"row starts at {start}, computed are {slot.computed_len}"
        assert start + len(digests) <= self.model.max_model_len, "a row beyond the model's length"
        blocks = np.array(slot.block_table, np.int64)
        positions = np.arange(start + len(digests))
        read = self.kv[blocks[positions[:start] // size], positions[:start] % size]
        assert (read == slot.kv_of(0, start)).all(), f"KV of {slot.request_id.hex()} is not its own"
        written = positions[start:]
        self.kv[blocks[written // size], written % size] = np.array(digests, np.int64) ^ salt_mark(slot.cache_salt)
        self.last_write_step[blocks[written // size]] = step_id

    def _next_token(self, slot: _Slot, digest: int, num_ahead: int) -> int:
        """The token behind ids with this digest, `num_ahead` more than the slot has."""
        return sample(digest, len(slot.token_ids) + num_ahead - slot.prompt_len, slot.sampling, self.model)
