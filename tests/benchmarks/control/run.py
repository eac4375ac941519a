"""What the scheduler costs, against its budgets: run `make bench-control`; a table, then one JSON line, in under a minute.

All figures are process CPU, of a leader with its journal and streams: record and frame are included, and prefix caching, two batches in
flight and stop ids are on. Peers run on the same work where their sources are (`--peers`), without record and frame, which they do not have.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from tests.benchmarks.control.admission import admission_cost
from tests.benchmarks.control.decode import growth_context, growth_pool, step_cost
from tests.benchmarks.control.memory import bytes_per_block, bytes_per_token
from tests.benchmarks.control.peers import figures_of_peers
from tests.benchmarks.control.waiting import queue_ratios

BUDGETS = {
    "decode_us_per_seq_256": 0.5,
    "decode_us_per_seq_256_p99": 1.0,
    "decode_us_per_seq_1024": 0.4,
    "growth_context_32k": 1.1,
    "growth_pool_1m": 1.1,
    "admit_us_per_token_packed": 0.05,
    "admit_us_per_token_list": 0.08,
    "schedule_ratio_100k_waiting": 2.0,
    "add_ratio_100k_waiting": 2.0,
    "abort_ratio_100k_waiting": 2.0,
    "priority_add_ratio_100k_waiting": 2.0,
    "bytes_per_block": 200,
    "bytes_per_token": 8,
}


def measure(rounds: int) -> dict[str, float]:
    """All figures of ours."""
    at_256, at_1024 = step_cost(256, 200, rounds), step_cost(1024, 50, rounds)
    figures = {
        "decode_us_per_seq_256": at_256.mean,
        "decode_us_per_seq_256_p99": at_256.p99,
        "decode_us_per_seq_1024": at_1024.mean,
        "growth_context_32k": growth_context(32_768, 60, rounds),
        "growth_pool_1m": growth_pool(1_000_000, 60, rounds),
        "admit_us_per_token_packed": admission_cost(1000, 1024, True, rounds).us_per_token,
        "admit_us_per_token_list": admission_cost(1000, 1024, False, rounds).us_per_token,
    }
    ratios = queue_ratios(10, 100_000)
    figures |= {
        "schedule_ratio_100k_waiting": ratios.schedule,
        "add_ratio_100k_waiting": ratios.add,
        "abort_ratio_100k_waiting": ratios.abort,
        "priority_add_ratio_100k_waiting": ratios.priority_add,
        "bytes_per_block": bytes_per_block(1 << 15),
        "bytes_per_token": bytes_per_token(),
    }
    return {name: float(f"{figure:.3g}") for name, figure in figures.items()}


def main() -> int:
    """Print everything; the exit code is 1 where a budget is exceeded and `--strict` is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="the best of so many counts")
    parser.add_argument("--strict", action="store_true", help="fail where a budget is exceeded")
    home = os.environ.get("PEERS_HOME", "")
    parser.add_argument(
        "--peers",
        type=Path,
        default=Path(home) if home else None,
        help="folder with src/nano-vllm, src/ATOM and venvs/vllm, as far as they are there; default: the environment's PEERS_HOME",
    )
    arguments = parser.parse_args()
    figures = measure(arguments.rounds)
    print(f"{'figure':<33}{'here':>9}{'budget':>9}")
    for name, budget in BUDGETS.items():
        print(f"{name:<33}{figures[name]:>9g}{budget:>9g}{'' if figures[name] <= budget else '  exceeded'}")
    peers: dict[str, dict[str, float]] = {}
    for name, found in figures_of_peers(arguments.peers):
        print(f"{name:<12}{found if isinstance(found, str) else '  '.join(f'{key} {value:g}' for key, value in found.items())}")
        if not isinstance(found, str):
            peers[name] = found
    print(json.dumps({"benchmark": "control", **figures, "peers": peers}))
    exceeded = any(figures[name] > budget for name, budget in BUDGETS.items())
    return int(arguments.strict and exceeded)


if __name__ == "__main__":
    sys.exit(main())
