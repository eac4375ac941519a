"""Streams that are read in a process of their own and counted there: what reads them must not slow what counts."""

import asyncio
import json
import multiprocessing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import grpc

from tessera.v1 import inference_pb2 as pb
from tessera.v1 import inference_pb2_grpc

BEGIN_TIMEOUT_S = 120.0

PROMPT = "The quick brown fox jumps over the lazy dog, and seven wizards brew potions by the river."

WINDOW_BYTES = 1024
"""What may be on its way to a reader that pauses, on each of its streams: some twenty messages. gRPC's own is some 10,000, which are sent
ahead whether anybody reads or not."""

OWN_CONNECTION = ("grpc.use_local_subchannel_pool", 1)  # else all channels to one address share one
SMALL_WINDOW = (("grpc.http2.lookahead_bytes", WINDOW_BYTES), ("grpc.http2.bdp_probe", 0))


@dataclass(frozen=True, slots=True)
class Reading:
    """`count` streams of up to `max_tokens` tokens each from `address`, spread over `connections`; one that ends begins again. With
    `pause_s` each rests so long after every message. `http_model`: it is OpenAI's HTTP API that serves this model, where every stream needs
    a connection of its own."""

    address: str
    count: int
    max_tokens: int
    connections: int = 8
    pause_s: float = 0.0
    http_model: str = ""


@dataclass(frozen=True, slots=True)
class Counts:
    """What all streams have been sent so far. Of HTTP no tokens are known."""

    messages: int
    tokens: int

    def __sub__(self, earlier: "Counts") -> "Counts":
        return Counts(self.messages - earlier.messages, self.tokens - earlier.tokens)


class Readers:
    """Reads from its construction to `close`."""

    def __init__(self, reading: Reading) -> None:
        context = multiprocessing.get_context("spawn")
        self._counts = context.Array("Q", 2, lock=False)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, self._counts, reading), daemon=True)
        self._process.start()
        theirs.close()

    def wait_begun(self) -> None:
        """Until every stream has had a message."""
        assert self._pipe.poll(BEGIN_TIMEOUT_S), "the streams have not begun"
        error = self._pipe.recv()
        assert error is None, error

    def counts(self) -> Counts:
        """As of now. Raises AssertionError where the streams have failed."""
        assert not self._pipe.poll(), self._pipe.recv()
        messages, tokens = self._counts
        return Counts(messages, tokens)

    def close(self) -> None:
        """End all streams, as clients do that go away."""
        self._process.kill()
        self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _run(pipe: Connection, counts: Any, reading: Reading) -> None:
    try:
        asyncio.run(_Streams(pipe, counts, reading).read())
    except Exception as error:  # noqa: BLE001 - told to who waits
        pipe.send(f"{type(error).__name__}: {error}")


class _Streams:
    """`counts`: messages and tokens so far."""

    def __init__(self, pipe: Connection, counts: Any, reading: Reading) -> None:
        self._pipe = pipe
        self._counts = counts
        self._reading = reading
        self._begun: set[int] = set()

    async def read(self) -> None:
        """For ever."""
        reading = self._reading
        options = [OWN_CONNECTION, *(SMALL_WINDOW if reading.pause_s else ())]
        channels = [grpc.aio.insecure_channel(reading.address, options=options) for _ in range(reading.connections)]
        async with asyncio.TaskGroup() as group:
            for number in range(reading.count):
                channel = channels[number % len(channels)]
                group.create_task(self._read_http(number) if reading.http_model else self._read_grpc(number, channel))

    async def _read_grpc(self, number: int, channel: grpc.aio.Channel) -> None:
        sampling = pb.Sampling(temperature=0.0, max_tokens=self._reading.max_tokens, ignore_eos=True)
        request = pb.StreamGenerateRequest(generation=pb.Generation(text=_prompt(number), sampling=sampling))
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        while True:
            async for piece in stub.StreamGenerate(request):
                self._count(number, len(piece.token_ids))
                if self._reading.pause_s:
                    await asyncio.sleep(self._reading.pause_s)

    async def _read_http(self, number: int) -> None:
        host, _, port = self._reading.address.rpartition(":")
        options = {"max_tokens": self._reading.max_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
        body = json.dumps({"model": self._reading.http_model, "prompt": _prompt(number), **options})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._reading.address}\r\nContent-Type: application/json\r\n"
        request = f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        while True:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(request)
            status = await reader.readline()
            assert b" 200 " in status, status
            async for line in reader:
                if line.startswith(b"data: {"):
                    self._count(number, 0)
            writer.close()

    def _count(self, number: int, num_tokens: int) -> None:
        self._counts[0] += 1
        self._counts[1] += num_tokens
        if len(self._begun) < self._reading.count:
            self._begun.add(number)
            if len(self._begun) == self._reading.count:
                self._pipe.send(None)


def _prompt(number: int) -> str:
    return f"{number}. {PROMPT}"
