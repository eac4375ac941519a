"""What a worker physically holds: the answer to an Attach, one of the sources that recovery joins."""

from dataclasses import dataclass

import numpy as np

from tessera.values.finish import Finish
from tessera.values.model import WorkerDescription


@dataclass(frozen=True, slots=True, eq=False)
class SlotReport:
    """A live slot. KV of positions `[0, computed_len)` is valid for `token_ids` int32 (prompt, then outputs). `block_table` names blocks of
    the pool, or of the host pool where the slot `is_swapped`. `cache_salt` is the request's: who may share this KV."""

    slot: int
    request_id: bytes
    attempt: int
    prompt_len: int
    token_ids: np.ndarray
    block_table: np.ndarray
    computed_len: int
    is_swapped: bool = False
    cache_salt: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class DroppedSlot:
    """A slot given up in step `drop_step`, kept until `durable_step` passes it. Its blocks may have been overwritten since:
    a block still holds this slot's KV iff its `last_write_step` is below `drop_step`. One that was swapped out has no KV any more:
    its table is empty and its computed length 0."""

    request_id: bytes
    attempt: int
    prompt_len: int
    token_ids: np.ndarray
    block_table: np.ndarray
    computed_len: int
    finish: Finish | None
    drop_step: int
    cache_salt: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class WorkerReport:
    """Full state of one worker at one moment, after the started batch ended and the other was discarded.

    `last_write_step` int64 `[num_blocks]`: the step that last wrote each block, be it computed, copied, swapped in or zeroed; 0 for
    never. `last_step` is the highest step executed.
    """

    nonce: int
    description: WorkerDescription
    last_step: int
    slots: tuple[SlotReport, ...]
    dropped: tuple[DroppedSlot, ...]
    last_write_step: np.ndarray
