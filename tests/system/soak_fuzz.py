"""Random input to every public method of a live system, by default 100,000 of them; `make soak-fuzz`."""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

from fuzz import ENGINE_TOO, fuzz, served_at
from process_stack import Stack

BATCH = 2_000
"""Inputs between two looks at the processes."""


def main() -> int:
    """Exit status 1, after saying which input it was, where one leads to a bug or a process is gone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    options = parser.parse_args()
    totals: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder), ENGINE_TOO) as stack:
        addresses = served_at(stack)
        for first in range(options.first, options.first + options.inputs, BATCH):
            count = min(BATCH, options.first + options.inputs - first)
            seen, bugs = asyncio.run(fuzz(addresses, count, first))
            for (method, status), times in seen.items():
                totals[f"{method} {status}"] = totals.get(f"{method} {status}", 0) + times
            gone = [f"{role.name} is gone:\n{role.log_tail()}" for role in stack.roles if not role.is_running]
            if bugs or gone:
                print("\n".join([*bugs[:20], *gone]), file=sys.stderr)
                return 1
            print(f"{first + count - options.first} inputs", file=sys.stderr)
    print(json.dumps({"inputs": options.inputs, "statuses": dict(sorted(totals.items()))}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
