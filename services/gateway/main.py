"""The gateway process: text in, tokens to the scheduler, text out."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from gateway.tokenizer_source import load_tokenizer
from services.gateway.admin_servicer import SERVICE_NAME as ADMIN_SERVICE_NAME
from services.gateway.admin_servicer import AdminServicer
from services.gateway.call_bounds import CallBounds
from services.gateway.config import GatewayConfig
from services.gateway.engine_protocol import check_installed
from services.gateway.metrics import gateway_metrics
from services.gateway.servicer import SERVICE_NAME, InferenceServicer
from services.gateway.session import SchedulerSession
from services.rpc.channel import use_identity
from services.rpc.logs import configure_logs
from services.rpc.metrics_server import MetricsServer
from services.rpc.server import RpcServer, ServerConfig, stop_signal
from services.rpc.tokens import Role
from services.rpc.tracing import start_tracing
from services.settled_heap import settle_heap
from tessera.v1 import admin_pb2_grpc, inference_pb2_grpc
from tessera.values.known_models import locate

STATUS_S = 1.0
"""How long the last calls have to tell their clients how they ended."""

ENDED_AT_ONCE = 16
ENDING_STEP_S = 0.1
ENDING_STEPS_MAX = 40
"""After the grace so many streams end in each step, or more where these would be too many steps."""

CONNECTION_AGE_S = 1800.0
"""A client's connection is asked to end after this, so that clients find new gateways; its streams go on."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway that answers. `sessions` is the task that keeps the session up: it ends only by a bug. `engine_address`: that of the
    engine's port, empty without one."""

    address: str
    session: SchedulerSession
    sessions: asyncio.Task[None]
    engine_address: str = ""


@asynccontextmanager
async def serving(config: GatewayConfig) -> AsyncIterator[Gateway]:
    """A gateway for as long as the body runs, then drained. Raises ModelError or TokenizerError where the model cannot be used,
    BindError where an address cannot be listened on, ConfigError where the engine's protocol, or what traces need, is not installed."""
    if config.engine_listen:
        check_installed()
    tokenizer = await asyncio.to_thread(load_tokenizer, locate(config.model))
    metrics = MetricsServer(config.metrics_listen) if config.metrics_listen else None
    tracing = start_tracing("gateway", config.otlp_endpoint, config.trace_sample_ratio)
    server = RpcServer(
        ServerConfig(
            listen=config.listen,
            receive_bytes_max=config.receive_bytes_max,
            ready_file=config.ready_file,
            connection_age_s=CONNECTION_AGE_S,
            calls_max=config.max_concurrent_requests,
            access=config.access,
            is_public=True,
            client_ca=config.tls_client_ca,
        ),
        metrics,
        tracing,
    )

    services = {SERVICE_NAME: server, ADMIN_SERVICE_NAME: server}

    def standing(ready: bool) -> None:
        for name, serves in services.items():
            serves.health.set_ready(name, ready)

    session = SchedulerSession(config, tokenizer, standing)
    bounds = CallBounds.of(config, session.live)
    servicer = InferenceServicer(session, bounds, config.scheduler_wait_ms / 1000, config.share_prefixes)
    add = inference_pb2_grpc.add_InferenceServiceServicer_to_server
    server.add(add, servicer, SERVICE_NAME, ready=False, role=Role.PUBLIC)
    admin = AdminServicer(session, config.scheduler_wait_ms / 1000)
    server.add(admin_pb2_grpc.add_AdminServiceServicer_to_server, admin, ADMIN_SERVICE_NAME, ready=False, role=Role.ADMIN)
    if metrics is not None:
        metrics.show(partial(gateway_metrics, session, bounds))
    others: dict[str, str] = {}
    if config.engine_listen:
        from services.gateway.vllm_engine import port  # here: the protocol is an extra

        services[port.SERVICE_NAME] = engine = port.engine_server(config, session, bounds, metrics, tracing)
        others["engine_address"] = await engine.start()
    address = await server.start(others=others)
    sessions = asyncio.create_task(session.run())
    looking = asyncio.create_task(bounds.readers.run())
    try:
        yield Gateway(address, session, sessions, others.get("engine_address", ""))
    finally:
        servers = set(services.values())
        for serves in servers:
            serves.health.drain()
        session.drain()
        await bounds.calls.all_ended(0 if sessions.done() else config.drain_grace_s)
        await _end_streams(session)
        await asyncio.gather(*(serves.stop(STATUS_S) for serves in servers))
        await session.close()
        sessions.cancel()
        looking.cancel()
        await asyncio.wait((sessions, looking))
        if tracing is not None:
            await tracing.stop()


async def _end_streams(session: SchedulerSession) -> None:
    """Not all in one moment: their clients come to another gateway at once, and for each that has to read the whole prompt again."""
    count = max(ENDED_AT_ONCE, -(-len(session.live) // ENDING_STEPS_MAX))
    while session.end_some(count):  # noqa: ASYNC110 - a pace, not a wait for something
        await asyncio.sleep(ENDING_STEP_S)


def run(config: GatewayConfig) -> None:
    """Serve until SIGTERM or SIGINT, then drain. Raises what `serving` raises, and ConfigError where a file of `access` cannot be used."""
    configure_logs("gateway", config.log_level)
    use_identity(config.access, config.token_file)
    asyncio.run(_run(config))


async def _run(config: GatewayConfig) -> None:
    stop = stop_signal()
    async with serving(config) as gateway:
        settle_heap()
        await asyncio.wait((stop, gateway.sessions), return_when=asyncio.FIRST_COMPLETED)
        if not stop.done():
            gateway.sessions.result()  # raises what ended it
