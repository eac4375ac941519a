"""Who waits for a larger worker than there is at present, and for how long: what was promised is not cut short, but ends loudly one day."""

from dataclasses import dataclass

from services.scheduler.core.lifecycle import Lifecycle
from services.scheduler.core.sequence import Sequence
from tessera.values.finish import Finish, FinishReason

LOOK_EVERY_US = 1_000_000
"""A look costs a pass over the queue."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """Requests wait that none of the workers that are there can hold to their ends: the longest of them needs `blocks_needed` blocks, the
    largest pool has `blocks_there`."""

    blocks_needed: int
    blocks_there: int


class CapacityWatch:
    """Ends requests that have waited for `wait_ms` (0: nobody has to end) while workers were there, and none that can hold them.

    While no worker is there at all nobody's time runs: that is no lack of room, and a single worker may take long to come back.
    """

    def __init__(self, lifecycle: Lifecycle, wait_ms: int) -> None:
        self._lifecycle = lifecycle
        self._wait_ms = wait_ms
        self._since_us: dict[bytes, int] = {}
        self._next_look_us = 0
        self._found: Shortage | None = None

    def look(self, now_us: int) -> Shortage | None:
        """End who has waited too long. Returns what is short, as of the last look; looks once in `LOOK_EVERY_US`."""
        if now_us >= self._next_look_us:
            self._next_look_us = now_us + LOOK_EVERY_US
            self._found = self._look(now_us)
        return self._found

    def _look(self, now_us: int) -> Shortage | None:
        pools = [replica.description.geometry for replica in self._lifecycle.fleet if replica.takes_requests]
        if not pools:
            self._since_us.clear()
            return None
        largest = max(pools, key=lambda pool: pool.num_tokens)
        unheld = [sequence for sequence in self._lifecycle.waiting if sequence.tokens_max - 1 > largest.num_tokens]
        self._since_us = {item.request_id: self._since_us.get(item.request_id, now_us) for item in unheld}
        if not unheld:
            return None
        until_us = now_us - 1000 * self._wait_ms
        for sequence in unheld:
            if not self._wait_ms or self._since_us[sequence.request_id] > until_us:
                continue
            message = (
                f"the request was promised {sequence.tokens_max} tokens, prompt and output, for which it needs a KV pool of "
                f"{_blocks_needed(sequence, largest.block_size)} blocks; the largest worker that is there has {largest.num_blocks}, "
                f"and no larger one came within {self._wait_ms} ms"
            )
            self._lifecycle.end(sequence, Finish(FinishReason.ERROR, sequence.output_len, message=message), now_us)
        return Shortage(max(_blocks_needed(item, largest.block_size) for item in unheld), largest.num_blocks)


def _blocks_needed(sequence: Sequence, block_size: int) -> int:
    """Blocks that hold a sequence to its end; its last token needs no KV."""
    return -(-(sequence.tokens_max - 1) // block_size)
