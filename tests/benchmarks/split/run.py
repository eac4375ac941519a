"""What the split into processes costs: run `make bench-split`; tables, then one JSON line.

First a step over gRPC that computes nothing. Then the same requests through the whole system and through the bare model loop, which is
scheduler and engine in one process: whole system over engine alone, in turns, with everything on the same two cores, and with the worker on one
and all else on the other. Last, where the time of a step goes, as worker and scheduler themselves time it.
"""

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from services.cli.shared_cores import let_finish
from tests.benchmarks.live_system import PRECISIONS
from tests.benchmarks.split.bare import BareRun, bare_process
from tests.benchmarks.split.cores import Placement, placements
from tests.benchmarks.split.phases import step_phases
from tests.benchmarks.split.round_trip import measured_round_trip
from tests.benchmarks.split.whole import WholeRun, whole_system
from tests.benchmarks.workloads import Workload, chosen

LEAST = {"shared": 0.93, "pinned": 0.97}
ROUND_TRIP_P50_US_MAX, ROUND_TRIP_CPU_US_MAX = 700, 600
ROUND_TRIP_ROWS, ROUND_TRIP_STEPS = 256, 2000
PARTS = ("worker", "scheduler", "gateway", "redis", "client")


@dataclass(frozen=True, slots=True)
class Pairs:
    """Rounds of one workload, the same prompts in both."""

    whole: Sequence[WholeRun]
    bare: Sequence[BareRun]

    @property
    def ratios(self) -> list[float]:
        """Of every round: whole system over engine alone."""
        return [a.tokens_per_s / b.tokens_per_s for a, b in zip(self.whole, self.bare, strict=True)]

    @property
    def told(self) -> dict[str, float]:
        """Medians."""
        ratios = self.ratios
        figures = {
            "whole_tokens_per_s": statistics.median(run.tokens_per_s for run in self.whole),
            "bare_tokens_per_s": statistics.median(run.tokens_per_s for run in self.bare),
            "bare_loop_tokens_per_s": statistics.median(run.tokens / run.seconds for run in self.bare),
            "ratio": statistics.median(ratios),
            "ratio_lowest": min(ratios),
            "ratio_highest": max(ratios),
        }
        return {name: round(value, 3) for name, value in figures.items()}


def compare(arguments: argparse.Namespace, placement: Placement, workloads: Sequence[Workload]) -> dict[str, Pairs]:
    """In turns; prints a row for each workload."""
    pairs = {}
    with (
        bare_process(arguments.model, arguments.precision, placement.worker) as bare,
        whole_system(arguments.model, arguments.precision, placement) as whole,
    ):
        for workload in workloads:
            rounds = [(whole.run(workload, seed), bare.run(workload, seed)) for seed in range(arguments.rounds)]
            pair = pairs[workload.name] = Pairs(*zip(*rounds, strict=True))
            told = pair.told
            spread = f"{told['ratio']:.1%} ({told['ratio_lowest']:.1%} to {told['ratio_highest']:.1%})"
            cores = "".join(f"{statistics.median(run.cores[part] for run in pair.whole):>10.2f}" for part in PARTS)
            print(
                f"{placement.name:<8}{workload.name:<8}{told['whole_tokens_per_s']:>10.1f}{told['bare_tokens_per_s']:>10.1f}"
                f"{told['bare_loop_tokens_per_s']:>10.1f}{spread:>28}{cores}",
                flush=True,
            )
    return pairs


def phases(arguments: argparse.Namespace, placement: Placement, workload: Workload) -> dict[str, dict[str, float]]:
    """Microseconds per step of decodes of all requests, by process and phase; prints them."""
    with whole_system(arguments.model, arguments.precision, placement, is_timed=True) as whole:
        whole.run(workload, 0)
        worker, scheduler = whole.worker.events(), whole.scheduler.events()
    rows = workload.requests
    found = {
        "worker": step_phases(worker, lambda event: event.get("decodes") == rows == event["tokens"]),
        "worker's loop": step_phases(worker, lambda event: "loop" in event),
        "scheduler": step_phases(scheduler, lambda event: event["rows"] == rows),
    }
    for process, told in found.items():
        steps = told.pop("steps")
        print(
            f"{placement.name:<8}{process:<16}"
            + "  ".join(f"{name} {us:,.0f}" for name, us in told.items())
            + f"   ({steps} steps)"
        )
    return {process: {name: round(us, 1) for name, us in told.items()} for process, told in found.items()}


def main() -> int:
    """Print everything; the exit code is 1 where a budget is missed and `--strict` is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--precision", choices=list(PRECISIONS), default="f16")
    parser.add_argument("--workloads", default="w1c1,w1c8,w1c32,w2", help="default: %(default)s")
    parser.add_argument("--phases-of", default="w1c32", help="the workload whose steps are taken apart; default: %(default)s")
    parser.add_argument("--strict", action="store_true", help="fail where a budget is missed")
    arguments = parser.parse_args()
    let_finish()  # as `tessera up` does
    print(f"load before: {os.getloadavg()[0]:.1f}")
    trip = measured_round_trip(ROUND_TRIP_ROWS, ROUND_TRIP_STEPS)
    print(
        f"a step of {ROUND_TRIP_ROWS} sequences over gRPC, nothing computed: p50 {trip.p50_us:.0f} us (budget {ROUND_TRIP_P50_US_MAX}), "
        f"p99 {trip.p99_us:.0f} us, CPU of both sides {trip.cpu_us:.0f} us (budget {ROUND_TRIP_CPU_US_MAX})"
    )
    workloads, places = chosen(arguments.workloads), placements()
    floors = ", ".join(f"{name} >= {least:.0%}" for name, least in LEAST.items())
    print(f"whole system over engine alone ({floors}):")
    print(
        f"{'':<8}{'':<8}{'whole':>10}{'engine':>10}{'loop':>10}{'whole / engine':>28}"
        + "".join(f"{part:>10}" for part in PARTS)
        + f"   (output tokens/s, then cores; medians of {arguments.rounds} rounds)"
    )
    pairs = {placement.name: compare(arguments, placement, workloads) for placement in places}
    print("microseconds per step of decodes:")
    (dissected,) = chosen(arguments.phases_of)
    steps = {placement.name: phases(arguments, placement, dissected) for placement in places}
    ratios = {name: min(pair.told["ratio"] for pair in of.values()) for name, of in pairs.items()}
    for name, ratio in ratios.items():
        print(
            f"{name}: {ratio:.1%} of the engine alone in the worst workload, {'reached' if ratio >= LEAST[name] else 'missed'}"
        )
    told = {
        "least_ratio": ratios,
        "round_trip_us": {"p50": round(trip.p50_us), "p99": round(trip.p99_us), "cpu": round(trip.cpu_us)},
        **{name: {workload: pair.told for workload, pair in of.items()} for name, of in pairs.items()},
        "phases_us": steps,
    }
    print(json.dumps({"benchmark": "split", "model": arguments.model, "precision": arguments.precision, **told}))
    missed = trip.p50_us > ROUND_TRIP_P50_US_MAX or trip.cpu_us > ROUND_TRIP_CPU_US_MAX
    missed |= any(pair.told["ratio"] < LEAST[name] for name, of in pairs.items() for pair in of.values())
    return int(arguments.strict and missed)


if __name__ == "__main__":
    raise SystemExit(main())
