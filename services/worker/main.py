"""The worker process: one model replica behind gRPC. The event loop runs in the main thread, the forward passes in another."""

import asyncio
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import structlog

from model_worker.engine import Engine
from model_worker.ranks.crew import RankLost
from services.rpc.logs import configure_logs
from services.rpc.metrics_server import MetricsServer
from services.rpc.server import RpcServer, ServerConfig, stop_signal
from services.rpc.tracing import start_tracing
from services.settled_heap import settle_heap
from services.worker.config import WorkerConfig
from services.worker.engine_thread import EngineThread
from services.worker.loading import load_engine, load_in_background
from services.worker.metrics import StepMetrics, worker_metrics
from services.worker.rank_processes import RankProcesses
from services.worker.servicer import SERVICE_NAME, WorkerServicer
from tessera.worker.v1 import worker_pb2_grpc

if TYPE_CHECKING:
    from services.rpc.spans import Tracing
    from services.worker.slot_traces import SlotTraces

_log = structlog.get_logger()

STOP_GRACE_S = 2.0
"""How long calls other than Execute, which has ended by then, may go on after SIGTERM."""


def run(config: WorkerConfig, load: Callable[..., Engine] = load_engine) -> NoReturn:
    """Serve until SIGTERM or SIGINT, then let the requests go elsewhere, finish the started batch and exit 0. Raises what `load(config, ranks=)`
    raises, and BindError. Exits 1 at once where another rank is lost."""
    configure_logs("worker", config.log_level)
    status = 0
    try:
        asyncio.run(_serve_with_ranks(config, load))
    except RankLost as error:
        _log.error("the worker ends", reason=str(error))
        status = 1
    logging.shutdown()
    os._exit(
        status
    )  # not by way of the interpreter's end, which a thread inside torch (it loads, or watches a neighbour) would break into an abort


async def _serve_with_ranks(config: WorkerConfig, load: Callable[..., Engine]) -> None:
    ranks = RankProcesses(config)
    try:
        await ranks.start()
        await serve(config, partial(load, ranks=ranks), ranks)
    finally:
        await ranks.stop()


async def serve(config: WorkerConfig, load: Callable[[WorkerConfig], Engine], ranks: RankProcesses | None = None) -> None:
    """Answer health at once, load in the background, serve until a signal. Raises what `load` raises, BindError, RankLost when one of `ranks`
    is, and any bug that ends the engine: the process must not go on with slots that it cannot trust. A signal that comes while the
    model loads leaves a thread at it."""
    stop, lost = stop_signal(), (ranks or RankProcesses(config)).lost
    metrics = MetricsServer(config.metrics_listen) if config.metrics_listen else None
    tracing = start_tracing("worker", config.otlp_endpoint)
    traces: SlotTraces | None = None
    server = RpcServer(ServerConfig(listen=config.listen, ready_file=config.ready_file, access=config.access), metrics)
    servicer = WorkerServicer(config.heartbeat_ms / 1000)
    server.add(worker_pb2_grpc.add_WorkerServiceServicer_to_server, servicer, SERVICE_NAME, ready=False)
    address = await server.start(announce=False)
    try:
        loading = load_in_background(load, config)
        await asyncio.wait((stop, loading, lost), return_when=asyncio.FIRST_COMPLETED)
        if lost.done():
            lost.result()
        if not loading.done():
            return
        engine = loading.result()
        traces = _slot_traces(engine, tracing, address)
        thread = _engine_thread(engine, metrics, traces)
        settle_heap()
        servicer.open(thread)
        server.health.set_ready(SERVICE_NAME, True)
        server.announce(address)
        _log.info("serving", address=address)
        await asyncio.wait((stop, thread.crashed, lost), return_when=asyncio.FIRST_COMPLETED)
        for end in (lost, thread.crashed):
            if end.done():
                end.result()
        server.health.drain()
        await servicer.leave(config.drain_grace_s)
        await servicer.drain()
        await thread.end()
    finally:
        await server.stop(STOP_GRACE_S if stop.done() else 0)
        if traces is not None:
            traces.close()
        if tracing is not None:
            await tracing.stop()


def _engine_thread(engine: Engine, metrics: MetricsServer | None, traces: "SlotTraces | None") -> EngineThread:
    notes = [] if traces is None else [traces.note]
    if metrics is not None:
        metrics.show(partial(worker_metrics, engine.description))
        notes.append(StepMetrics(metrics.registry, engine.description.model.name).note)
    return EngineThread(engine, notes)


def _slot_traces(engine: Engine, tracing: "Tracing | None", address: str) -> "SlotTraces | None":
    if tracing is None:
        return None
    from services.worker.slot_traces import SlotTraces  # here: it needs OpenTelemetry

    return SlotTraces(tracing, engine.description.limits.max_num_seqs, address)
