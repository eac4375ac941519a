"""The HTTP front as a part of the system: the published smg gateway, in front of our gateway's engine port."""

import asyncio
import importlib.util
import json
import secrets
import sys
import urllib.error
import urllib.request
from pathlib import Path

from services.cli.child import Child, ChildSpec

_POLL_S = 0.1
_ANSWER_S = 5.0


class SmgMissing(Exception):
    """smg is not installed; the message says what to do."""


def check_installed() -> None:
    """Raises SmgMissing."""
    for module in ("smg", "smg_grpc_proto"):
        if importlib.util.find_spec(module) is None:
            raise SmgMissing("--http needs smg and its protocol: run `pip install 'tessera-server[http]'`")


def smg_command(listen: tuple[str, int], engine: str, metrics_port: int, grace_s: float) -> tuple[str, ...]:
    """The command line. What would change smg's workers over HTTP needs a key, which nobody has."""
    host, port = listen
    return (
        *(sys.executable, "-m", "smg", "launch", "--host", host, "--port", str(port)),
        *("--worker-urls", f"grpc://{engine}", "--worker-startup-check-interval", "1"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--control-plane-api-keys", f"up:up:admin:{secrets.token_hex(16)}"),
        *("--shutdown-grace-period-secs", str(int(grace_s)), "--log-level", "warn", "--log-json"),
    )


class HttpPart(Child):
    """Ready is who answers: smg listens before it knows an engine, and knows the engine before it has its tokenizer."""

    def __init__(self, spec: ChildSpec, url: str, model: str) -> None:
        super().__init__(spec)
        self._url = url
        self._model = model

    async def ready(self) -> str:
        """Wait until it can tokenize for the model; its URL. Raises PartDied if it ends before."""
        assert self._process is not None, "not spawned"
        while not await asyncio.to_thread(self._tokenizes):
            if self._process.returncode is not None:
                raise self.death()
            await asyncio.sleep(_POLL_S)
        return self._url

    def _tokenizes(self) -> bool:
        body = json.dumps({"model": self._model, "prompt": "Hi"}).encode()
        request = urllib.request.Request(f"{self._url}/v1/tokenize", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def http_part(command: tuple[str, ...], log: Path, url: str, model: str) -> HttpPart:
    """smg as a child; it writes no ready file."""
    return HttpPart(ChildSpec("http", command, log, log.with_suffix(".json")), url, model)
