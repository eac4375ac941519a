"""What a process measures, as Prometheus reads it: `GET /metrics` on a port of its own, in plain HTTP."""

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeAlias

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.rpc.bind_error import BindError
from services.rpc.call_metrics import CallMetrics

_log = structlog.get_logger()

READ_S_MAX = 5.0
"""How long a scrape waits for the event loop; then it fails, as one of a process that hangs should."""

Reading: TypeAlias = Callable[[], Iterable[Metric]]


class MetricsServer:
    """One for a process; belongs to its event loop. The library's own server answers in a thread, and asks the loop for everything that lives
    there: nothing is counted twice, and a process that nobody scrapes pays nothing for it."""

    def __init__(self, listen: str) -> None:
        disable_created_metrics()  # a second series beside each count, which no dashboard reads
        self.registry = CollectorRegistry()
        self.calls = CallMetrics(self.registry)
        self.address = ""  # once it listens
        self._listen = listen
        self._shutdown: Callable[[], None] | None = None
        ProcessCollector(registry=self.registry)

    def show(self, reading: Reading) -> None:
        """Show what `reading` returns whenever somebody asks; it is called on the event loop."""
        self.registry.register(_OnLoop(reading, asyncio.get_running_loop()))

    def start(self) -> None:
        """Listen and answer; a no-op once it does. Raises BindError."""
        if self._shutdown is not None:
            return
        host, _, port = self._listen.rpartition(":")
        if not (host and port.isdigit() and int(port) < 65536):
            raise BindError(f"cannot serve metrics on {self._listen}: it must be HOST:PORT with a port from 0 to 65535")
        try:
            server, thread = start_http_server(int(port), host.strip("[]"), self.registry)
        except OSError as error:
            raise BindError(f"cannot serve metrics on {self._listen}: {error.strerror or error}") from error
        self.address = f"{host}:{server.server_port}"

        def shutdown() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        self._shutdown = shutdown
        _log.info("metrics", address=self.address)

    async def stop(self) -> None:
        """Answer no more; a no-op before `start`."""
        if self._shutdown is not None:
            await asyncio.to_thread(self._shutdown)  # the loop goes on meanwhile: a scrape may be waiting for it
            self._shutdown = None


class _OnLoop(Collector):
    """Reads on the event loop what another thread wants to know."""

    def __init__(self, reading: Reading, loop: asyncio.AbstractEventLoop) -> None:
        self._reading = reading
        self._loop = loop

    def describe(self) -> Iterable[Metric]:
        """Nothing is known before it is read."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """What there is now. Raises TimeoutError."""
        return asyncio.run_coroutine_threadsafe(self._read(), self._loop).result(READ_S_MAX)

    async def _read(self) -> list[Metric]:
        return list(self._reading())
