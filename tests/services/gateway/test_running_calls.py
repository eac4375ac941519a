"""How many calls there may be: of all, and of one principal."""

from contextlib import ExitStack

import pytest

from services.gateway.running_calls import RESUMES_FACTOR, RunningCalls
from services.rpc.errors import Overloaded


def test_one_principal_has_its_share_and_leaves_the_rest_to_others():
    calls = RunningCalls(10, (), count_max_per_principal=2)
    with ExitStack() as open_calls:
        for principal in ("a", "a", "b"):
            open_calls.enter_context(calls.one(is_resume=False, principal=principal))
        with pytest.raises(Overloaded) as refused, calls.one(is_resume=False, principal="a"):
            pass
        assert refused.value.reason == "PRINCIPAL_LIMIT" and refused.value.retry_after_ms > 0
        for _ in range(RESUMES_FACTOR * 2 - 2):
            open_calls.enter_context(calls.one(is_resume=True, principal="a"))
        with pytest.raises(Overloaded), calls.one(is_resume=True, principal="a"):
            pass
        open_calls.enter_context(calls.one(is_resume=False, principal="b"))
    with calls.one(is_resume=False, principal="a"):
        pass


def test_calls_of_nobody_in_particular_are_limited_in_all_alone():
    calls = RunningCalls(3, (), count_max_per_principal=1)
    with ExitStack() as open_calls:
        for _ in range(3):
            open_calls.enter_context(calls.one(is_resume=False))
        with pytest.raises(Overloaded) as refused, calls.one(is_resume=False, principal="a"):
            pass
    assert refused.value.reason == "OVERLOADED"
