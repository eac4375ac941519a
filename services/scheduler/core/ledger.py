"""What is known, computed and under way of one sequence; the only place that counts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.scheduler.core.lanes import Lanes
from services.scheduler.core.tokens import Tokens


@dataclass(slots=True)
class Ledger:
    """Four facts, from which all else is derived:

    - `token_ids`: the committed tokens, prompt and output.
    - `computed_len`: positions `[0, computed_len)` hold valid KV, as far as outputs have told.
    - `positions_in_flight`: positions of batches whose outputs have not come.
    - `drafts_in_flight`: how many of these are for drafts, which come to nothing where the worker has none or rejects them.

    A row that reaches the end of the tokens samples the next one, and one more for every draft accepted. Until its output comes these tokens
    are placeholders: they have positions, but no ids, and count to no limit and no hash. While drafts are in flight, positions are upper
    bounds: each that comes to nothing gives its own back. `computed_len < len(token_ids)` always: the last token's KV is only written by
    the row that samples after it; of a sequence that decodes exactly that one is missing.

    `told_len` and `told_blocks` are how many output tokens, and blocks of its table, the journal knows of.

    While the sequence only decodes the counts are in a lane (`Lanes`). Whatever else happens to it makes it leave that first.
    """

    token_ids: Tokens
    drafts_in_flight: int = 0
    prompt_len: int = field(init=False)  # the tokens', which never changes
    lanes: Lanes | None = field(init=False, default=None)
    _slot: int = field(init=False, default=-1)  # in `lanes`
    _computed_len: int = field(init=False, default=0)  # in no lane, as the next one
    _positions_in_flight: int = field(init=False, default=0)
    _told_len: int = field(init=False, default=0)
    _told_blocks: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.token_ids.prompt)

    @property
    def computed_len(self) -> int:
        """See above."""
        return self._computed_len if self.lanes is None else self.num_tokens - 1

    @property
    def positions_in_flight(self) -> int:
        """See above."""
        return self._positions_in_flight if self.lanes is None else self.scheduled_len - self.computed_len

    @property
    def num_tokens(self) -> int:
        """Committed tokens, prompt included."""
        return self.prompt_len + len(self.token_ids.output)

    @property
    def output_len(self) -> int:
        """Committed output tokens."""
        return len(self.token_ids.output)

    @property
    def scheduled_len(self) -> int:
        """KV length once everything in flight is computed and every draft accepted; the next row starts here, or before."""
        if self.lanes is None:
            return self._computed_len + self._positions_in_flight
        return int(self.lanes.scheduled[self._slot])

    @property
    def num_remaining(self) -> int:
        """Positions up to and including the one that samples the next token; 1 is a decode, >= 1 always."""
        return max(1, self.num_tokens - self.scheduled_len)

    @property
    def num_placeholders(self) -> int:
        """Tokens that what is in flight samples, if every draft is accepted."""
        return max(0, self.scheduled_len + 1 - self.num_tokens)

    @property
    def fits_lane(self) -> bool:
        """Whether the counts are those of a sequence that only decodes, one position a row."""
        return self._computed_len + 1 == self.num_tokens and not self.drafts_in_flight

    @property
    def told_len(self) -> int:
        """See above."""
        return self._told_len if self.lanes is None else int(self.lanes.told[self._slot])

    @property
    def told_blocks(self) -> int:
        """See above."""
        return self._told_blocks if self.lanes is None else int(self.lanes.told_covered[self._slot]) // self.lanes.block_size

    def tell(self, output_len: int, num_blocks: int) -> None:
        """The journal knows of so many output tokens, and blocks of the table."""
        if self.lanes is None:
            self._told_len, self._told_blocks = output_len, num_blocks
        else:
            self.lanes.told[self._slot], self.lanes.told_covered[self._slot] = output_len, num_blocks * self.lanes.block_size

    def forget_table(self) -> None:
        """The journal knows of no block of the table: that is a new one."""
        self.leave_lane()
        self._told_blocks = 0

    def take_lane(self, lanes: Lanes, slot: int, cap: int, ending_ids: Iterable[int]) -> None:
        """Count in the lane of this slot from now on; see `Lanes.take`."""
        assert self.lanes is None and self.fits_lane, "the counts fit no lane"
        lanes.take(slot, self.num_tokens, self.scheduled_len, self.prompt_len, cap, ending_ids)
        lanes.told[slot], lanes.told_covered[slot] = self._told_len, self._told_blocks * lanes.block_size
        self.lanes, self._slot = lanes, slot

    def leave_lane(self) -> None:
        """Count here from now on, if not already."""
        if self.lanes is not None:
            self._told_len, self._told_blocks = self.told_len, self.told_blocks
            scheduled = self.lanes.leave(self._slot)
            self.lanes = None
            self._computed_len = self.num_tokens - 1
            self._positions_in_flight = scheduled - self._computed_len

    def schedule(self, count: int) -> bool:
        """Put the next `count` positions of a prefill in flight; True when the row samples a token."""
        assert 1 <= count <= self.num_remaining, f"{count} positions of {self.num_remaining}"
        self.leave_lane()
        samples = count == self.num_remaining
        self._positions_in_flight += count
        return samples

    def schedule_decode(self, count: int) -> None:
        """Put the position of the next token, the only one that remains, in flight, and `count` - 1 behind it for drafts."""
        if self.lanes is not None and count == 1:
            self.lanes.scheduled[self._slot] += 1
            return
        self.leave_lane()
        self._positions_in_flight += count
        if count > 1:
            self.drafts_in_flight += count - 1

    def commit(self, count: int, token_ids: Sequence[int], num_drafts: int = 0) -> None:
        """The oldest row in flight, of `count` positions, is computed and has sampled `token_ids`: none or one, and with `num_drafts` of
        the positions for drafts one, and one more for each accepted. The others' positions are not computed."""
        assert count <= self.positions_in_flight, f"{count} positions came back, {self.positions_in_flight} were in flight"
        if self.lanes is not None and count == len(token_ids) == 1:
            self.lanes.append_one(self._slot)
            self.token_ids.output.extend(token_ids)
            return
        self.leave_lane()
        self._positions_in_flight -= count
        self._computed_len += count
        if num_drafts:
            num_rejected = num_drafts + 1 - len(token_ids)
            assert 0 <= num_rejected <= num_drafts <= self.drafts_in_flight, f"{len(token_ids)} tokens of {num_drafts} drafts"
            self.drafts_in_flight -= num_drafts
            self._computed_len -= num_rejected
        self.token_ids.output.extend(token_ids)
        assert self.computed_len < self.num_tokens, "a position was computed beyond the tokens"

    def restart(self, computed_len: int) -> None:
        """Nothing is in flight any more, and only `[0, computed_len)` is computed."""
        assert computed_len < self.num_tokens, f"{computed_len} positions computed of {self.num_tokens} tokens"
        self.leave_lane()
        self._computed_len = computed_len
        self._positions_in_flight = self.drafts_in_flight = 0

    def cut(self, output_len: int) -> None:
        """Forget output tokens from `output_len` on, and the KV of the last one left: the request has ended there, as if sampled last."""
        self.leave_lane()
        del self.token_ids.output[output_len:]
        self._computed_len = min(self._computed_len, self.num_tokens - 1)
