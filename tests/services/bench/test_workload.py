"""The requests of a workload: they follow from the seed, and fit the model."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bench.lengths import EvenLengths, NormalLengths
from services.bench.trace import TraceRequest
from services.bench.workload import (
    SKIPPED_MAX,
    Fitted,
    PlannedRequest,
    Shape,
    TooLong,
    WorkloadError,
    arriving,
    drawn_requests,
    traced_requests,
)

SHAPE = Shape(NormalLengths(100, 30), EvenLengths(1, 50), shared_prefix_tokens=16)

requests = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), max_size=30)


def planned(lengths: list[tuple[int, int]]) -> list[PlannedRequest]:
    return [PlannedRequest(index, *pair) for index, pair in enumerate(lengths)]


def test_a_seed_gives_the_same_requests() -> None:
    def first(seed: int) -> list[PlannedRequest]:
        return list(islice(drawn_requests(SHAPE, seed), 50))

    assert first(3) == first(3) != first(4)
    assert min(request.input_tokens for request in first(3)) > 16
    assert [request.index for request in first(3)] == list(range(50))


def test_a_trace_s_times_are_scaled() -> None:
    trace = [TraceRequest(0.0, 5, 6), TraceRequest(4.0, 7, 8, (3,))]
    assert list(traced_requests(trace, 0.5)) == [PlannedRequest(0, 5, 6, 0.0), PlannedRequest(1, 7, 8, 2.0, (3,))]


def test_arrivals_take_the_place_of_those_of_a_trace() -> None:
    trace = [TraceRequest(0.0, 5, 6), TraceRequest(4.0, 7, 8)]
    assert [item.arrival_s for item in arriving(traced_requests(trace, 1.0), iter([0.5, 0.75, 9.0]))] == [0.5, 0.75]
    assert [item.arrival_s for item in arriving(traced_requests(trace, 1.0), None)] == [None, None]


@given(requests, st.integers(2, 80))
def test_cut_requests_fit_and_none_is_left_out(lengths: list[tuple[int, int]], room: int) -> None:
    fitted = Fitted(iter(planned(lengths)), room, "cut")
    given_back = list(fitted)
    assert len(given_back) == len(lengths) and fitted.num_skipped == 0
    assert fitted.num_cut == sum(sum(pair) > room for pair in lengths)
    for request, (input_tokens, output_tokens) in zip(given_back, lengths, strict=True):
        assert request.input_tokens >= 1 and request.output_tokens >= 1
        assert request.input_tokens + request.output_tokens <= room
        if input_tokens + output_tokens <= room:
            assert (request.input_tokens, request.output_tokens) == (input_tokens, output_tokens)


@given(requests, st.integers(2, 80))
def test_left_out_are_those_that_do_not_fit(lengths: list[tuple[int, int]], room: int) -> None:
    fitting = [request for request in planned(lengths) if request.input_tokens + request.output_tokens <= room]
    fitted = Fitted(iter(planned(lengths)), room, "skip")
    if lengths and not fitting:
        with pytest.raises(WorkloadError, match=f"{room} tokens"):
            list(fitted)
        return
    assert list(fitted) == fitting
    assert (fitted.num_skipped, fitted.num_cut) == (len(lengths) - len(fitting), 0)


def test_an_endless_workload_that_never_fits_ends_with_what_to_change() -> None:
    endless = drawn_requests(Shape(EvenLengths(50, 50), EvenLengths(1, 1)), 0)
    with pytest.raises(WorkloadError, match=f"all of {SKIPPED_MAX} requests.*--too-long cut"):
        next(Fitted(endless, 40, "skip"))


@pytest.mark.parametrize("too_long", ["cut", "skip"])
def test_an_empty_workload_is_empty(too_long: TooLong) -> None:
    assert list(Fitted(iter([]), 10, too_long)) == []
