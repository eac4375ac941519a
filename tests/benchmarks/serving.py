"""Tokens per second of the whole system on this machine: run `make bench-serve`.

Starts `tessera up` and puts `tessera bench` on it, in several rounds with other prompts: requests that all come at once, greedy, EOS ignored.
Client, gateway, scheduler, Redis and worker share the machine's cores.
"""

import argparse
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tessera.client import Client, TesseraError

TESSERA = (sys.executable, "-m", "services.cli.main")
START_TIMEOUT_S = 120


@dataclass(frozen=True)
class Load:
    """So many requests at once, of these lengths in tokens."""

    name: str
    requests: int
    input_tokens: int
    output_tokens: int
    shared_prefix_tokens: int = 0

    @property
    def options(self) -> list[str]:
        """Of `tessera bench`."""
        lengths = {"input": self.input_tokens, "output": self.output_tokens, "shared-prefix": self.shared_prefix_tokens}
        given = [text for name, tokens in lengths.items() for text in (f"--{name}-tokens", str(tokens))]
        return ["--rate", "inf", "--requests", str(self.requests), "--warmup", "1", *given]


LOADS = (
    Load("c1", 1, 128, 128),
    Load("c8", 8, 128, 128),
    Load("c32", 32, 128, 128),
    Load("long_prompts", 8, 512, 16),
    Load("shared_prefix", 32, 32, 32, shared_prefix_tokens=512),
)


@contextlib.contextmanager
def system(arguments: list[str]) -> Iterator[str]:
    """A running system; its public address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as data:
        command = [*TESSERA, "up", "--prompt", "", "--data", data, "--listen", address, *arguments]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait_served(address)
            yield address
        finally:
            process.terminate()
            process.wait()


def _wait_served(address: str) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    with Client(address) as client:
        while True:
            try:
                client.generate("Hello", max_tokens=1)
                return
            except TesseraError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.2)


def measured(address: str, load: Load, seed: int) -> dict[str, Any]:
    """The figures of one round, as `tessera bench` tells them. Raises where a request failed."""
    command = [*TESSERA, "bench", "--gateway", address, "--seed", str(seed), *load.options]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    (level,) = json.loads(out.splitlines()[-1])["levels"]
    if level["num_ok"] != load.requests:
        raise RuntimeError(f"{load.name}: {level['num_ok']} of {load.requests} requests were answered: {level['messages']}")
    figures: dict[str, Any] = level
    return figures


def main() -> None:
    """Print a table, and the figures as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct", help="what `tessera up` serves")
    arguments = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    with system(["--model", arguments.model]) as address:
        print(
            f"{'load':<14} {'requests':>8} {'in':>9} {'out':>4} {'output tokens/s':>24} {'TTFT ms':>9} {'p99':>7} {'TPOT ms':>9} {'ITL p99':>8}"
            f"   (median of {arguments.rounds} rounds, rate with its spread)"
        )
        for load in LOADS:
            rounds = [measured(address, load, seed) for seed in range(arguments.rounds)]
            figures[load.name] = _shown(load, rounds)
    print(json.dumps({"benchmark": "serving", "model": arguments.model, "precision": "f32", **figures}))


def _shown(load: Load, rounds: list[dict[str, Any]]) -> dict[str, float]:
    rates = [level["output_tokens_per_s"] for level in rounds]
    rate = statistics.median(rates)
    ttft, tpot = (statistics.median(level[name]["mean"] for level in rounds) for name in ("ttft_ms", "tpot_ms"))
    ttft_p99, itl_p99 = (statistics.median(level[name]["p99"] for level in rounds) for name in ("ttft_ms", "itl_ms"))
    prompt = f"{load.shared_prefix_tokens}+{load.input_tokens}" if load.shared_prefix_tokens else str(load.input_tokens)
    spread = f"{rate:.1f} ({min(rates):.1f} to {max(rates):.1f})"
    print(
        f"{load.name:<14} {load.requests:>8} {prompt:>9} {load.output_tokens:>4} {spread:>24} {ttft:>9.0f} {ttft_p99:>7.0f} {tpot:>9.1f} "
        f"{itl_p99:>8.1f}",
        flush=True,
    )
    told = {"tokens_per_s": rate, "ttft_ms": ttft, "ttft_p99_ms": ttft_p99, "tpot_ms": tpot, "itl_p99_ms": itl_p99}
    return {name: round(value, 1) for name, value in told.items()}


if __name__ == "__main__":
    main()
