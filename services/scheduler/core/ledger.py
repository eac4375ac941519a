"""What is known, computed and under way of one sequence; the only place that counts."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Ledger:
    """Three facts, from which all else is derived:

    - `token_ids`: the committed tokens, prompt (the first `prompt_len`) and output.
    - `computed_len`: positions `[0, computed_len)` hold valid KV, as far as outputs have told.
    - `positions_in_flight`: positions of batches whose outputs have not come.

    A row that reaches the end of the tokens samples the next one. Until its output comes that token is a placeholder: it has a position,
    but no id, and counts to no limit and no hash. `computed_len < len(token_ids)` always: the last token's KV is only
    written by the row that samples after it.
    """

    prompt_len: int
    token_ids: list[int]
    computed_len: int = 0
    positions_in_flight: int = 0

    @property
    def num_tokens(self) -> int:
        """Committed tokens, prompt included."""
        return len(self.token_ids)

    @property
    def output_len(self) -> int:
        """Committed output tokens."""
        return len(self.token_ids) - self.prompt_len

    @property
    def scheduled_len(self) -> int:
        """KV length once everything in flight is computed; the next row starts here."""
        return self.computed_len + self.positions_in_flight

    @property
    def num_remaining(self) -> int:
        """Positions up to and including the one that samples the next token; 1 is a decode, >= 1 always."""
        return max(1, len(self.token_ids) - self.scheduled_len)

    def schedule(self, count: int) -> bool:
        """Put the next `count` positions in flight; True when the row samples a token."""
        assert 1 <= count <= self.num_remaining, f"{count} positions of {self.num_remaining}"
        samples = count == self.num_remaining
        self.positions_in_flight += count
        return samples

    def commit(self, count: int, token_ids: Sequence[int]) -> None:
        """The oldest row in flight, of `count` positions, is computed and has sampled `token_ids` (none or one)."""
        assert count <= self.positions_in_flight, f"{count} positions came back, {self.positions_in_flight} were in flight"
        self.positions_in_flight -= count
        self.computed_len += count
        self.token_ids.extend(token_ids)
        assert self.computed_len < len(self.token_ids), "a position was computed beyond the tokens"

    def restart(self, computed_len: int) -> None:
        """Nothing is in flight any more, and only `[0, computed_len)` is computed."""
        assert computed_len < len(self.token_ids), f"{computed_len} positions computed of {len(self.token_ids)} tokens"
        self.computed_len = computed_len
        self.positions_in_flight = 0

    def cut(self, output_len: int) -> None:
        """Forget output tokens from `output_len` on; the request has ended there."""
        del self.token_ids[self.prompt_len + output_len :]
