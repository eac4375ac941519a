"""A gateway that answers by the book, as a process of its own, to be stopped. It tells its address on standard output.

Its argument is for how many seconds it holds Python's interpreter in the middle of an answer, in one call during which none of its other
threads can run any Python.
"""

import asyncio
import ctypes
import sys

from scripted_gateways import SERVICE, Book, whole_pieces

from services.rpc.server import RpcServer, ServerConfig
from tessera.v1 import inference_pb2 as pb
from tessera.v1 import inference_pb2_grpc


class SlowGateway(inference_pb2_grpc.InferenceServiceServicer):
    """A piece every 20 ms."""

    def __init__(self, hold_s: int) -> None:
        self._hold_s = hold_s
        self._book = Book()

    async def StreamGenerate(self, request, context):
        self._book.open(request)
        pieces = whole_pieces(request.generation, request.resume.token_offset, request.resume.text_offset)
        for index, piece in enumerate(pieces):
            await context.write(piece)
            await asyncio.sleep(0.02)
            if self._hold_s and index == len(pieces) // 2:
                ctypes.PyDLL(None).sleep(self._hold_s)

    async def GetModel(self, request, context):
        return pb.GetModelResponse(model=pb.Model(name="m"))


async def serve(hold_s: int) -> None:
    server = RpcServer(ServerConfig("127.0.0.1:0"))
    server.add(inference_pb2_grpc.add_InferenceServiceServicer_to_server, SlowGateway(hold_s), SERVICE)
    print("address", await server.start(), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
