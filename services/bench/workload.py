"""What a benchmark asks: lengths and arrivals of its requests, made to fit the model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, repeat
from typing import Literal

from services.bench.draws import Purpose, generator
from services.bench.lengths import Lengths
from services.bench.trace import TraceRequest

SKIPPED_MAX = 1000
"""So many drawn requests in a row that the model has no room for: there will be none that it has."""

TooLong = Literal["cut", "skip"]


class WorkloadError(ValueError):
    """There is nothing to ask; says why and what to change."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """Request number `index`. `arrival_s` after the start; None: as soon as another one has ended."""

    index: int
    input_tokens: int
    output_tokens: int
    arrival_s: float | None = None
    block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Shape:
    """Requests of drawn lengths; every prompt begins with the same `shared_prefix_tokens`, which `input_tokens` does not count."""

    input_tokens: Lengths
    output_tokens: Lengths
    shared_prefix_tokens: int = 0


def drawn_requests(shape: Shape, seed: int) -> Iterator[PlannedRequest]:
    """Without end, without arrivals."""
    for index in count():
        rng = generator(seed, Purpose.LENGTHS, index)
        tokens = shape.shared_prefix_tokens + shape.input_tokens.draw(rng)
        yield PlannedRequest(index, tokens, shape.output_tokens.draw(rng))


def traced_requests(trace: Sequence[TraceRequest], time_scale: float) -> Iterator[PlannedRequest]:
    """Those of the trace, when they came there; a `time_scale` of 0.5 has them come twice as fast. Where a length is 0, 1 is asked for."""
    for index, item in enumerate(trace):
        input_tokens, output_tokens = max(1, item.input_tokens), max(1, item.output_tokens)
        yield PlannedRequest(index, input_tokens, output_tokens, item.arrival_s * time_scale, item.block_ids)


def arriving(requests: Iterator[PlannedRequest], arrivals_s: Iterator[float] | None) -> Iterator[PlannedRequest]:
    """The same requests at these times; None: in a closed loop, where each waits for an earlier one's end."""
    for request, arrival_s in zip(requests, arrivals_s if arrivals_s is not None else repeat(None), strict=False):
        yield replace(request, arrival_s=arrival_s)


class Fitted:
    """An iterator of those requests that the model has room for: `length_max` tokens of prompt and answer together.

    Of one that is longer, `cut` leaves the answer half of the room at most, and the prompt the rest; `skip` leaves it out. `num_cut` and
    `num_skipped` count these. Raises WorkloadError after SKIPPED_MAX left out in a row, or where none is left.
    """

    def __init__(self, requests: Iterator[PlannedRequest], length_max: int, too_long: TooLong) -> None:
        assert length_max >= 2, "a model has room for a prompt and an answer"
        self.num_cut = 0
        self.num_skipped = 0
        self._requests = requests
        self._length_max = length_max
        self._fit: Callable[[PlannedRequest], PlannedRequest | None] = self._cut if too_long == "cut" else self._skip
        self._num_given = 0

    def __iter__(self) -> Iterator[PlannedRequest]:
        return self

    def __next__(self) -> PlannedRequest:
        skipped_before = self.num_skipped
        for request in self._requests:
            fits = request.input_tokens + request.output_tokens <= self._length_max
            fitted = request if fits else self._fit(request)
            if fitted is not None:
                self._num_given += 1
                return fitted
            if self.num_skipped - skipped_before == SKIPPED_MAX:
                break
        if self.num_skipped > skipped_before and (self._num_given == 0 or self.num_skipped - skipped_before == SKIPPED_MAX):
            raise WorkloadError(
                f"all of {self.num_skipped - skipped_before} requests in a row have more than the {self._length_max} tokens that the model has "
                "room for: give shorter lengths, or --too-long cut"
            )
        raise StopIteration

    def _cut(self, request: PlannedRequest) -> PlannedRequest:
        self.num_cut += 1
        output_tokens = min(request.output_tokens, self._length_max // 2)
        input_tokens = min(request.input_tokens, self._length_max - output_tokens)
        return replace(request, input_tokens=input_tokens, output_tokens=output_tokens)

    def _skip(self, _request: PlannedRequest) -> None:
        self.num_skipped += 1
