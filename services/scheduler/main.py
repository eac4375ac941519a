"""The scheduler process: takes an epoch, attaches its worker, serves sessions with gateways."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import structlog

from services.rpc.logs import configure_logs
from services.rpc.server import RpcServer, ServerConfig, stop_signal
from services.scheduler.config import SchedulerConfig
from services.scheduler.sessions import SessionServicer
from services.scheduler.store.redis_store import RedisStore
from services.scheduler.term import Term
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
    async with _serving(config) as (term, leading):
        await asyncio.wait((stop, leading), return_when=asyncio.FIRST_COMPLETED)
        if leading.done():
            leading.result()  # raises what ended the term
        await _drain(term, config.drain_grace_s)


@contextlib.asynccontextmanager
async def _serving(config: SchedulerConfig) -> AsyncIterator[tuple[Term, "asyncio.Task[None]"]]:
    store = RedisStore(config.redis_url, config.group)
    term = Term(config, store)
    server = RpcServer(ServerConfig(listen=config.listen, ready_file=config.ready_file))
    add: Any = session_pb2_grpc.add_SchedulerServiceServicer_to_server
    server.add(add, SessionServicer(term), SERVICE_NAME, ready=False)
    await server.start()
    leading = asyncio.create_task(term.run(lambda ready: server.health.set_ready(SERVICE_NAME, ready)))
    try:
        yield term, leading
    finally:
        if term.leader is not None:
            term.leader.close_sessions()
        await server.stop(1.0)
        leading.cancel()
        await asyncio.wait((leading,))
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
