"""Stop strings against a naive oracle, and the published cases of leaking and of holding back too much."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.stop_strings import StopMatch, StopMatcher, StopStrings


def run(stops: tuple[str, ...], pieces: list[str]) -> tuple[list[str], str | None, int]:
    """Texts shown after each piece (the flush last), the matched stop string, and how many pieces were read."""
    matcher = StopMatcher(StopStrings(stops))
    shown = []
    for count, piece in enumerate(pieces, 1):
        result = matcher.feed(piece)
        if isinstance(result, StopMatch):
            return [*shown, result.text], result.stop_string, count
        shown.append(result)
    return [*shown, matcher.flush()], None, len(pieces)


def naive(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, str | None, int]:
    """The rule, word by word."""
    text = ""
    for count, piece in enumerate(pieces, 1):
        text += piece
        matches = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
        if matches:
            start, _, stop = min(matches)
            return text[:start], stop, count
    return text, None, len(pieces)


def naive_held(stops: tuple[str, ...], text: str) -> str:
    """The longest suffix that is a proper prefix of some stop string."""
    longest = max((k for stop in stops for k in range(len(stop)) if text.endswith(stop[:k])), default=0)
    return text[len(text) - longest :]


@settings(max_examples=600, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=5).map(tuple),
    st.lists(st.text("abc", max_size=4), max_size=16),
)
def test_equals_the_naive_rule_and_holds_no_more_than_needed(stops: tuple[str, ...], pieces: list[str]) -> None:
    shown, stop, count = run(stops, pieces)
    assert ("".join(shown), stop, count) == naive(stops, pieces)
    for i in range(len(shown) - 1):
        text = "".join(pieces[: i + 1])
        assert "".join(shown[: i + 1]) + naive_held(stops, text) == text


def test_a_stop_string_over_several_tokens_shows_nothing_of_itself() -> None:
    assert run(("DEFGHIJ",), ["DEF", "G", "HI", "J"]) == (["", "", "", ""], "DEFGHIJ", 4)
    assert run(("\nUser:",), ["Hi", "\nUser", ":"]) == (["Hi", "", ""], "\nUser:", 3)


def test_what_was_held_comes_out_when_the_output_ends() -> None:
    assert run(("DEFGHIJ",), ["DEF", "G"]) == (["", "", "DEFG"], None, 2)


def test_text_that_begins_no_stop_string_is_shown_at_once() -> None:
    assert run(("<|sep|>",), list("abcdefgh")) == ([*"abcdefgh", ""], None, 8)
    assert run(("<|sep|>",), ["a<", "|s", "o"]) == (["a", "", "<|so", ""], None, 3)


@pytest.mark.parametrize(
    ("stops", "pieces", "stop", "text"),
    [
        (("b", "abc"), ["abc"], "abc", ""),  # both complete in one token: the earlier start
        (("b", "abc"), ["a", "b", "c"], "b", "a"),  # "b" completes first
        (("abc", "ab"), ["xabc"], "ab", "x"),  # same start: the shorter
        (("aab",), ["aa", "ab"], "aab", "a"),  # the held head overlaps itself
        (("b", "bb"), ["abb"], "b", "a"),
        (("é😀",), ["x é", "😀 y"], "é😀", "x "),
        (("^]-\\[",), ["a^]", "-\\[b"], "^]-\\[", "a"),  # nothing is read as a pattern
    ],
)
def test_which_stop_string_wins(stops: tuple[str, ...], pieces: list[str], stop: str, text: str) -> None:
    shown, won, _ = run(stops, pieces)
    assert ("".join(shown), won) == (text, stop)


def test_without_stop_strings_everything_passes() -> None:
    assert run((), ["a", "", "b"]) == (["a", "", "b", ""], None, 3)


def test_time_is_linear_for_the_worst_of_strings() -> None:
    """Sixteen stop strings of 1 KiB that all but match: a scan that went back would need a thousand times as long."""
    stops = tuple("a" * (1023 - i) + "b" for i in range(16))
    began = time.process_time()
    shown, stop, _ = run(stops, ["a"] * 100_000)
    assert stop is None and "".join(shown) == "a" * 100_000
    assert time.process_time() - began < 5.0
