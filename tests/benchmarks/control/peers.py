"""Other engines' schedulers on the same work, where the user has their sources.

Everything is looked for below one folder: `src/nano-vllm` and `src/ATOM` (their repositories), `venvs/vllm` (an environment with vLLM in it,
where it is there it runs the others too, else our own does). Each runs in a process of its own; the last line that it prints is its result.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 120


@dataclass(frozen=True)
class Peer:
    """Where a peer lies below the folder, and the file beside this one that drives it."""

    name: str
    place: str
    driver: str


PEERS = (
    Peer("nano-vllm", "src/nano-vllm", "peer_nano_vllm.py"),
    Peer("ATOM", "src/ATOM", "peer_atom.py"),
    Peer("vLLM v1", "venvs/vllm", "peer_vllm.py"),
)


def figures_of_peers(home: Path | None) -> Iterator[tuple[str, dict[str, float] | str]]:
    """For each peer its name and figures, or why there are none."""
    for peer in PEERS:
        if home is None:
            yield peer.name, "skipped: no folder of peers was named (--peers or PEERS_HOME)"
        elif not (home / peer.place).exists():
            yield peer.name, f"skipped: there is no {home / peer.place}"
        else:
            yield peer.name, _run(peer, home)


def _run(peer: Peer, home: Path) -> dict[str, float] | str:
    own = home / "venvs/vllm/bin/python"
    python = str(own if own.exists() else sys.executable)
    command = [python, str(Path(__file__).with_name(peer.driver)), str(home / peer.place)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"failed: {error}"
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return f"failed: {(done.stderr.splitlines() or ['it printed nothing'])[-1]}"
    figures: dict[str, float] = json.loads(lines[-1])
    return figures
