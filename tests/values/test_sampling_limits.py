"""The limits table says what it refuses, digit by digit."""

import pytest

from tessera.values.sampling_limits import NUMBER_LIMITS


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("max_tokens", 2**20 + 1, "must be between 1 and 1048576, got 1048577"),
        ("max_tokens", 0, "must be between 1 and 1048576, got 0"),
        ("top_p", 1.0000001, "must be between 1e-06 and 1, got 1.0000001"),
        ("temperature", float("nan"), "must be a finite number, got nan"),
        ("top_k", 1.5, "must be a whole number, got 1.5"),
        ("seed", -1, "must be between 0 and 9223372036854775807, got -1"),
    ],
)
def test_a_refusal_shows_limit_and_value(field: str, value: float, said: str) -> None:
    assert NUMBER_LIMITS[field].problem(value) == said


@pytest.mark.parametrize("field", NUMBER_LIMITS)
def test_the_limits_themselves_are_accepted(field: str) -> None:
    limit = NUMBER_LIMITS[field]
    assert limit.problem(limit.minimum) is None
    assert limit.problem(limit.maximum) is None
