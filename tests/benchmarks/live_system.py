"""`tessera up` as it is, in a chosen precision, and `tessera bench` put on it."""

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

from model_worker.kernels.cpu.library import multiplies_bfloat16
from services.free_ports import free_ports
from tessera.client import Client, TesseraError
from tests.benchmarks.workloads import Workload

TESSERA = (sys.executable, "-m", "services.cli.main")
START_TIMEOUT_S = 120

PRECISIONS: dict[str, dict[str, str]] = {
    "f32": {"kernels": "cpu", "dtype": "float32"},
    "f16": {"kernels": "cpu", "dtype": "float16"},
    **({"bf16": {"kernels": "cpu", "dtype": "bfloat16"}} if multiplies_bfloat16() else {}),
    "int8": {"kernels": "cpu", "quantization": "int8"},
}
"""Options of the worker. bfloat16 where the processor multiplies it: there it is the default of 16 bits."""


def worker_options(precision: str) -> list[str]:
    """On a command line."""
    return [text for name, value in PRECISIONS[precision].items() for text in (f"--{name}", value)]


def worker_environment(precision: str) -> dict[str, str]:
    """The same for a worker that somebody else starts."""
    return {f"TESSERA_WORKER_{name.upper()}": value for name, value in PRECISIONS[precision].items()}


@contextlib.contextmanager
def system(arguments: list[str], environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """A running system; its public address."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with tempfile.TemporaryDirectory() as data:
        command = [*TESSERA, "up", "--prompt", "", "--data", data, "--listen", address, *arguments]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | dict(environment or {})
        )
        try:
            wait_served(address, process)
            yield address
        finally:
            process.terminate()
            process.wait()


def wait_served(address: str, process: "subprocess.Popen[bytes] | None" = None) -> None:
    """Until it answers. Raises RuntimeError where `process` has ended, TesseraError where it takes too long."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    with Client(address) as client:
        while True:
            try:
                client.generate("Hello", max_tokens=1)
                return
            except TesseraError:
                if process is not None and process.poll() is not None:
                    raise RuntimeError(
                        f"`tessera up` ended with status {process.returncode}: run it by hand to see why"
                    ) from None
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.2)


def measured(address: str, workload: Workload, number: int, rate: float = math.inf) -> dict[str, Any]:
    """The figures of one round, as `tessera bench` tells them; requests come at `rate` a second. Raises where one failed."""
    command = [*TESSERA, "bench", "--gateway", address, *workload.bench_options(number, rate)]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    (level,) = json.loads(out.splitlines()[-1])["levels"]
    if level["num_ok"] != workload.requests:
        raise RuntimeError(
            f"{workload.name}: {level['num_ok']} of {workload.requests} requests were answered: {level['messages']}"
        )
    figures: dict[str, Any] = level
    return figures
