"""One step of work as columns: what the scheduler sends a worker, and what comes back.

Order inside a batch: drops, then entries, then new blocks, then compute. A worker owns the token ids of a slot: it
receives all of them on entry and appends what it samples, so rows carry positions, not ids. That is what
lets a second batch leave before the first one's output is known.
"""

from dataclasses import dataclass

import numpy as np

from tessera.values.finish import Finish
from tessera.values.identity import Epoch
from tessera.values.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class SlotEntry:
    """A sequence entering a slot (new, resumed or moved here); every later row names only the slot.

    `token_ids` int32 `[prompt_len + outputs so far]`; `block_table` int32, covers at least the row of this batch.
    The first `num_cached_tokens` positions hold valid KV already (prefix hits) and are not computed.
    `attempt` grows at every entry of the same request into a batch.
    """

    slot: int
    request_id: bytes
    attempt: int
    prompt_len: int
    token_ids: np.ndarray
    block_table: np.ndarray
    num_cached_tokens: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class SlotDrop:
    """A slot given up; a no-op unless the slot still holds this (request, attempt). `finish` None means preempted or moved."""

    slot: int
    request_id: bytes
    attempt: int
    finish: Finish | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledBatch:
    """ATOM's `ScheduledBatch` as columns. All arrays are int32 on the host; R rows, decodes first, then prefill chunks.

    - `slots[R]`: which slot each row computes.
    - `num_scheduled_tokens[R]`: positions computed this step, >= 1.
    - `context_lens[R]`: KV length after the step; the row computes `[context_len - num_scheduled, context_len)`.
      A row samples one token iff `context_len` equals the number of ids the slot holds when the row runs.
    - `new_block_counts[R]`, `new_block_ids[sum]`: blocks appended to the slot's table (0 for a row entering in this batch).
    - `num_decodes`: how many leading rows are decodes.
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

    `token_counts` int32 `[R]` (0 for an unfinished prefill chunk or a failed row, else 1), `token_ids` int32 `[sum]`.
    """

    epoch: Epoch
    nonce: int
    step_id: int
    token_counts: np.ndarray
    token_ids: np.ndarray
    row_errors: tuple[RowError, ...] = ()
    compute_us: int = 0
