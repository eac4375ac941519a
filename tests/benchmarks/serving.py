"""Tokens per second of the whole system on this machine: run `python tests/benchmarks/serving.py`.

Starts `tessera up`, then sends c requests at once, each 128 random token ids in and 128 tokens out (greedy, EOS ignored), for c = 1, 8, 32, in
several rounds with other prompts. Client, gateway, scheduler, Redis and worker share the machine's cores.
"""

import argparse
import contextlib
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tessera.client import Client, TesseraError

PROMPT_LEN = 128
OUTPUT_LEN = 128
CONCURRENCY = (1, 8, 32)
START_TIMEOUT_S = 120


@dataclass
class Stream:
    """When the tokens of one answer came."""

    sent_s: float
    token_s: list[float] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float:
        return 1000 * (self.token_s[0] - self.sent_s)

    @property
    def tpot_ms(self) -> float:
        return 1000 * (self.token_s[-1] - self.token_s[0]) / (len(self.token_s) - 1)


@contextlib.contextmanager
def system() -> Iterator[str]:
    """A running system; its public address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as data:
        command = [str(Path(sys.executable).with_name("tessera")), "up", "--prompt", "", "--data", data, "--listen", address]
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


def run(client: Client, count: int, rng: random.Random) -> tuple[float, list[Stream]]:
    """`count` requests at once: seconds until the last ended, and the streams."""
    streams = [Stream(time.monotonic()) for _ in range(count)]

    def read(stream: Stream, prompt: list[int]) -> None:
        stream.sent_s = time.monotonic()
        for piece in client.stream(prompt, temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True):
            stream.token_s += [time.monotonic()] * len(piece.token_ids)

    prompts = [[rng.randrange(300, 40_000) for _ in range(PROMPT_LEN)] for _ in streams]
    threads = [threading.Thread(target=read, args=pair) for pair in zip(streams, prompts, strict=True)]
    began_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - began_s, streams


def main() -> None:
    """Print a table, and the figures as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    rng = random.Random(1)
    with system() as address, Client(address) as client:
        print(
            f"{'requests':>8} {'output tokens/s':>24} {'TTFT ms':>9} {'TPOT ms':>9}   (median, spread over {arguments.rounds} rounds)"
        )
        for count in CONCURRENCY:
            rounds = [run(client, count, rng) for _ in range(arguments.rounds)]
            rates = [count * OUTPUT_LEN / seconds for seconds, _ in rounds]
            ttft = statistics.fmean(stream.ttft_ms for _, streams in rounds for stream in streams)
            tpot = statistics.fmean(stream.tpot_ms for _, streams in rounds for stream in streams)
            rate = statistics.median(rates)
            print(f"{count:>8} {rate:>10.1f} ({min(rates):.1f} to {max(rates):.1f}) {ttft:>9.0f} {tpot:>9.1f}")
            figures[f"c{count}"] = {"tokens_per_s": round(rate, 1), "ttft_ms": round(ttft), "tpot_ms": round(tpot, 1)}
    print(json.dumps({"benchmark": "serving", "precision": "f32", **figures}))


if __name__ == "__main__":
    main()
