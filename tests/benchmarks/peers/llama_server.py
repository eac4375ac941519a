"""llama.cpp's server, asked over HTTP: it is the one part of it that batches requests as they come."""

import asyncio
import contextlib
import json
import math
import os
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tessera.values.model import ModelInfo
from tests.benchmarks.peers.asked import Asked
from tests.benchmarks.peers.contender import Contender, Timeline, process
from tests.benchmarks.peers.install import last_line
from tests.system.role_process import free_ports

START_TIMEOUT_S = 60.0
SLOTS, SLOT_TOKENS = 32, 1024


class LlamaServer(Asked):
    """One that serves on this port."""

    def __init__(self, port: int, model: ModelInfo) -> None:
        self._port = port
        super().__init__(model)

    def _ask(
        self, prompts: list[list[int]], output_tokens: int, arrivals_s: list[float] | None = None, limit_s: float = math.inf
    ) -> list[Timeline]:
        async def ask() -> list[Timeline]:
            began = time.perf_counter()
            due = [began + arrival_s for arrival_s in arrivals_s or [0.0] * len(prompts)]
            came: list[list[float]] = [[] for _ in prompts]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if limit_s == math.inf else limit_s), asyncio.TaskGroup() as group:
                    for asked in zip(prompts, due, came, strict=True):
                        group.create_task(self._answer(output_tokens, *asked))
            return list(zip(due, came, strict=True))

        try:
            return asyncio.run(ask())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _answer(self, output_tokens: int, prompt: list[int], due: float, came: list[float]) -> None:
        """Ask when it is due, and put into `came` when each token came. Raises RuntimeError where it is refused."""
        options = {"n_predict": output_tokens, "ignore_eos": True, "temperature": 0, "stream": True, "cache_prompt": True}
        body = json.dumps({"prompt": prompt, **options})
        head = f"POST /completion HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nContent-Type: application/json\r\n"
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
            status = await reader.readline()
            if b" 200 " not in status:
                raise RuntimeError(f"{status.decode().strip()} {(await reader.read()).decode()[-300:]}")
            event = b""
            async for line in reader:
                if line.startswith(b"data: {"):
                    came.append(time.perf_counter())
                    event = line
            came[:] = token_times(came, json.loads(event.removeprefix(b"data: "))["tokens_predicted"])
        finally:
            writer.close()  # the server gives up an answer that nobody reads


def token_times(events: list[float], count: int) -> list[float]:
    """When each of `count` tokens came. An event has several where one ended within a character, and the last may have none."""
    return events[:count] + events[-1:] * (count - len(events))


@contextmanager
def llama_server(programs: Path, weights: Path, log: Path, model: ModelInfo) -> Iterator[Contender]:
    """One that serves `weights`. Raises RuntimeError where it does not start."""
    (port,) = free_ports(1)
    threads = len(os.sched_getaffinity(0))
    sizes = {"-np": SLOTS, "-c": SLOTS * SLOT_TOKENS, "-t": threads, "-tb": threads, "-b": 2048, "-ub": 512}
    options = [str(word) for pair in sizes.items() for word in pair]
    command = [programs / "llama-server", "-m", weights, "--host", "127.0.0.1", "--port", port, "-cb", "--no-ui", *options]
    with process(command, log) as server:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _is_healthy(port):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"it does not serve: {last_line(log)} (log: {log})")
            time.sleep(0.2)
        yield LlamaServer(port, model)


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False
