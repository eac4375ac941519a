"""The engine's port: a server of its own, in plain text, since the gateways that speak this protocol know no other."""

from typing import TYPE_CHECKING

from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from services.gateway.call_bounds import CallBounds
from services.gateway.config import GatewayConfig
from services.gateway.session import SchedulerSession
from services.gateway.vllm_engine.servicer import VllmEngineServicer
from services.rpc.metrics_server import MetricsServer
from services.rpc.server import RpcServer, ServerConfig

if TYPE_CHECKING:
    from services.rpc.spans import Tracing

SERVICE_NAME: str = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].full_name


def engine_server(
    config: GatewayConfig,
    session: SchedulerSession,
    bounds: CallBounds,
    metrics: MetricsServer | None = None,
    tracing: "Tracing | None" = None,
) -> RpcServer:
    """The server, not started yet. Session and limits are those of the public API."""
    listens = ServerConfig(
        config.engine_listen, receive_bytes_max=config.receive_bytes_max, calls_max=config.max_concurrent_requests
    )
    server = RpcServer(listens, metrics, tracing)
    servicer = VllmEngineServicer(config, session, bounds)
    server.add(vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server, servicer, SERVICE_NAME, ready=False)
    return server
