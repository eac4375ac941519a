"""The product: all of `tessera up`, asked by `tessera bench`, so that client, gateway, scheduler and worker share the machine's cores."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.benchmarks.live_system import measured, system, worker_environment
from tests.benchmarks.peers.contender import Contender, Run
from tests.benchmarks.workloads import Workload


class Ours:
    """A system that serves at this address."""

    def __init__(self, address: str) -> None:
        self._address = address

    def run(self, workload: Workload, seed: int) -> Run:
        """See `Contender`."""
        level = measured(self._address, workload, seed)
        return Run(level["duration_s"], level["ttft_ms"]["mean"], level["tpot_ms"]["mean"])


@contextmanager
def ours(model: str, precision: str) -> Iterator[Contender]:
    """One that computes in this precision, a name of `PRECISIONS`."""
    with system(["--model", model], worker_environment(precision)) as address:
        yield Ours(address)
