"""grpc.health.v1 for one process. (The servicer of `grpcio-health-checking` forgets its other watchers when one leaves, and
its open Watch streams hold up a graceful stop.)"""

import asyncio
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.rpc.errors import NotFound

_Response = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):
    """The name "" is the process (liveness: it answers, so it lives); one name per service is its readiness."""

    def __init__(self) -> None:
        self._ready: dict[str, bool] = {"": True}
        self._changed = asyncio.Event()
        self._draining = False

    def set_ready(self, service: str, ready: bool) -> None:
        """Whether `service` (full name) can do its work. Ignored once draining."""
        if self._draining or self._ready.get(service) == ready:
            return
        self._ready[service] = ready
        self._wake()

    def drain(self) -> None:
        """Everything is NOT_SERVING from now on, and Watch streams end once they have said so."""
        self._draining = True
        self._ready = dict.fromkeys(self._ready, False)
        self._wake()

    def status(self, service: str) -> "health_pb2.HealthCheckResponse.ServingStatus":
        """The status as it goes over the wire; SERVICE_UNKNOWN for a name that is not served here."""
        ready = self._ready.get(service)
        if ready is None:
            return _Response.SERVICE_UNKNOWN
        return _Response.SERVING if ready else _Response.NOT_SERVING

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        """The status now; NOT_FOUND for an unknown name."""
        status = self.status(request.service)
        if status == _Response.SERVICE_UNKNOWN:
            raise NotFound(f"no service {request.service!r} here", reason="SERVICE_UNKNOWN")
        return _Response(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        """The status now and at every change; an unknown name is SERVICE_UNKNOWN until it appears."""
        last = None
        while True:
            changed, status = self._changed, self.status(request.service)
            if status != last:
                await context.write(_Response(status=status))
                last = status
            if self._draining:
                return
            await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
