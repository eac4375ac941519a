"""How a task group that fails is told, and the task it leaves behind."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from services.rpc.first_failure import first_failure

RunAsync = Callable[..., Any]


async def fail(error: Exception) -> None:
    raise error


async def fail_in_group(*errors: Exception) -> None:
    with first_failure(OSError):
        async with asyncio.TaskGroup() as tasks:
            for error in errors:
                tasks.create_task(fail(error))


def test_the_first_of_its_kind_comes_alone(run_async: RunAsync) -> None:
    async def scenario() -> None:
        with pytest.raises(FileNotFoundError):
            await fail_in_group(FileNotFoundError(), PermissionError())

    run_async(scenario())


def test_with_another_kind_beside_it_all_come(run_async: RunAsync) -> None:
    async def scenario() -> None:
        with pytest.raises(ExceptionGroup) as raised:
            await fail_in_group(FileNotFoundError(), ValueError())
        assert len(raised.value.exceptions) == 2

    run_async(scenario())


@pytest.mark.parametrize("error", [FileNotFoundError(), ValueError()])
def test_a_timeout_after_a_failed_group_is_a_timeout(run_async: RunAsync, error: Exception) -> None:
    async def scenario() -> None:
        with pytest.raises((OSError, ExceptionGroup)):
            await fail_in_group(error)
        assert asyncio.current_task().cancelling() == 0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.0):
                await asyncio.Event().wait()

    run_async(scenario())
