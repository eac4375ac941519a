"""The network between the processes of a cluster: TCP links through a child process that cuts, delays and resets them on command."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True, slots=True)
class Route:
    """Where a link listens, and the server behind it; ports of 127.0.0.1."""

    listen_port: int
    target_port: int


class Links:
    """Handle of the proxy process. Commands are done when they return.

    A cut link passes no bytes and keeps its connections open, as a network does that drops everything; what was sent meanwhile arrives when it is
    healed, as TCP would send it again. A reset one ends its connections at once and takes new ones.
    """

    def __init__(self, routes: Mapping[str, Route]) -> None:
        """`routes` by the name of the link. It listens when this returns."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.proxy"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._ask({"routes": {name: [route.listen_port, route.target_port] for name, route in routes.items()}})

    def cut(self, *names: str) -> None:
        """Let no byte pass, in either direction, until healed."""
        self._ask({"cut": names})

    def heal(self, *names: str) -> None:
        """Let everything pass, at once."""
        self._ask({"heal": names})

    def reset(self, *names: str) -> None:
        """End every connection of the links."""
        self._ask({"reset": names})

    def delay(self, delay_ms: float, *names: str) -> None:
        """Hold every piece of data back for so long from now on; 0 ends that."""
        self._ask({"delay": names, "ms": delay_ms})

    def close(self) -> None:
        """End the process, and with it every connection."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _ask(self, command: dict[str, object]) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer == "done\n", f"the proxy answered {answer!r} to {command}"
