"""What becomes of ten times the load that a system takes: run `make bench-overload`; a table, then one JSON line.

A whole system with a small queue serves a model that takes 20 ms for each step, so no more than 50 requests a second, sixteen at once with sixteen tokens
each. Ten times as many come for a minute, at random moments and whatever becomes of those before (an open loop), from
client processes of their own. Every request must be served whole or refused with RESOURCE_EXHAUSTED; every refusal must say when to come again, to
people (RetryInfo) and to gRPC (the pushback trailer); the memory of gateway and scheduler must not grow with what was refused.

Clients and servers share this machine's cores, and a client that is late is not the server's doing. So refusals are timed from the moment in which
the client handed the request to gRPC; the time from the moment in which it was due is printed beside it. Both still have in them how late the client
was to take the answer; how late it is in general is the last of these rows: by how much sleeps of 10 ms in it took longer. Beside the cores that gateway and
scheduler used is printed how long they were ready to run and had none, in seconds per second: where that is much, something else wants the machine,
and the budget of times says little.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass

from tests.benchmarks.load.arrivals import Arrivals, Offer, Outcomes
from tests.benchmarks.load.paced_worker import STEP_S
from tests.benchmarks.load.stage import core_wait_s, cpu_s, machine, pid_of, rss_mib, stage
from tests.system.process_stack import Stack

FACTOR = 10
P50_MS_MAX, P99_MS_MAX = 10, 100
GROWTH_MIB_MAX = 8
"""Of a process, from the middle of the overload to its end: below what one refused request in ten would leave."""

MAX_NUM_SEQS, MAX_QUEUED = 16, 32
TOKENS = 16
RATE_MAX = MAX_NUM_SEQS / (TOKENS * STEP_S)
"""Requests per second that the model serves where nothing else takes time."""

WARM_S = 5.0
RETENTION_MS = 5000
"""What has ended is kept so long: shorter than the overload, so that a growth of memory is not that."""

SAMPLE_S = 0.5


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory of one process at the start, in the middle and at the end, MiB, and the most; its CPU, and its wait for it, in cores."""

    start: float
    mid: float
    end: float
    most: float
    cores: float
    waited: float

    @property
    def is_bounded(self) -> bool:
        return self.end - self.mid <= GROWTH_MIB_MAX


def overload(stack: Stack, offer: Offer, processes: int) -> tuple[Outcomes, dict[str, Usage]]:
    """Offer it, and watch the two processes that decide who is let in."""
    pids = {"gateway": pid_of(stack.gateway), "scheduler": pid_of(stack.scheduler)}
    memory: dict[str, list[float]] = {name: [rss_mib(pid)] for name, pid in pids.items()}
    used = {name: cpu_s(pid) for name, pid in pids.items()}
    waited = {name: core_wait_s(pid) for name, pid in pids.items()}
    arrivals, began_s = Arrivals(offer, processes), time.monotonic()
    while not arrivals.have_ended:
        time.sleep(SAMPLE_S)
        for name, pid in pids.items():
            memory[name].append(rss_mib(pid))
    took_s = time.monotonic() - began_s
    usages = {}
    for name, pid in pids.items():
        samples = memory[name]
        cores = (cpu_s(pid) - used[name]) / took_s
        waits = (core_wait_s(pid) - waited[name]) / took_s
        usages[name] = Usage(samples[0], samples[len(samples) // 2], samples[-1], max(samples), cores, waits)
    return arrivals.outcomes(), usages


def percentiles(values: list[float]) -> dict[str, float]:
    """p50, p99 and the largest."""
    cuts = statistics.quantiles(values, n=100)
    return {"p50": round(cuts[49], 2), "p99": round(cuts[98], 2), "max": round(max(values), 1)}


def main() -> int:
    """Print a table, and the figures as one JSON line. The exit status is 1 where a budget is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload")
    parser.add_argument("--clients", type=int, default=2, help="client processes")
    arguments = parser.parse_args()
    limits = ["--max-num-seqs", str(MAX_NUM_SEQS), "--max-queued-requests", str(MAX_QUEUED)]
    limits += ["--result-retention-ms", str(RETENTION_MS)]
    with stage(scheduler=limits, paced=True) as stack:
        Arrivals(Offer(stack.address, FACTOR * RATE_MAX, WARM_S, TOKENS), arguments.clients).outcomes()
        offer = Offer(stack.address, FACTOR * RATE_MAX, arguments.seconds, TOKENS)
        outcomes, usages = overload(stack, offer, arguments.clients)
    from_send, from_due = percentiles(outcomes.from_send_ms), percentiles(outcomes.from_due_ms)
    lag = percentiles(outcomes.client_lag_ms)
    print(f"offered: {offer.rate:.0f} requests/s for {arguments.seconds:g} s; the model serves {RATE_MAX:.0f}/s at most")
    print(
        f"{outcomes.offered} came, {outcomes.served} served, {outcomes.refused} refused, {outcomes.failed.total()} failed {dict(outcomes.failed)}"
    )
    print(f"refusals without RetryInfo or pushback: {outcomes.without_retry}")
    print(f"{'refusals, ms':22} {'p50':>8} {'p99':>8} {'longest':>8}")
    print(
        f"{'since it was sent':22} {from_send['p50']:>8} {from_send['p99']:>8} {from_send['max']:>8}   (budget {P50_MS_MAX} and {P99_MS_MAX})"
    )
    print(f"{'since it was due':22} {from_due['p50']:>8} {from_due['p99']:>8} {from_due['max']:>8}")
    print(f"{'lag of the clients':22} {lag['p50']:>8} {lag['p99']:>8} {lag['max']:>8}")
    print(f"{'memory, MiB':22} {'start':>8} {'mid':>8} {'end':>8} {'most':>8}    cores   waited")
    for name, usage in usages.items():
        print(
            f"{name:22} {usage.start:>8.1f} {usage.mid:>8.1f} {usage.end:>8.1f} {usage.most:>8.1f} {usage.cores:>8.2f} {usage.waited:>8.2f}"
        )
    missed = {
        "p50": from_send["p50"] > P50_MS_MAX,
        "p99": from_send["p99"] > P99_MS_MAX,
        "failed": outcomes.failed.total() > 0,
        "without_retry": outcomes.without_retry > 0,
        **{f"memory_{name}": not usage.is_bounded for name, usage in usages.items()},
    }
    figures = {
        "offered_per_s": round(offer.rate, 1),
        "served_per_s": round(outcomes.served / arguments.seconds, 1),
        "seconds": arguments.seconds,
        "served": outcomes.served,
        "refused": outcomes.refused,
        "failed": outcomes.failed.total(),
        "without_retry": outcomes.without_retry,
        "refusal_ms": from_send,
        "refusal_from_due_ms": from_due,
        "client_lag_ms": lag,
        "core_wait_s_per_s": {name: round(usage.waited, 3) for name, usage in usages.items()},
        "rss_mib": {name: [round(value, 1) for value in (usage.start, usage.mid, usage.end)] for name, usage in usages.items()},
    }
    over = [name for name, is_missed in missed.items() if is_missed]
    print(json.dumps({"benchmark": "overload", **figures, **machine(), "over_budget": over}))
    return 1 if over else 0


if __name__ == "__main__":
    raise SystemExit(main())
