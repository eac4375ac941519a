"""The process behind `Load`: runs client streams on one event loop and some in threads, and notes everything they see.

    python -m tests.chaos.load_process FD ADDRESS...

FD is one end of a `multiprocessing.Pipe`, over which commands come and answers go.
"""

import asyncio
import itertools
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from tessera.client import AsyncClient, Client, Prompt, TesseraError
from tests.chaos.asks import Ask
from tests.chaos.stream_log import Progress, StreamLog

SYNC_EVERY = 16
"""Of so many streams one runs through the blocking client, in a thread."""


def main(pipe: Connection, addresses: tuple[str, ...]) -> None:
    """Obey commands until the other end of `pipe` closes."""
    asyncio.run(_serve(pipe, addresses))


async def _serve(pipe: Connection, addresses: tuple[str, ...]) -> None:
    streams = Streams(addresses)
    while True:
        try:
            command = await asyncio.to_thread(pipe.recv)
        except EOFError:
            return
        try:
            answer = await _obey(streams, command)
        except Exception as error:  # noqa: BLE001 - it is raised at the other end
            answer = RuntimeError(f"{type(error).__name__}: {error}")
        pipe.send(answer)


async def _obey(streams: "Streams", command: tuple[Any, ...]) -> object:
    match command:
        case ("begin", asks, concurrency, repeat):
            await streams.begin(asks, concurrency, repeat)
            return None
        case ("progress",):
            return streams.progress()
        case ("finish", timeout_s):
            return await streams.finish(timeout_s)
        case ("tokenize", prompt):
            return await streams.tokenize(prompt)
    raise ValueError(f"unknown command {command[0]}")


class Streams:
    """All streams of one run."""

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self._orders = [addresses[index:] + addresses[:index] for index in range(len(addresses))]
        self._clients: list[AsyncClient] = []
        self._blocking: list[Client] = []
        self._logs: list[StreamLog] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._is_endless = self._is_stopping = True

    async def begin(self, asks: Sequence[Ask], concurrency: int, repeat: bool) -> None:
        """Start `concurrency` lanes, each one stream after the other. The clients are new ones: those of the run before may all have gone
        over to one gateway."""
        assert not self._tasks, "a run is under way"
        for client in self._clients:
            await client.close()
        for blocking in self._blocking:
            blocking.close()
        self._clients = [AsyncClient(order) for order in self._orders]
        self._blocking = [Client(order) for order in self._orders]
        self._logs, self._is_endless, self._is_stopping = [], repeat, False
        numbers: Iterator[int] = itertools.count() if repeat else iter(range(len(asks)))
        self._tasks = [asyncio.create_task(self._lane(lane, asks, numbers)) for lane in range(concurrency)]

    def progress(self) -> Progress:
        """See `Progress`."""
        running = [len(log.token_ids) for log in self._logs if not log.is_over]
        return Progress(
            started=len(self._logs),
            finished=sum(log.is_over for log in self._logs),
            tokens=sum(len(log.token_ids) for log in self._logs),
            slowest=min(running, default=0),
        )

    async def finish(self, timeout_s: float) -> list[StreamLog]:
        """See `Load.finish`."""
        self._is_stopping = self._is_endless
        _, pending = await asyncio.wait(self._tasks, timeout=timeout_s)
        for log in self._logs:
            if not log.is_over:
                log.error = f"no end within {timeout_s:.0f} s"
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending, timeout=5)
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
        self._tasks = []
        return self._logs

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; those given as ids are the prompt."""
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], int):
            return [int(token) for token in prompt]  # type: ignore[arg-type]
        return list(await self._clients[0].tokenize(prompt))  # type: ignore[arg-type]

    async def _lane(self, lane: int, asks: Sequence[Ask], numbers: Iterator[int]) -> None:
        while not self._is_stopping:
            number = next(numbers, None)
            if number is None:
                return
            index = number % len(asks)
            log = StreamLog(index, time.monotonic())
            self._logs.append(log)
            client = lane % len(self._clients)
            if lane % SYNC_EVERY == SYNC_EVERY - 1:
                await _read_in_thread(self._blocking[client], asks[index], log)
            else:
                await _read(self._clients[client], asks[index], log)


async def _read(client: AsyncClient, ask: Ask, log: StreamLog) -> None:
    try:
        async for piece in client.stream(ask.prompt, **ask.options()):  # type: ignore[arg-type]
            log.take(piece, time.monotonic())
    except (TesseraError, ValueError, AssertionError) as error:
        log.error = _told(error)
    _close(log)


async def _read_in_thread(client: Client, ask: Ask, log: StreamLog) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def read() -> None:
        try:
            for piece in client.stream(ask.prompt, **ask.options()):  # type: ignore[arg-type]
                log.take(piece, time.monotonic())
        except (TesseraError, ValueError, AssertionError) as error:
            log.error = _told(error)
        _close(log)
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=read, daemon=True).start()
    await ended.wait()


def _close(log: StreamLog) -> None:
    if not log.is_over:
        log.error = "it ended without a finish"


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), tuple(sys.argv[2:]))
