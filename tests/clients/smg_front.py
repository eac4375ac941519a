"""The published smg gateway in front of a live system: OpenAI's and Anthropic's HTTP APIs, served by a program that nobody here wrote."""

import os
import subprocess
import sys
import time
from pathlib import Path

import grpc
import httpx2
import openai
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from services import bound_process
from tessera.client import AdminClient
from tests.system.process_stack import CALM, MODEL, Stack, StackOptions, last_idle
from tests.system.role_process import free_ports

READY_TIMEOUT_S = 90.0
REQUESTS_MAX = 4
"""At once, at the gateway."""


class SmgFront:
    """A system whose model computes nothing (`deterministic:`), and smg as a child; both die with this process."""

    def __init__(self, folder: Path) -> None:
        http, metrics, engine = free_ports(3)
        self.engine_address = f"127.0.0.1:{engine}"
        self.url = f"http://127.0.0.1:{http}"
        self._metrics_url = f"http://127.0.0.1:{metrics}/metrics"
        gateway = ["--engine-listen", self.engine_address, "--max-concurrent-requests", str(REQUESTS_MAX)]
        options = StackOptions(MODEL, f"deterministic:{MODEL}", scheduler=CALM.scheduler, gateway=gateway)
        self.stack = Stack(folder, options)
        self._log = folder / "smg.log"
        self._command = [
            *(sys.executable, "-I", "-S", bound_process.__file__, str(os.getpid())),
            *(str(Path(sys.executable).with_name("smg")), "launch", "--host", "127.0.0.1", "--port", str(http)),
            *("--worker-urls", f"grpc://{self.engine_address}", "--worker-startup-check-interval", "1"),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics), "--disable-circuit-breaker"),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "SmgFront":
        self.stack.start()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self.stack.stop()

    def active_requests(self) -> int:
        """What the gateway has open."""
        with grpc.insecure_channel(self.engine_address) as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            return stub.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest()).active_requests

    def is_settled(self) -> bool:
        """Whether nothing runs, and the scheduler has said so since the last request ended."""
        with AdminClient(self.stack.address) as admin:
            stats = admin.stats()
        told = sum(last_idle(self.stack).get("num_ended", {}).values())
        return not (stats.load.num_running or stats.load.num_waiting or stats.load.num_swapped) and told == stats.num_ended

    def metrics(self) -> str:
        """What smg says of itself to Prometheus."""
        return httpx2.get(self._metrics_url).text

    def num_ended(self, reason: str) -> int:
        """How many requests the scheduler had ended so when it last had nothing to do."""
        return last_idle(self.stack).get("num_ended", {}).get(reason, 0)

    def _wait_ready(self) -> None:
        """Ready is who answers: its models are there before their tokenizers are."""
        assert self._process is not None
        deadline = time.monotonic() + READY_TIMEOUT_S
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0) as client:
            while True:
                try:
                    client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=1)
                    return
                except (openai.APIError, httpx2.HTTPError):
                    log = self._log.read_text(errors="replace")
                    assert self._process.poll() is None, f"smg ended:\n{log}"
                    assert time.monotonic() < deadline, f"smg is not ready:\n{log[-4000:]}"
                time.sleep(0.05)
