"""What one frame tells of many requests, as columns: an object for each would cost more than everything else of a step."""

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np

from tessera.values.logprobs import Logprobs, joined_logprobs, no_logprobs
from tessera.values.request import RequestOutput


class OutputColumns(Sequence[RequestOutput]):
    """Outputs in order. Immutable by agreement; reads as a sequence of `RequestOutput`, and equals any sequence of the same ones.

    - `request_ids[R]`; `subscribers` uint64 `[R]`; `token_offsets`, `token_counts` integers `[R]`; `token_ids` integers `[sum of the counts]`.
    - `logprobs` of all these tokens; None where none have any.
    - `rare`: by row, the outputs that carry more: an end, or the log-probabilities of a prompt.
    """

    __slots__ = (
        "logprobs",
        "rare",
        "request_ids",
        "subscribers",
        "token_counts",
        "token_ids",
        "token_offsets",
    )

    def __init__(
        self,
        request_ids: tuple[bytes, ...],
        subscribers: np.ndarray,
        token_offsets: np.ndarray,
        token_counts: np.ndarray,
        token_ids: np.ndarray,
        rare: dict[int, RequestOutput],
        logprobs: Logprobs | None = None,
    ) -> None:
        self.request_ids = request_ids
        self.subscribers = subscribers
        self.token_offsets = token_offsets
        self.token_counts = token_counts
        self.token_ids = token_ids
        self.rare = rare
        self.logprobs = logprobs

    @classmethod
    def of(cls, outputs: Iterable[RequestOutput]) -> "OutputColumns":
        """These outputs."""
        listed = list(outputs)
        return cls(
            tuple(output.request_id for output in listed),
            np.array([output.subscriber for output in listed], np.uint64),
            np.array([output.token_offset for output in listed], np.int64),
            np.array([len(output.token_ids) for output in listed], np.int64),
            np.array([token_id for output in listed for token_id in output.token_ids], np.int64),
            {
                row: output
                for row, output in enumerate(listed)
                if output.finish is not None or output.prompt_logprobs is not None
            },
            _joined([(output.logprobs, len(output.token_ids)) for output in listed]),
        )

    def followed_by(self, outputs: Sequence[RequestOutput]) -> "OutputColumns":
        """These, then others."""
        if not outputs:
            return self
        other, count = OutputColumns.of(outputs), len(self)
        return OutputColumns(
            self.request_ids + other.request_ids,
            np.concatenate((self.subscribers, other.subscribers)),
            np.concatenate((self.token_offsets, other.token_offsets)),
            np.concatenate((self.token_counts, other.token_counts)),
            np.concatenate((self.token_ids, other.token_ids)),
            self.rare | {count + row: output for row, output in other.rare.items()},
            _joined([(one.logprobs, len(one.token_ids)) for one in (self, other)]),
        )

    def __len__(self) -> int:
        return len(self.request_ids)

    @overload
    def __getitem__(self, index: int) -> RequestOutput: ...

    @overload
    def __getitem__(self, index: slice) -> list[RequestOutput]: ...

    def __getitem__(self, index: int | slice) -> RequestOutput | list[RequestOutput]:
        return list(self)[index]

    def __iter__(self) -> Iterator[RequestOutput]:
        columns = zip(
            self.request_ids, self.subscribers.tolist(), self.token_offsets.tolist(), self.token_counts.tolist(), strict=True
        )
        token_ids, end = self.token_ids.tolist(), 0
        parts = self.logprobs.split(self.token_counts.tolist()) if self.logprobs is not None else None
        for row, (request_id, subscriber, token_offset, token_count) in enumerate(columns):
            begin, end = end, end + token_count
            logprobs = parts[row] if parts is not None and parts[row].counts.any() else None
            tokens = tuple(token_ids[begin:end])
            yield self.rare.get(row) or RequestOutput(request_id, subscriber, token_offset, tokens, logprobs=logprobs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    def __repr__(self) -> str:
        return f"OutputColumns.of({list(self)!r})"


def _joined(parts: list[tuple[Logprobs | None, int]]) -> Logprobs | None:
    """Those of the tokens of each, so many, one after the other; None where none have any."""
    if all(logprobs is None for logprobs, _ in parts):
        return None
    return joined_logprobs([no_logprobs(count) if logprobs is None else logprobs for logprobs, count in parts])


NO_OUTPUTS = OutputColumns.of(())
