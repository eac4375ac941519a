"""The scheduler process: takes an epoch, attaches its worker, serves sessions with gateways."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import structlog

from services.rpc.logs import configure_logs
from services.rpc.server import RpcServer, ServerConfig, stop_signal
from services.scheduler.config import SchedulerConfig
from services.scheduler.sessions import SessionServicer
from services.scheduler.store.port import Store
from services.scheduler.store.redis_store import RedisStore
from services.scheduler.term import GatewayAhead, Term
from tessera.scheduler.v1 import session_pb2, session_pb2_grpc

_log = structlog.get_logger()

SERVICE_NAME = session_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name

DRAIN_POLL_S = 0.05


def run(config: SchedulerConfig) -> None:
    """Serve until SIGTERM or SIGINT, then drain. Raises Deposed where another scheduler has taken over, and BindError."""
    configure_logs("scheduler", config.log_level)
    asyncio.run(_run(config))


async def _run(config: SchedulerConfig) -> None:
    stop = stop_signal()
    async with _serving(config) as terms:
        await asyncio.wait((stop, terms.running), return_when=asyncio.FIRST_COMPLETED)
        if terms.running.done():
            terms.running.result()  # raises what ended the last term
        await _drain(terms.present, config.drain_grace_s)


class _Terms:
    """One term after the other, for as long as this process may lead."""

    def __init__(
        self, config: SchedulerConfig, store: Store, sessions: SessionServicer, serving: Callable[[bool], None]
    ) -> None:
        self.present = Term(config, store)
        self.running = asyncio.create_task(self._run(config, store, sessions, serving))

    async def _run(
        self, config: SchedulerConfig, store: Store, sessions: SessionServicer, serving: Callable[[bool], None]
    ) -> None:
        while True:
            try:
                await self.present.run(serving, sessions.invite)
            except GatewayAhead as ahead:
                _log.warning("a new term begins", reason=str(ahead))
                self.present = Term(config, store, told=ahead.number)
            finally:
                sessions.stand_by()


@contextlib.asynccontextmanager
async def _serving(config: SchedulerConfig) -> AsyncIterator[_Terms]:
    store = RedisStore(config.redis_url, config.group)
    server = RpcServer(ServerConfig(listen=config.listen, ready_file=config.ready_file))
    sessions = SessionServicer()
    terms = _Terms(config, store, sessions, lambda ready: server.health.set_ready(SERVICE_NAME, ready))
    add: Any = session_pb2_grpc.add_SchedulerServiceServicer_to_server
    server.add(add, sessions, SERVICE_NAME, ready=False)
    try:
        await server.start()
        yield terms
    finally:
        sessions.stand_by()
        await server.stop(1.0)
        terms.running.cancel()
        await asyncio.wait((terms.running,))
        await store.close()


async def _drain(term: Term, grace_s: float) -> None:
    """Admit nothing new, and wait for what runs; what is left then waits in Redis for the next scheduler."""
    if term.leader is None:
        return
    term.leader.drain()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            while not term.leader.is_idle:  # noqa: ASYNC110 - what ends the wait has no one event
                await asyncio.sleep(DRAIN_POLL_S)
