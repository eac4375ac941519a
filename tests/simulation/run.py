"""Many seeds, or one step by step: `make simulate`, `python -m tests.simulation.run --seed N --trace`.

Prints progress and every failing seed with the line that replays it; ends with one JSON line, and with 1 where a seed failed.
"""

import argparse
import json
import logging
import sys
import time
from collections import Counter

import structlog

from tests.simulation.plans import PLANS
from tests.simulation.system import Outcome, simulate

PROGRESS_EVERY = 200
FAILURES_SHOWN_MAX = 20


def main() -> int:
    """See the module."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    options = _options()
    if options.seed is not None:
        return _one(simulate(options.seed, options.faults, options.trace, options.swap, options.logprobs))
    return _many(range(options.first, options.first + options.seeds), options.faults, options.swap, options.logprobs)


def replay_line(seed: int, faults: str, swaps: bool = False, logprobs: bool = False) -> str:
    """How to see a seed again."""
    flags = f"{' --swap' if swaps else ''}{' --logprobs' if logprobs else ''}"
    return f"python -m tests.simulation.run --faults {faults} --seed {seed} --trace{flags}"


def _one(outcome: Outcome) -> int:
    for line in outcome.transcript:
        print(line)
    for fault in outcome.faults:
        print(fault)
    print(f"seed {outcome.seed}: {outcome.failure or 'holds'}; {outcome.num_takeovers} terms, {outcome.num_events} events")
    return outcome.failure is not None


def _many(seeds: range, faults: str, swaps: bool, logprobs: bool) -> int:
    started = time.monotonic()
    failures: list[Outcome] = []
    counts: Counter[str] = Counter()
    for number, seed in enumerate(seeds, 1):
        outcome = simulate(seed, faults, swaps=swaps, logprobs=logprobs)
        counts.update(requests=outcome.num_requests, terms=outcome.num_takeovers, recomputed=outcome.num_recomputed)
        counts.update(events=outcome.num_events, struck=len(outcome.faults), swap_outs=outcome.num_swap_outs)
        counts.update(untold=outcome.num_untold)
        if outcome.failure is not None:
            failures.append(outcome)
            if len(failures) <= FAILURES_SHOWN_MAX:
                print(f"seed {seed}: {outcome.failure[:400]}\n  {replay_line(seed, faults, swaps, logprobs)}", flush=True)
        if number % PROGRESS_EVERY == 0:
            print(f"{number} seeds, {len(failures)} failed, {time.monotonic() - started:.0f} s", flush=True)
    result = {
        "faults": faults,
        "seeds": len(seeds),
        "failed": [outcome.seed for outcome in failures],
        "seconds": round(time.monotonic() - started, 1),
        **counts,
    }
    print(json.dumps(result))
    return bool(failures)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", choices=PLANS, default="all", help="what may break")
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--swap", action="store_true", help="preempt by swap, to host memory")
    parser.add_argument("--logprobs", action="store_true", help="most requests ask for log-probabilities")
    parser.add_argument("--trace", action="store_true", help="with --seed: print what happens")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
