"""A server that speaks just enough HTTP/2 to end a gRPC call as no gRPC server can be made to: with raw frames of a test's choice."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tessera.v1 import inference_pb2 as pb

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0x0, 0x1, 0x3, 0x4, 0x6, 0x7
ACK = END_STREAM = 0x1
END_HEADERS = 0x4
OK_HEADERS = b"\x88" + b"\x40\x0ccontent-type\x10application/grpc"
"""HPACK: `:status 200` is entry 8 of the static table; the other header is literal."""

RESET = b""
"""In place of a frame: the connection is reset."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def number(value: int) -> bytes:
    return struct.pack(">I", value)


def headers(stream: int) -> bytes:
    return frame(HEADERS, END_HEADERS, stream, OK_HEADERS)


def message(stream: int, response: pb.StreamGenerateResponse) -> bytes:
    data = response.SerializeToString()
    return frame(DATA, 0, stream, b"\0" + number(len(data)) + data)


@asynccontextmanager
async def raw_server(answer: Callable[[int], list[bytes]]) -> AsyncIterator[str]:
    """Its address. Each call, by its stream's number, is answered with the frames of `answer`."""
    tasks: set[asyncio.Task[None]] = set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(24)  # the preface
        writer.write(frame(SETTINGS, 0, 0))
        while True:
            head = await reader.readexactly(9)
            payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
            kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
            if kind == SETTINGS and not flags & ACK:
                writer.write(frame(SETTINGS, ACK, 0))
            elif kind == PING and not flags & ACK:
                writer.write(frame(PING, ACK, 0, payload))
            elif kind == DATA and flags & END_STREAM:
                for part in answer(stream):
                    if part == RESET:
                        writer.transport.abort()
                    else:
                        writer.write(part)

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            await talk(reader, writer)
        writer.close()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(keep(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
