"""Tokens per second of the whole system on this machine: run `make bench`; tables, a picture, then one JSON line.

Starts `tessera up` in each precision and puts `tessera bench` on it, in several rounds with other prompts. Client, gateway, scheduler, Redis and
worker share the machine's cores. Beside each figure stands its part of what the machine's own limits allow, see `machine_limits`. Last, what long
prompts do to answers that stream beside them, see `prompts_beside`.
"""

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.live_system import PRECISIONS, measured, system, worker_environment
from tests.benchmarks.machine_limits import Limits, ModelSize, measured_limits
from tests.benchmarks.prompts_beside import HEADS as PAUSES_HEADS
from tests.benchmarks.prompts_beside import NAME as PAUSES
from tests.benchmarks.prompts_beside import Pauses, measured_pauses
from tests.benchmarks.workloads import WORKLOADS, Workload, chosen

PICTURE = Path("build/bench.png")
NAMES = [*(workload.name for workload in WORKLOADS), PAUSES]


@dataclass(frozen=True, slots=True)
class Result:
    """Of one workload in one precision: medians over the rounds, the rate with its lowest and highest; `bound` is the rate that the machine's
    limits allow, `binding` the limit that most of that time goes into."""

    rate: float
    lowest: float
    highest: float
    bound: float
    binding: str
    ttft_ms: float
    ttft_p99_ms: float
    tpot_ms: float
    itl_p99_ms: float

    @classmethod
    def of(cls, rounds: list[dict[str, Any]], bound: float, binding: str) -> "Result":
        """From what `tessera bench` told."""
        rates = [level["output_tokens_per_s"] for level in rounds]

        def median(measure: str, of: str) -> float:
            return statistics.median(level[measure][of] for level in rounds)

        return cls(
            rate=statistics.median(rates),
            lowest=min(rates),
            highest=max(rates),
            bound=bound,
            binding=binding,
            ttft_ms=median("ttft_ms", "mean"),
            ttft_p99_ms=median("ttft_ms", "p99"),
            tpot_ms=median("tpot_ms", "mean"),
            itl_p99_ms=median("itl_ms", "p99"),
        )

    def row(self, workload: Workload, precision: str) -> str:
        """Of the table."""
        spread = f"{self.rate:.1f} ({self.lowest:.1f} to {self.highest:.1f})"
        part = f"{self.rate / self.bound:.0%} of {self.bound:.0f}, {self.binding}"
        return (
            f"{precision:<6}{workload.name:<8}{workload.words:<30}{spread:>26}{part:>28}"
            f"{self.ttft_ms:>9.0f}{self.ttft_p99_ms:>8.0f}{self.tpot_ms:>9.1f}{self.itl_p99_ms:>9.1f}"
        )

    def told(self) -> dict[str, float | str]:
        """For JSON."""
        figures = {
            "tokens_per_s": self.rate,
            "lowest": self.lowest,
            "highest": self.highest,
            "bound_tokens_per_s": self.bound,
            "ttft_ms": self.ttft_ms,
            "ttft_p99_ms": self.ttft_p99_ms,
            "tpot_ms": self.tpot_ms,
            "itl_p99_ms": self.itl_p99_ms,
        }
        rounded = {name: round(value, 1) for name, value in figures.items()}
        return {**rounded, "of_bound": round(self.rate / self.bound, 3), "binding": self.binding}


HEADS = (
    f"{'':<6}{'':<8}{'requests':<30}{'output tokens/s':>26}{'of the bound':>28}"
    f"{'TTFT ms':>9}{'p99':>8}{'TPOT ms':>9}{'ITL p99':>9}"
)


def measure(model: str, precision: str, workloads: Sequence[Workload], rounds: int, limits: Limits) -> dict[str, Result]:
    """All workloads in one precision, by name; prints a row for each."""
    size, results = ModelSize.of(model), {}
    with system(["--model", model], worker_environment(precision)) as address:
        for workload in workloads:
            told = [measured(address, workload, number) for number in range(rounds)]
            bound = limits.tokens_per_s(size, workload)
            result = Result.of(told, bound, limits.binding(size, workload))
            results[workload.name] = result
            print(result.row(workload, precision), flush=True)
    return results


def measure_pauses(model: str, precision: str, rounds: int) -> Pauses:
    """The round with the median ratio, of a fresh system in one precision; prints its row."""
    with system(["--model", model], worker_environment(precision)) as address:
        rounds_of = sorted((measured_pauses(address, number) for number in range(rounds)), key=lambda pauses: pauses.ratio)
    pauses = rounds_of[rounds // 2]
    print(pauses.row(precision), flush=True)
    return pauses


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct", help="what `tessera up` serves: a dense model")
    parser.add_argument("--precisions", default=",".join(PRECISIONS), help="of the weights; default: %(default)s")
    parser.add_argument("--workloads", default=",".join(NAMES), help="default: %(default)s")
    parser.add_argument("--plot", type=Path, default=PICTURE, help="picture to draw; default: %(default)s")
    return parser.parse_args()


def main() -> None:
    """Print tables, draw one, and print the figures as one JSON line."""
    arguments = _arguments()
    names, precisions = arguments.workloads.split(","), arguments.precisions.split(",")
    told: dict[str, Any] = {}
    workloads = [workload for name in names if name != PAUSES for workload in chosen(name)]
    if workloads:
        told |= _rates(arguments, precisions, workloads)
    if PAUSES in names:
        print(PAUSES_HEADS)
        told[PAUSES] = {name: measure_pauses(arguments.model, name, arguments.rounds).told() for name in precisions}
    cores = len(os.sched_getaffinity(0))
    print(json.dumps({"benchmark": "serving", "model": arguments.model, "cores": cores, **told}))


def _rates(arguments: argparse.Namespace, precisions: Sequence[str], workloads: Sequence[Workload]) -> dict[str, Any]:
    """Of all workloads in all precisions, printed and drawn; for JSON."""
    all_limits: dict[str, Limits] = {}
    results: dict[str, dict[str, Result]] = {}
    print(f"{HEADS}   (medians of {arguments.rounds} rounds, the rate with its spread; load before: {os.getloadavg()[0]:.1f})")
    for precision in precisions:
        limits = all_limits[precision] = measured_limits(arguments.model, precision)
        print(
            f"{precision:<6}{limits.weight_bytes / 1e6:.0f} MB of weights; this machine reads {limits.read_gb_per_s:.1f} GB/s ({limits.read_by}) "
            f"and computes {limits.gflop_per_s:.0f} GFLOP/s ({limits.gflop_by})"
        )
        results[precision] = measure(arguments.model, precision, workloads, arguments.rounds, limits)
    if _drawn(results, arguments.plot, arguments.model):
        print(f"drawn: {arguments.plot}")
    machine = {
        precision: {"read_gb_per_s": round(limits.read_gb_per_s, 1), "gflop_per_s": round(limits.gflop_per_s, 1)}
        for precision, limits in all_limits.items()
    }
    told = {workload.name: {precision: of[workload.name].told() for precision, of in results.items()} for workload in workloads}
    return {"machine": machine, **told}


def _drawn(results: dict[str, dict[str, Result]], path: Path, model: str) -> bool:
    try:
        from tests.benchmarks.serving_picture import draw
    except ModuleNotFoundError as error:  # matplotlib
        print(f"not drawn: {error}")
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    bars = {
        precision: {name: (result.rate, result.lowest, result.highest, result.bound) for name, result in of.items()}
        for precision, of in results.items()
    }
    draw(bars, f"Output tokens per second: {model}, {len(os.sched_getaffinity(0))} cores", path)
    return True


if __name__ == "__main__":
    main()
