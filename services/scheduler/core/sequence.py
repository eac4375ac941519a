"""One request through its life: its tokens, its place on a worker, its end (ATOM's `Sequence`)."""

from array import array
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kv_manager.block_table import BlockTable
from kv_manager.hash_chain import TokenIds
from services.scheduler.core.committed_output import CommittedOutput
from services.scheduler.core.held_blocks import table_namespace
from services.scheduler.core.kept_logprobs import KeptLogprobs
from services.scheduler.core.lanes import Lanes
from services.scheduler.core.ledger import Ledger
from services.scheduler.core.record import Arrival
from services.scheduler.core.sequence_status import ALLOWED_TRANSITIONS, SequenceStatus, SequenceType
from services.scheduler.core.stop_rules import StopRules
from services.scheduler.core.tokens import Tokens
from tessera.values.batch import SlotEntry
from tessera.values.finish import Finish, FinishReason
from tessera.values.logprobs import Logprobs
from tessera.values.report import SlotReport
from tessera.values.request import RequestTimings, Submission


@dataclass(slots=True, eq=False)
class Sequence:
    """One request. Owned and changed by the scheduler; others only read.

    `attempt` numbers its entries into batches. It is that of the slot in which it goes on, so it can be below one that some worker has seen,
    which is at most `attempt_floor`: the next entry is above both. `has_entered` is false while a running sequence still has to be
    sent to its slot whole. `admission` is the number of its latest admission, the order of victims.
    `held_len` is how many positions its slot held when this leader took over, `stranded_len` how many a worker held then and this
    sequence could not, or can no longer, go on with.
    `logprobs` are those of its output, `prompt_logprobs` those of its prompt from the second token on, None where it wants none; the latter
    are whole once there is an output token, or are known to nobody.
    """

    submission: Submission
    arrival: Arrival
    arrived_us: int
    ledger: Ledger
    subscriber: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    type: SequenceType = SequenceType.DUMMY
    attempt: int = 0
    attempt_floor: int = 0
    admission: int = 0
    worker: str = ""
    slot: int | None = None
    has_entered: bool = False
    table: BlockTable = field(default_factory=BlockTable)
    rules: StopRules | None = None  # none until a worker has told the model
    tokens_max: int = 0  # prompt and output never grow beyond; once promised it is never less
    num_cached_tokens: int = 0
    held_len: int = 0
    stranded_len: int = 0
    finish: Finish | None = None
    finished_us: int = 0
    timings: RequestTimings = RequestTimings()
    is_recorded: bool = False  # the journal has the submission
    logprobs: KeptLogprobs | None = None
    prompt_logprobs: KeptLogprobs | None = None
    is_prompt_told: bool = False  # the journal has the prompt's log-probabilities
    request_id: bytes = field(init=False)  # the submission's

    def __post_init__(self) -> None:
        self.request_id = self.submission.request_id
        self.table.namespace = table_namespace(self.submission.cache_salt)
        sampling = self.submission.sampling
        if self.logprobs is None and sampling.wants_logprobs:
            self.logprobs = KeptLogprobs()
        if self.prompt_logprobs is None and sampling.prompt_logprobs is not None:
            self.prompt_logprobs = KeptLogprobs()

    @property
    def output_len(self) -> int:
        """Committed output tokens."""
        return self.ledger.output_len

    @property
    def hit_token_ids(self) -> TokenIds:
        """The tokens whose KV may be found cached. Who wants to know how likely its prompt is has every position of it computed for it, until
        that is told with the first output token: nothing but the first token, which fills no block to hit."""
        return self.ledger.token_ids[:1] if self._lacks_prompt_logprobs else self.ledger.token_ids

    @property
    def _lacks_prompt_logprobs(self) -> bool:
        return self.prompt_logprobs is not None and not self.output_len

    def output_token_ids(self, offset: int = 0) -> tuple[int, ...]:
        """Committed output tokens from `offset` on."""
        return tuple(self.ledger.token_ids.output[offset:])

    def output_logprobs(self, first: int, end: int) -> Logprobs | None:
        """Log-probabilities of the output tokens `[first, end)`; None where it wants none."""
        return None if self.logprobs is None else self.logprobs.read(first, end)

    def whole_prompt_logprobs(self) -> Logprobs | None:
        """Those of every prompt token but the first; None where it wants none, or as long as nobody has told them all."""
        kept, count = self.prompt_logprobs, self.ledger.prompt_len - 1
        return kept.read(0, count) if kept is not None and self.output_len and len(kept) == count else None

    def num_prompt_logprobs(self, count: int) -> int:
        """Of how many prompt tokens the row of the next `count` positions, whose output has not come, has log-probabilities that are wanted."""
        if not self._lacks_prompt_logprobs:
            return 0
        first = self.ledger.computed_len
        return max(0, min(first + count, self.ledger.prompt_len - 1) - first)

    def committed_output(self, first: int, end: int) -> CommittedOutput:
        """The output tokens `[first, end)`, or those of them that there are."""
        token_ids = tuple(self.ledger.token_ids.output[first:end])
        if self.logprobs is None and self.prompt_logprobs is None:
            return CommittedOutput(token_ids)
        prompt_logprobs = self.whole_prompt_logprobs() if first == 0 else None
        return CommittedOutput(token_ids, self.output_logprobs(first, first + len(token_ids)), prompt_logprobs)

    def set_rules(self, rules: StopRules | None) -> None:
        """The rules under the model, and under pools of which none promises less than before; None: what was promised before holds."""
        self.ledger.leave_lane()
        self.rules = rules
        if rules is not None:
            self.tokens_max = rules.tokens_max

    def first_stop(self, checked: int) -> Finish | None:
        """The earliest stop after the first `checked` output tokens; None as well while no worker has told the model."""
        return self.rules.first_stop(self.ledger.token_ids.output, checked) if self.rules is not None else None

    def next_decode(self) -> int | None:
        """The position that the next decode row computes; None where more than one is left to compute, where the sequence has still to
        enter its slot, or where the tokens that batches in flight are sampling will be its last."""
        position, num_tokens = self.ledger.scheduled_len, self.ledger.num_tokens
        # The row that computes a position samples the token at the next; beyond the committed ones those are placeholders.
        if position + 1 >= num_tokens and position + 1 < self.tokens_max and self.has_entered:
            return position
        return None

    def take_lane(self, lanes: Lanes) -> None:
        """Count in the lane of its slot, if it is running, has told of its first token, and only decodes."""
        if self.ledger.lanes is not None or self.rules is None or not self.timings.ttft_us or not self.ledger.fits_lane:
            return
        if self.logprobs is not None:  # lanes count tokens and nothing else
            return
        assert self.slot is not None and self.has_entered and self.status is SequenceStatus.RUNNING
        self.ledger.take_lane(lanes, self.slot, self.tokens_max, self.rules.last_ids)
        lanes.has_table(self.slot, len(self.table.block_ids), self.table.block_ids[-1])

    @property
    def is_past_prefill(self) -> bool:
        """Whether all that is left to compute are decodes. The last position of a prompt, where that is no row yet, ends a prefill."""
        ledger = self.ledger
        if ledger.lanes is not None:
            return True
        return self.has_entered and ledger.num_remaining == 1 and ledger.scheduled_len >= ledger.prompt_len

    def run(self, worker: str, slot: int) -> None:
        """Take a slot; the table is filled already."""
        self._move(SequenceStatus.RUNNING)
        self.worker, self.slot, self.has_entered = worker, slot, False

    def wait(self) -> None:
        """Give up slot and KV, keep the tokens; the table is empty already."""
        self._move(SequenceStatus.WAITING)
        self._leave()

    def swap_out(self) -> None:
        """The KV moves to the worker's host memory; slot, attempt and what is in flight stay."""
        self._move(SequenceStatus.SWAPPED)
        self.ledger.forget_table()

    def swap_in(self) -> None:
        """The KV is in the worker's pool again; the table is filled already."""
        self._move(SequenceStatus.RUNNING)

    def end(self, finish: Finish, now_us: int) -> None:
        """Take the terminal mark; tokens beyond it are cut. The table is empty already."""
        self._move(SequenceStatus.ABORTED if finish.reason is FinishReason.ABORTED else SequenceStatus.FINISHED)
        self._leave()
        self.finish, self.finished_us = finish, now_us
        self.ledger.cut(finish.output_len)
        self.timings = replace(self.timings, total_us=now_us - self.arrived_us)

    def end_earlier(self, finish: Finish) -> None:
        """Replace the terminal mark by one that came later and lies at or before it."""
        assert self.finish is not None and finish.output_len <= self.finish.output_len
        self.finish = finish
        self.ledger.cut(finish.output_len)

    def restart_from(self, output_token_ids: tuple[int, ...], held_len: int) -> None:
        """Replace the output of a waiting sequence; nothing computed or hashed for the old one counts. `held_len` is that of the slot
        which it has left for this."""
        assert self.status is SequenceStatus.WAITING
        old = self.ledger
        self.ledger = Ledger(Tokens(old.token_ids.prompt, output_token_ids))
        common_len = _common_len(old.token_ids[:], self.ledger.token_ids[:])
        self.stranded_len = min(max(self.stranded_len, held_len), common_len)
        if self.logprobs is not None:
            self.logprobs.cut(common_len - old.prompt_len)
        self.forget_digests()

    def forget_digests(self) -> None:
        """The hash chain of a waiting sequence is of other tokens, or of blocks of another size."""
        assert not (self.table.block_ids or self.table.host_block_ids)
        self.table = BlockTable(namespace=self.table.namespace)

    def agrees_with(self, slot: SlotReport) -> bool:
        """Whether the KV in a slot is this sequence's: same tenant and prompt length, same ids over its computed length."""
        if (slot.prompt_len, slot.cache_salt) != (self.ledger.prompt_len, self.submission.cache_salt):
            return False
        if self._is_extended_by(slot):
            return slot.computed_len < len(slot.token_ids)
        return slot.computed_len < self.ledger.num_tokens and self._begins(slot.token_ids, slot.computed_len)

    def can_go_on_in(self, slot: SlotReport, block_size: int, shared: Container[int]) -> bool:
        """Whether the KV in a slot is this sequence's, and none of the `shared` blocks, which somebody else may read, would be written again."""
        if not self.agrees_with(slot):
            return False
        rewritten = slot.block_table[self._usable_len(slot) // block_size : slot.computed_len // block_size].tolist()
        return slot.is_swapped or not any(block_id in shared for block_id in rewritten)

    def held_in(self, slots: Iterable[SlotReport]) -> int:
        """The most positions of this sequence whose KV one of these slots holds."""
        token_ids = self.ledger.token_ids[:]
        return max((min(slot.computed_len, _common_len(token_ids, slot.token_ids)) for slot in slots), default=0)

    def continue_in(self, slot: SlotReport, worker: str) -> None:
        """Go on in a slot that agrees: take its table, its computed length, and its ids where they extend ours. Of those no log-probabilities are
        known: who wants them has them sampled again.

        Where the slot's ids or computed length still differ, `has_entered` stays false: the sequence is to enter the slot again, with its KV
        kept.
        """
        self.ledger.leave_lane()
        usable_len = self._usable_len(slot)
        if self._is_extended_by(slot) and self.logprobs is None and not self._lacks_prompt_logprobs:
            self.ledger.token_ids.replace_output(slot.token_ids)
        status = SequenceStatus.SWAPPED if slot.is_swapped else SequenceStatus.RUNNING
        if self.status is not status:
            self._move(status)
        self.worker, self.slot, self.attempt = worker, slot.slot, slot.attempt
        self.has_entered = (
            usable_len == slot.computed_len
            and len(slot.token_ids) == self.ledger.num_tokens
            and self._begins(slot.token_ids, self.ledger.num_tokens)
        )
        self.ledger.restart(usable_len)
        if slot.is_swapped:
            self.table.host_block_ids = tuple(slot.block_table.tolist())
        else:
            self.table.block_ids = array("i", slot.block_table.tolist())
        self.ledger.forget_table()

    def enter(self) -> SlotEntry:
        """Begin the next attempt: everything the worker needs of this sequence. Positions computed so far count as cached."""
        assert self.slot is not None and not self.has_entered and self.ledger.positions_in_flight == 0
        self.attempt = self.attempt_floor = 1 + max(self.attempt, self.attempt_floor)
        self.has_entered = True
        return SlotEntry(
            slot=self.slot,
            request_id=self.request_id,
            attempt=self.attempt,
            prompt_len=self.ledger.prompt_len,
            token_ids=self.ledger.token_ids[:],
            block_table=np.array(self.table.block_ids, np.int32),
            num_cached_tokens=self.ledger.computed_len,
            sampling=self.submission.sampling,
            cache_salt=self.submission.cache_salt,
            trace_context=self.submission.trace_context,
        )

    @property
    def first_token_us(self) -> int:
        """When its first output token came; when it came itself as long as there is none, or where that is not known."""
        return self.arrived_us + self.timings.ttft_us

    def note_admission(self, now_us: int) -> None:
        """The first admission ends the time in the queue."""
        if self.attempt == 0 and not self.timings.queue_us:
            self.timings = RequestTimings(now_us - self.arrived_us, 0, 0, self.timings.num_preemptions)

    def note_preemption(self) -> None:
        """It has had to make room for others."""
        self.timings = replace(self.timings, num_preemptions=self.timings.num_preemptions + 1)

    def note_tokens(self, now_us: int) -> None:
        """The first output token ends the time to first token."""
        if not self.timings.ttft_us:
            self.timings = RequestTimings(self.timings.queue_us, now_us - self.arrived_us, 0, self.timings.num_preemptions)

    def _usable_len(self, slot: SlotReport) -> int:
        """How many positions of a slot's KV need not be computed again: all, but for log-probabilities, which no worker keeps. Those of the next
        token come of the position before it, those of the prompt of all its positions."""
        if self._lacks_prompt_logprobs:
            return 0
        return slot.computed_len if self.logprobs is None else min(slot.computed_len, self.ledger.num_tokens - 1)

    def _is_extended_by(self, slot: SlotReport) -> bool:
        count = self.ledger.num_tokens
        return len(slot.token_ids) > count and self._begins(slot.token_ids, count)

    def _begins(self, token_ids: npt.NDArray[np.int32], count: int) -> bool:
        """Whether the first `count` committed ids begin `token_ids`. Of the prompt arrays are compared: as lists it would take a hundred
        times as long, for every request of a takeover."""
        prompt = self.submission.prompt_token_ids[:count]
        return (
            len(token_ids) >= count
            and np.array_equal(token_ids[: len(prompt)], prompt)
            and np.array_equal(token_ids[len(prompt) : count], self.ledger.token_ids[len(prompt) : count])
        )

    def _leave(self) -> None:
        assert not (self.table.block_ids or self.table.host_block_ids), "a sequence that does not run holds no blocks"
        self.worker, self.slot, self.has_entered = "", None, False
        self.ledger.restart(0)
        self.ledger.forget_table()
        self.held_len = 0

    def _move(self, status: SequenceStatus) -> None:
        assert status in ALLOWED_TRANSITIONS[self.status], f"{self.status} to {status}"
        self.status = status


def _common_len(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """How many tokens they begin with alike."""
    count = min(len(one), len(other))
    differs = one[:count] != other[:count]
    return int(differs.argmax()) if differs.any() else count
