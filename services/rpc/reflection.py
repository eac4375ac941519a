"""Server reflection, so that tools can call a server without its .proto files."""

from collections.abc import Iterable

import grpc
from grpc_reflection.v1alpha import _async, reflection_pb2, reflection_pb2_grpc

_V1_NAME = "grpc.reflection.v1.ServerReflection"


def add_reflection(server: grpc.aio.Server, service_names: Iterable[str]) -> None:
    """Serve reflection of `service_names` (full names) as v1alpha, and under the name of v1: the messages are the same on the wire,
    but `grpcio-reflection` knows only the older name, and strict tools ask for the newer."""
    alpha_name = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"].full_name
    servicer = _async.ReflectionServicer((*service_names, alpha_name))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_V1_NAME, {"ServerReflectionInfo": handler}),))
