"""What all tests share: one event loop for the whole process, because grpc.aio does not survive a second one."""

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, Protocol

import pytest


class RunAsync(Protocol):
    """Runs one coroutine to its end on the shared loop, within `timeout_s`."""

    def __call__(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float = 60.0) -> Any: ...


@pytest.fixture(scope="session")
def run_async() -> Iterator[RunAsync]:
    """A test of asynchronous code is a plain function that gives its coroutine to this."""
    with asyncio.Runner() as runner:

        def run(coroutine: Coroutine[Any, Any, Any], timeout_s: float = 60.0) -> Any:
            async def bounded() -> Any:
                async with asyncio.timeout(timeout_s):
                    return await coroutine

            return runner.run(bounded())

        yield run
