"""The scheduler process: stands by, leads when it may, and stands by again; serves sessions with gateways all the time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from services.rpc.channel import use_identity
from services.rpc.logs import configure_logs
from services.rpc.metrics_server import MetricsServer
from services.rpc.server import RpcServer, ServerConfig, stop_signal
from services.rpc.tracing import start_tracing
from services.scheduler.config import SchedulerConfig
from services.scheduler.metrics import scheduler_metrics
from services.scheduler.sessions import SessionServicer
from services.scheduler.store.redis_store import RedisStore
from services.scheduler.terms import DURABLE, READY, SERVICE_NAME, Terms
from services.settled_heap import settle_heap
from tessera.scheduler.v1 import session_pb2_grpc

SESSIONS_END_S = 0.5
"""For sessions to end by themselves, once the process neither leads nor stands by."""


def run(config: SchedulerConfig) -> None:
    """Serve until SIGTERM or SIGINT, then hand over. Raises BindError, and ConfigError where a file of `access` or the one with Redis's
    password cannot be used."""
    configure_logs("scheduler", config.log_level)
    use_identity(config.access, config.token_file)
    asyncio.run(_run(config))


async def _run(config: SchedulerConfig) -> None:
    stop = stop_signal()
    async with _serving(config) as terms:
        settle_heap()
        await asyncio.wait((stop, terms.running), return_when=asyncio.FIRST_COMPLETED)
        if terms.running.done():
            terms.running.result()  # raises: it ends by nothing but a bug


@contextlib.asynccontextmanager
async def _serving(config: SchedulerConfig) -> AsyncIterator[Terms]:
    store = RedisStore(config.redis_url, config.group, password_file=config.redis_password_file)
    metrics = MetricsServer(config.metrics_listen) if config.metrics_listen else None
    tracing = start_tracing("scheduler", config.otlp_endpoint)
    server = RpcServer(ServerConfig(listen=config.listen, ready_file=config.ready_file, access=config.access), metrics)
    sessions = SessionServicer()
    add: Any = session_pb2_grpc.add_SchedulerServiceServicer_to_server
    server.add(add, sessions, SERVICE_NAME, ready=False)
    for name in (DURABLE, READY):
        server.health.set_ready(name, False)
    terms = Terms(config, store, sessions, server.health, tracing)
    if metrics is not None:
        metrics.show(partial(scheduler_metrics, terms))
    try:
        await server.start()
        yield terms
    finally:
        await terms.end()
        await server.stop(SESSIONS_END_S)
        await store.close()
        if tracing is not None:
            await tracing.stop()
