"""Log-probabilities of one request's tokens, from the first on, as they are kept while it grows."""

from array import array

import numpy as np

from tessera.values.logprobs import Logprobs, no_logprobs


class KeptLogprobs:
    """Those of tokens 0 to n, in columns as in `Logprobs`. A token that nobody has told of has no entries: one that lies between others, or
    behind all of them, however many are read. Whose tokens these are cuts them where it cuts its tokens.
    """

    __slots__ = ("_ends", "_last", "_logprobs", "_ranks", "_token_ids")

    def __init__(self) -> None:
        self._ends = array("i")  # by token: where its entries end
        self._ranks = array("i")
        self._token_ids = array("i")
        self._logprobs = array("f")
        self._last = no_logprobs(0)  # of the tokens put last: a step reads what it has just put

    def __len__(self) -> int:
        """How many tokens it tells of; those behind have no entries."""
        return len(self._ends)

    @property
    def num_entries(self) -> int:
        """Of all tokens together."""
        return len(self._token_ids)

    def put(self, first: int, logprobs: Logprobs) -> None:
        """Those of the tokens from `first` on, in the place of what was there and behind it."""
        self.cut(first)
        missing = first - len(self)
        end = len(self._token_ids)
        self._ends.extend([end] * missing)
        self._ranks.extend([0] * missing)
        ends = end + np.cumsum(logprobs.counts, dtype=np.int64)
        self._ends.frombytes(ends.astype(np.intc).tobytes())
        self._ranks.frombytes(logprobs.ranks.astype(np.intc, copy=False).tobytes())
        self._token_ids.frombytes(logprobs.token_ids.astype(np.intc, copy=False).tobytes())
        self._logprobs.frombytes(logprobs.logprobs.astype(np.float32, copy=False).tobytes())
        self._last = logprobs

    def cut(self, num_tokens: int) -> None:
        """Forget the tokens from `num_tokens` on."""
        if num_tokens < len(self):
            end = self._end(num_tokens)
            del self._token_ids[end:], self._logprobs[end:]
            del self._ends[num_tokens:], self._ranks[num_tokens:]
            self._last = no_logprobs(0)

    def read(self, first: int, end: int) -> Logprobs:
        """Of the tokens `[first, end)`, not to be changed."""
        if end == len(self) and len(self._last) == end - first:
            return self._last
        stop = max(first, min(end, len(self)))
        begin = self._end(min(first, len(self)))
        if stop == first:
            return no_logprobs(end - first)
        ends = np.array(self._ends[first:stop], np.int32)
        counts, ranks = np.zeros((2, end - first), np.int32)
        counts[: stop - first] = np.diff(ends, prepend=np.int32(begin))
        ranks[: stop - first] = self._ranks[first:stop]
        entries = slice(begin, int(ends[-1]))
        return Logprobs(
            counts, np.array(self._token_ids[entries], np.int32), np.array(self._logprobs[entries], np.float32), ranks
        )

    def copy(self) -> "KeptLogprobs":
        """These as they are now."""
        other = KeptLogprobs()
        other._ends, other._ranks = self._ends[:], self._ranks[:]
        other._token_ids, other._logprobs = self._token_ids[:], self._logprobs[:]
        return other

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KeptLogprobs):
            return NotImplemented
        size = max(len(self), len(other))
        return self.read(0, size) == other.read(0, size)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def _end(self, num_tokens: int) -> int:
        """Entries of the first `num_tokens` tokens."""
        return self._ends[num_tokens - 1] if num_tokens else 0
