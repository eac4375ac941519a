"""A million random calls of a scheduler with its simulated worker (`make soak-scheduler`), each checked as in the test of the machine.

Says each seed before it begins, on stderr. A failure is shrunk and printed as a transcript; `--first-seed` and `--operations 1` repeat it.
Ends with one JSON line.
"""

import argparse
import json
import sys
import time
from collections import Counter

from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from test_scheduler_machine import SchedulerMachine

LIVES_PER_SEED = 100
OPERATIONS_PER_LIFE = 50

SETTINGS = settings(
    max_examples=LIVES_PER_SEED,
    stateful_step_count=OPERATIONS_PER_LIFE,
    deadline=None,
    database=None,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)


def run_lives(first_seed: int, counts: Counter[str]) -> None:
    """Live some lives from one seed, and count what happened in them."""

    class CountedMachine(SchedulerMachine):
        def teardown(self) -> None:
            super().teardown()
            if not hasattr(self, "rig"):
                return
            counts.update(operations=self.rig.num_checks, lives=1, requests=self.number, takeovers=self.rig.epoch.number - 1)
            counts.update(preemptions=self.rig.scheduler.load().num_preemptions)
            counts.update(swap_outs=sum(len(batch.swap_outs) for batch in self.rig.batches))
            counts.update(swap_ins=sum(len(batch.swap_ins) for batch in self.rig.batches))
            counts.update(fork_copies=sum(len(batch.copies) for batch in self.rig.batches))
            counts.update(
                drafts=sum(int((batch.num_scheduled_tokens[: batch.num_decodes] - 1).sum()) for batch in self.rig.batches)
            )

    run_state_machine_as_test(seed(first_seed)(CountedMachine), settings=SETTINGS)


def main() -> None:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=1_000_000, help=f"at least; {LIVES_PER_SEED} lives to a seed")
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    began = time.monotonic()
    counts: Counter[str] = Counter()
    number = options.first_seed
    while counts["operations"] < options.operations:
        print(f"soak: seed {number}, {counts['operations']} operations in {time.monotonic() - began:.0f} s", file=sys.stderr)
        run_lives(number, counts)
        number += 1
    seeds = [options.first_seed, number - 1]
    print(json.dumps({**counts, "seeds": seeds, "seconds": round(time.monotonic() - began, 1)}))


if __name__ == "__main__":
    main()
