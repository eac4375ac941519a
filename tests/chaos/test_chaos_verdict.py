"""The verdict finds what it is there to find."""

from collections.abc import Sequence

import pytest

from tessera.client import Finish, FinishReason, Piece, Timings, Usage
from tests.chaos.asks import Ask
from tests.chaos.stream_log import StreamLog
from tests.chaos.verdict import Verdict, judge

ASK = Ask("x", max_tokens=4, temperature=0.0, seed=1)
END = Finish(FinishReason.LENGTH, None, None, Usage(1, 4, 0), Timings(0, 0, 0, 0), "")


def log_of(*pieces: tuple[int, list[int], str, int], finish: Finish | None = END) -> StreamLog:
    """A stream of pieces (token offset, ids, text, text offset); the last one ends it."""
    log = StreamLog(0, 0.0)
    for number, (offset, ids, text, text_offset) in enumerate(pieces):
        is_last = number == len(pieces) - 1
        log.take(Piece("id", text, text_offset, tuple(ids), offset, finish if is_last else None), float(number))
    return log


WHOLE = log_of((0, [1, 2], "ab", 0), (2, [3, 4], "cd", 2))


def verdict_of(log: StreamLog, rounding: str | None = None) -> Verdict:
    def same(ask: Ask, expected: Sequence[int], came: Sequence[int]) -> str:
        assert rounding is not None
        return rounding

    return judge([ASK], [WHOLE], [log], None if rounding is None else same)


def test_an_equal_stream_is_clean() -> None:
    verdict = verdict_of(log_of((0, [1], "a", 0), (1, [2, 3, 4], "bcd", 1)))
    assert verdict.is_clean
    assert (verdict.streams, verdict.tokens, verdict.near_ties, verdict.complaints) == (1, 4, 0, [])


@pytest.mark.parametrize(
    ("log", "counts"),
    {
        "a token twice": (log_of((0, [1, 2], "ab", 0), (1, [2, 3, 4], "cd", 2)), {"repeated": 1}),
        "a token jumped over": (log_of((0, [1, 2], "ab", 0), (3, [4], "cd", 2)), {"lost": 1}),
        "cut short": (log_of((0, [1, 2], "ab", 0)), {"lost": 2}),
        "another token": (log_of((0, [1, 2], "ab", 0), (2, [3, 5], "cd", 2)), {"wrong": 1}),
        "other text": (log_of((0, [1, 2], "ab", 0), (2, [3, 4], "ce", 2)), {"wrong": 1}),
        "text out of place": (log_of((0, [1, 2], "ab", 0), (2, [3, 4], "cd", 1)), {"wrong": 1}),
        "no end": (log_of((0, [1, 2], "ab", 0), (2, [3, 4], "cd", 2), finish=None), {"unfinished": 1}),
        "wrong usage": (
            log_of((0, [1, 2], "ab", 0), (2, [3, 4], "cd", 2), finish=Finish(END.reason, None, None, Usage(1, 3, 0), END.timings, "")),
            {"wrong": 1},
        ),
    }.values(),
)  # fmt: skip
def test_a_fault_is_counted(log: StreamLog, counts: dict[str, int]) -> None:
    verdict = verdict_of(log)
    assert not verdict.is_clean
    assert verdict.complaints
    assert all(getattr(verdict, name) >= count for name, count in counts.items()), verdict


def test_a_second_end_is_counted() -> None:
    log = log_of((0, [1, 2], "ab", 0), (2, [3, 4], "cd", 2))
    log.take(Piece("id", "", 4, (), 4, END), 9.0)
    assert verdict_of(log).unfinished == 1


def test_a_near_tie_is_counted_and_is_clean() -> None:
    log = log_of((0, [1, 2], "ab", 0), (2, [9, 9], "xy", 2))
    assert (verdict_of(log, rounding="").near_ties, verdict_of(log, rounding="").is_clean) == (1, True)
    assert verdict_of(log, rounding="0.5 apart").wrong == 1


def test_a_pause_is_the_longest_gap_after_the_fault() -> None:
    log = StreamLog(0, 0.0, piece_times_s=[0.0, 5.0, 6.0, 9.0, 9.5])
    assert log.longest_gap_s(4.0) == 5.0
    assert log.longest_gap_s(5.5) == 3.0
    assert log.longest_gap_s(9.6) is None
