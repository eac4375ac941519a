"""llama.cpp's server, asked over HTTP: it is the one part of it that batches requests as they come."""

import asyncio
import json
import os
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tessera.values.model import ModelInfo
from tests.benchmarks.peers.contender import Contender, Run, process, run_of
from tests.benchmarks.peers.driven import WARM_TOKENS
from tests.benchmarks.peers.install import last_line
from tests.benchmarks.workloads import Workload
from tests.system.role_process import free_ports

START_TIMEOUT_S = 60.0
SLOTS, SLOT_TOKENS = 32, 1024


class LlamaServer:
    """One that serves on this port."""

    def __init__(self, port: int, model: ModelInfo) -> None:
        self._port = port
        self._model = model

    def run(self, workload: Workload, seed: int) -> Run:
        """See `Contender`."""
        if workload.is_warm:
            self._ask([workload.warm_prompt(self._model, seed)], WARM_TOKENS)
        return run_of(self._ask(workload.prompts(self._model, seed), workload.output_tokens), workload)

    def _ask(self, of: list[list[int]], output_tokens: int) -> list[tuple[float, list[float]]]:
        async def ask() -> list[tuple[float, list[float]]]:
            return await asyncio.gather(*(self._answer(prompt, output_tokens) for prompt in of))

        return asyncio.run(ask())

    async def _answer(self, prompt: list[int], output_tokens: int) -> tuple[float, list[float]]:
        options = {"n_predict": output_tokens, "ignore_eos": True, "temperature": 0, "stream": True, "cache_prompt": True}
        body = json.dumps({"prompt": prompt, **options})
        head = f"POST /completion HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nContent-Type: application/json\r\n"
        submitted = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"{status.decode().strip()} {(await reader.read()).decode()[-300:]}")
        came, event = [], b""
        async for line in reader:
            if line.startswith(b"data: {"):
                came.append(time.perf_counter())
                event = line
        writer.close()
        count = json.loads(event.removeprefix(b"data: "))["tokens_predicted"]
        return submitted, token_times(came, count)


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
