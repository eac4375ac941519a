"""The product: all of `tessera up`, asked by `tessera bench`, so that client, gateway, scheduler and worker share the machine's cores."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from services.bench.figures import Spread
from tests.benchmarks.live_system import measured, system, wait_served, worker_environment
from tests.benchmarks.peers.contender import Contender, Run
from tests.benchmarks.workloads import Workload

SETTLE_S = 1.0
"""For what is noticed late after a pause: calls and pings that time out."""


class Ours:
    """A system that serves at this address."""

    def __init__(self, address: str) -> None:
        self._address = address

    def wake(self) -> None:
        """See `Contender`. Its lease has ended: the scheduler takes the lead again, as after any pause."""
        wait_served(self._address)
        time.sleep(SETTLE_S)
        wait_served(self._address)

    def run(self, workload: Workload, number: int, limit_s: float = math.inf) -> Run:
        """See `Contender`; it runs to its end."""
        return _run(measured(self._address, workload, number))

    def serve(self, workload: Workload, number: int, rate: float) -> Run:
        """See `Contender`."""
        return _run(measured(self._address, workload, number, rate))


def _run(level: dict[str, Any]) -> Run:
    return Run(level["duration_s"], level["output_tokens"], Spread(**level["ttft_ms"]), level["tpot_ms"]["mean"])


@contextmanager
def ours(model: str, precision: str) -> Iterator[Contender]:
    """One that computes in this precision, a name of `PRECISIONS`."""
    with system(["--model", model], worker_environment(precision)) as address:
        yield Ours(address)
