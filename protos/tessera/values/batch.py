"""One step of work as columns: what the scheduler sends a worker, and what comes back.

Order inside a batch: drops, swap outs, copies, swap ins, zero, entries, new blocks, compute. A worker owns the token ids of a slot:
it receives all of them on entry and appends what it samples, so rows carry positions, not ids. That is what
lets a second batch leave before the first one's output is known.
"""

from dataclasses import dataclass, field

import numpy as np

from tessera.values.finish import Finish
from tessera.values.identity import Epoch
from tessera.values.logprobs import Logprobs, PromptLogprobs
from tessera.values.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class SlotEntry:
    """A sequence entering a slot (new, resumed or moved here); every later row names only the slot.

    `token_ids` int32 `[prompt_len + outputs so far]`; `block_table` int32, covers at least the row of this batch.
    The first `num_cached_tokens` positions hold valid KV already (prefix hits) and are not computed.
    `attempt` grows at every entry of the same request into a batch. `cache_salt` and `trace_context` are the request's; a worker only
    reports them.
    """

    slot: int
    request_id: bytes
    attempt: int
    prompt_len: int
    token_ids: np.ndarray
    block_table: np.ndarray
    num_cached_tokens: int
    sampling: SamplingParams
    cache_salt: str = ""
    trace_context: str = ""


@dataclass(frozen=True, slots=True)
class SlotDrop:
    """A slot given up; a no-op unless the slot still holds this (request, attempt). `finish` None means preempted or moved."""

    slot: int
    request_id: bytes
    attempt: int
    finish: Finish | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SlotSwap:
    """A held slot whose KV moves between the pool and the host pool. It keeps slot, attempt, ids and computed length, and takes part in
    no row while it is swapped out; outputs of batches before this one still count.

    - `block_table` int32 `[N]`: the slot's table from now on, N * block_size >= its computed length. Out: host block ids, each in
      this one table only. In: block ids of the pool, of which those without a pair hold the slot's KV already (prefix hits).
    - `pairs` int32 `[P, 2]`: (source, target) of each block to copy whole, in the order of the table. Out: all N blocks, from the
      first N of the table until now. In: each from its place in the table until now to the same place in the new one.
    """

    slot: int
    request_id: bytes
    attempt: int
    block_table: np.ndarray
    pairs: np.ndarray


NO_PAIRS = np.zeros((0, 2), np.int32)
NO_BLOCKS = np.zeros(0, np.int32)
"""Nothing to copy, and no blocks, for batches that move nothing; shared and read-only."""
NO_DRAFTS = np.zeros(0, np.int32)
"""For outputs without drafts; shared and read-only."""
NO_PAIRS.flags.writeable = NO_BLOCKS.flags.writeable = NO_DRAFTS.flags.writeable = False


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledBatch:
    """ATOM's `ScheduledBatch` as columns. All arrays are int32 on the host; R rows, decodes first, then prefill chunks.

    - `slots[R]`: which slot each row computes.
    - `num_scheduled_tokens[R]`: positions computed this step, >= 1.
    - `context_lens[R]`: KV length after the step; the row computes `[context_len - num_scheduled, context_len)`.
      A row samples one token iff `context_len` equals the number of ids the slot holds when the row runs.
      A decode computes the position of the slot's last id, and has room for `num_scheduled - 1` drafts behind it: the worker's
      own proposals, fewer where it has fewer. It samples one token for every draft accepted, and one more.
    - `new_block_counts[R]`, `new_block_ids[sum]`: blocks appended to the slot's table (0 for a row entering in this batch).
    - `num_decodes`: how many leading rows are decodes.
    - `seen_step`: the last step whose output the scheduler had seen. Where drafts were rejected since, or not proposed, `context_lens` are
      upper bounds: the worker lowers a slot's by the positions that decodes of later steps had room for and gave no token.

    What moves KV without computing any; each step sees what those before it left, in the order `swap_outs`, `copies`, `swap_ins`,
    `zero_blocks`:

    - `swap_outs`, `swap_ins`: a slot is in at most one of them. A host block that a swap in frees is free from the next batch on.
    - `copies` int32 `[C, 2]`: (source, target) blocks of the pool, copied whole. No target is a source or comes twice, no source is
      the target of a swap in of this batch.
    - `zero_blocks` int32 `[Z]`: blocks cleared before their new owners, which come in by the same batch, write them.

    Targets and zeroed blocks are in nobody's table, except the new tables of this batch.

    `is_dummy_run`: compute R rows of this size and path that belong to nobody, so that a group keeps step; the rows read and write no
    slot and no block, and sample nothing. `slots` (zeros) has no meaning; drops and moves of KV may come with it, entries may not.
    """

    epoch: Epoch
    nonce: int  # the Attach this batch belongs to
    step_id: int  # per worker boot, runs on across epochs, > 0
    durable_step: int  # highest step whose effects are journalled; dropped slots up to it may be forgotten
    entries: tuple[SlotEntry, ...]
    drops: tuple[SlotDrop, ...]
    slots: np.ndarray
    num_scheduled_tokens: np.ndarray
    context_lens: np.ndarray
    new_block_counts: np.ndarray
    new_block_ids: np.ndarray
    num_decodes: int
    swap_outs: tuple[SlotSwap, ...] = ()
    swap_ins: tuple[SlotSwap, ...] = ()
    copies: np.ndarray = field(default_factory=lambda: NO_PAIRS)
    zero_blocks: np.ndarray = field(default_factory=lambda: NO_BLOCKS)
    is_dummy_run: bool = False
    seen_step: int = 0

    @property
    def moves_blocks(self) -> bool:
        """Whether it swaps, copies or zeroes any block."""
        return bool(self.swap_outs or self.swap_ins or len(self.copies) or len(self.zero_blocks))

    @property
    def num_rows(self) -> int:
        """R, the number of rows."""
        return len(self.slots)

    @property
    def total_tokens(self) -> int:
        """Positions computed by the whole batch."""
        return int(self.num_scheduled_tokens.sum(dtype=np.int64))


@dataclass(frozen=True, slots=True)
class RowError:
    """One row of an output that failed alone: its request ends with ERROR, its neighbours go on."""

    row: int
    message: str


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledBatchOutput:
    """What one batch sampled; rows in the order of that batch, so a row belongs to the (request, attempt) the batch named.

    `token_counts` int32 `[R]` (0 for an unfinished prefill chunk or a failed row, 1 for a finished one, `1 + accepted drafts` for a
    decode), `token_ids` int32 `[sum]`. `draft_counts` int32 `[R]`: drafts that each row verified; empty where no row had any. `logprobs`
    of the tokens of `token_ids`, and of the prompt tokens that the rows came past (again where a prompt is computed again); None where no
    row wants any. Those of a row with an error mean nothing.
    """

    epoch: Epoch
    nonce: int
    step_id: int
    token_counts: np.ndarray
    token_ids: np.ndarray
    row_errors: tuple[RowError, ...] = ()
    compute_us: int = 0
    draft_counts: np.ndarray = field(default_factory=lambda: NO_DRAFTS)
    logprobs: Logprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
