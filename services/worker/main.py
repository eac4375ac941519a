"""The worker process: one model replica behind gRPC. The event loop runs in the main thread, the forward passes in another."""

import asyncio
import logging
import os
from collections.abc import Callable

import structlog

from model_worker.engine import Engine
from services.rpc.logs import configure_logs
from services.rpc.server import RpcServer, ServerConfig, stop_signal
from services.worker.config import WorkerConfig
from services.worker.engine_thread import EngineThread
from services.worker.loading import load_engine, load_in_background
from services.worker.servicer import SERVICE_NAME, WorkerServicer
from tessera.worker.v1 import worker_pb2_grpc

_log = structlog.get_logger()

STOP_GRACE_S = 2.0
"""How long calls other than Execute, which has ended by then, may go on after SIGTERM."""


def run(config: WorkerConfig) -> None:
    """Serve until SIGTERM or SIGINT, then let the requests go elsewhere and finish the started batch. Raises what `load_engine` raises,
    and BindError."""
    configure_logs("worker", config.log_level)
    if not asyncio.run(serve(config, load_engine)):
        logging.shutdown()
        os._exit(0)  # not by way of the interpreter's end, which a thread inside torch would break into an abort


async def serve(config: WorkerConfig, load: Callable[[WorkerConfig], Engine]) -> bool:
    """Answer health at once, load in the background, serve until a signal. Raises what `load` raises, BindError, and any bug that
    ends the engine: the process must not go on with slots that it cannot trust. False where the signal came while the model was
    loading: a thread is still at it."""
    stop = stop_signal()
    server = RpcServer(ServerConfig(listen=config.listen, ready_file=config.ready_file))
    servicer = WorkerServicer(config.heartbeat_ms / 1000)
    server.add(worker_pb2_grpc.add_WorkerServiceServicer_to_server, servicer, SERVICE_NAME, ready=False)
    address = await server.start(announce=False)
    try:
        loading = load_in_background(load, config)
        await asyncio.wait((stop, loading), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            return False
        thread = EngineThread(loading.result())
        servicer.open(thread)
        server.health.set_ready(SERVICE_NAME, True)
        server.announce(address)
        _log.info("serving", address=address)
        await asyncio.wait((stop, thread.crashed), return_when=asyncio.FIRST_COMPLETED)
        if thread.crashed.done():
            thread.crashed.result()
        server.health.drain()
        await servicer.leave(config.drain_grace_s)
        await servicer.drain()
        thread.close()
        return True
    finally:
        await server.stop(STOP_GRACE_S if stop.done() else 0)
