"""What a worker knows of the sequences it holds: one slot each, kept as columns so that a decode step is a few array operations."""

from collections import deque
from collections.abc import Iterator

import numpy as np

from model_worker.speculation.unused_room import UnusedRoom
from tessera.values.batch import SlotDrop, SlotEntry
from tessera.values.model import KVGeometry
from tessera.values.report import DroppedSlot, SlotReport

DROPPED_SLOTS_MAX = 4096
"""Dropped slots kept for recovery while the journal lags; beyond it the oldest are forgotten, and their KV can only be computed again."""


class SlotTable:
    """Live and dropped slots. Methods assume a checked batch (`model_worker.batch_check`).

    Columns are indexed by slot, int64 unless said: `held` (bool), `swapped` (bool: the table names blocks of the host pool), `attempts`,
    `entry_counts` (sequences that have entered the slot so far), `prompt_lens`, `num_ids` (token ids known: prompt and outputs),
    `computed_lens` (positions with valid KV), `table_lens` (blocks owned), `token_ids` int32 `[num_slots, max_model_len + 1]`,
    `block_tables` int32 `[num_slots, blocks_max]`. By block: `users` int32 (tables that name a block of the pool), `host_users` (the same
    of the host pool). `failures` says why a slot has ended for good: it takes part in no step until it is dropped. `unused_room`: see
    there. Readers do not write to the columns.
    """

    def __init__(self, num_slots: int, max_model_len: int, geometry: KVGeometry) -> None:
        blocks_max = -(-(max_model_len + 1) // geometry.block_size)
        self.num_slots = num_slots
        self.held = np.zeros(num_slots, dtype=np.bool_)
        self.swapped = np.zeros(num_slots, dtype=np.bool_)
        self.attempts = np.zeros(num_slots, dtype=np.int64)
        self.entry_counts = np.zeros(num_slots, dtype=np.int64)
        self.prompt_lens = np.zeros(num_slots, dtype=np.int64)
        self.num_ids = np.zeros(num_slots, dtype=np.int64)
        self.computed_lens = np.zeros(num_slots, dtype=np.int64)
        self.table_lens = np.zeros(num_slots, dtype=np.int64)
        # Reserved, not resident, until written.
        self.token_ids = np.zeros((num_slots, max_model_len + 1), dtype=np.int32)
        self.block_tables = np.zeros((num_slots, blocks_max), dtype=np.int32)
        self.users = np.zeros(geometry.num_blocks, dtype=np.int32)
        self.host_users = np.zeros(geometry.num_host_blocks, dtype=np.int32)
        self.failures: dict[int, str] = {}
        self.unused_room = UnusedRoom(num_slots)
        self._request_ids: dict[int, bytes] = {}
        self._cache_salts: dict[int, str] = {}
        self._dropped: deque[DroppedSlot] = deque(maxlen=DROPPED_SLOTS_MAX)

    def holds(self, slot: int, request_id: bytes, attempt: int) -> bool:
        """Whether `slot` is held by this attempt of this request."""
        return self._request_ids.get(slot) == request_id and int(self.attempts[slot]) == attempt

    def table(self, slot: int) -> np.ndarray:
        """The blocks of a slot, a view int32 `[table_len]`."""
        return self.block_tables[slot, : self.table_lens[slot]]

    def forget_dropped(self, durable_step: int) -> None:
        """Let go of the slots dropped in steps up to `durable_step`."""
        while self._dropped and self._dropped[0].drop_step <= durable_step:
            self._dropped.popleft()

    def drop(self, drop: SlotDrop, step_id: int) -> None:
        """Give up a slot in `step_id`; nothing happens unless it is still held by the attempt that the drop names."""
        if not self.holds(drop.slot, drop.request_id, drop.attempt):
            return
        self._use(drop.slot, -1)
        if self.swapped[drop.slot]:  # its KV is gone with the host blocks, which nobody watches
            self.table_lens[drop.slot] = self.computed_lens[drop.slot] = 0
        report = self._report(drop.slot)
        self._dropped.append(
            DroppedSlot(
                request_id=report.request_id,
                attempt=report.attempt,
                prompt_len=report.prompt_len,
                token_ids=report.token_ids,
                block_table=report.block_table,
                computed_len=report.computed_len,
                finish=drop.finish,
                drop_step=step_id,
                cache_salt=report.cache_salt,
            )
        )
        self.held[drop.slot] = self.swapped[drop.slot] = False
        del self._request_ids[drop.slot], self._cache_salts[drop.slot]
        self.failures.pop(drop.slot, None)
        self.unused_room.forget_slot(drop.slot)

    def enter(self, entry: SlotEntry) -> None:
        """Put a sequence into a free slot."""
        slot = entry.slot
        assert not self.held[slot]
        self.held[slot] = True
        self.entry_counts[slot] += 1
        self.attempts[slot] = entry.attempt
        self.prompt_lens[slot] = entry.prompt_len
        self.num_ids[slot] = len(entry.token_ids)
        self.computed_lens[slot] = entry.num_cached_tokens
        self.table_lens[slot] = len(entry.block_table)
        self.token_ids[slot, : len(entry.token_ids)] = entry.token_ids
        self.block_tables[slot, : len(entry.block_table)] = entry.block_table
        self._use(slot, 1)
        self._request_ids[slot] = entry.request_id
        self._cache_salts[slot] = entry.cache_salt

    def swap(self, slot: int, block_table: np.ndarray, *, is_out: bool) -> None:
        """Give a slot the table of its blocks in the other pool, int32 `[N]`."""
        self._use(slot, -1)
        self.swapped[slot] = is_out
        self.table_lens[slot] = len(block_table)
        self.block_tables[slot, : len(block_table)] = block_table
        self._use(slot, 1)

    def append_blocks(self, slots: np.ndarray, counts: np.ndarray, block_ids: np.ndarray) -> None:
        """Append `counts[i]` of `block_ids`, in order, to the table of `slots[i]`; a slot comes at most once."""
        if not len(block_ids):
            return
        rows = np.repeat(slots, counts)
        offsets = np.arange(len(block_ids)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.block_tables[rows, self.table_lens[rows] + offsets] = block_ids
        self.table_lens[slots] += counts
        self.users[block_ids] += 1

    def append_tokens(self, slots: np.ndarray, counts: np.ndarray, token_ids: np.ndarray) -> None:
        """Append `counts[i]` of `token_ids`, in order, to the ids of `slots[i]`; a slot comes at most once."""
        self._write_ids(slots, counts, token_ids)
        self.num_ids[slots] += counts

    def place_drafts(self, slots: np.ndarray, counts: np.ndarray, token_ids: np.ndarray) -> None:
        """Put `counts[i]` of `token_ids` where the next ids of `slots[i]` will be, for one step to read: they are no ids, and nothing that
        looks at `num_ids` sees them."""
        self._write_ids(slots, counts, token_ids)

    def _write_ids(self, slots: np.ndarray, counts: np.ndarray, token_ids: np.ndarray) -> None:
        """Write ids behind those known."""
        rows = np.repeat(slots, counts)
        offsets = np.arange(len(token_ids)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.token_ids[rows, self.num_ids[rows] + offsets] = token_ids

    def reports(self) -> tuple[SlotReport, ...]:
        """All live slots, by number; arrays are copies."""
        return tuple(self._report(slot) for slot in sorted(self._request_ids))

    def dropped(self) -> Iterator[DroppedSlot]:
        """The dropped slots not yet forgotten, oldest first."""
        return iter(self._dropped)

    def _use(self, slot: int, change: int) -> None:
        """Count the blocks of a slot's table as used once more, or once less."""
        np.add.at(self.host_users if self.swapped[slot] else self.users, self.table(slot), change)

    def _report(self, slot: int) -> SlotReport:
        return SlotReport(
            slot=slot,
            request_id=self._request_ids[slot],
            attempt=int(self.attempts[slot]),
            prompt_len=int(self.prompt_lens[slot]),
            token_ids=self.token_ids[slot, : self.num_ids[slot]].copy(),
            block_table=self.table(slot).copy(),
            computed_len=int(self.computed_lens[slot]),
            is_swapped=bool(self.swapped[slot]),
            cache_salt=self._cache_salts[slot],
        )
