"""What is known, computed and under way of one sequence; the only place that counts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

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
    """

    token_ids: Tokens
    computed_len: int = 0
    positions_in_flight: int = 0
    drafts_in_flight: int = 0
    prompt_len: int = field(init=False)  # the tokens', which never changes

    def __post_init__(self) -> None:
        self.prompt_len = len(self.token_ids.prompt)

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
        return self.computed_len + self.positions_in_flight

    @property
    def num_remaining(self) -> int:
        """Positions up to and including the one that samples the next token; 1 is a decode, >= 1 always."""
        return max(1, self.num_tokens - self.scheduled_len)

    @property
    def num_placeholders(self) -> int:
        """Tokens that what is in flight samples, if every draft is accepted."""
        return max(0, self.scheduled_len + 1 - self.num_tokens)

    def schedule(self, count: int) -> bool:
        """Put the next `count` positions of a prefill in flight; True when the row samples a token."""
        assert 1 <= count <= self.num_remaining, f"{count} positions of {self.num_remaining}"
        samples = count == self.num_remaining
        self.positions_in_flight += count
        return samples

    def schedule_decode(self, count: int) -> None:
        """Put the position of the next token, the only one that remains, in flight, and `count` - 1 behind it for drafts."""
        self.positions_in_flight += count
        if count > 1:
            self.drafts_in_flight += count - 1

    def commit(self, count: int, token_ids: Sequence[int], num_drafts: int = 0) -> None:
        """The oldest row in flight, of `count` positions, is computed and has sampled `token_ids`: none or one, and with `num_drafts` of
        the positions for drafts one, and one more for each accepted. The others' positions are not computed."""
        assert count <= self.positions_in_flight, f"{count} positions came back, {self.positions_in_flight} were in flight"
        self.positions_in_flight -= count
        self.computed_len += count
        if num_drafts:
            num_rejected = num_drafts + 1 - len(token_ids)
            assert 0 <= num_rejected <= num_drafts <= self.drafts_in_flight, f"{len(token_ids)} tokens of {num_drafts} drafts"
            self.drafts_in_flight -= num_drafts
            self.computed_len -= num_rejected
        self.token_ids.output.extend(token_ids)
        assert self.computed_len < self.num_tokens, "a position was computed beyond the tokens"

    def restart(self, computed_len: int) -> None:
        """Nothing is in flight any more, and only `[0, computed_len)` is computed."""
        assert computed_len < self.num_tokens, f"{computed_len} positions computed of {self.num_tokens} tokens"
        self.computed_len = computed_len
        self.positions_in_flight = self.drafts_in_flight = 0

    def cut(self, output_len: int) -> None:
        """Forget output tokens from `output_len` on, and the KV of the last one left: the request has ended there, as if sampled last."""
        del self.token_ids.output[output_len:]
        self.computed_len = min(self.computed_len, self.num_tokens - 1)
