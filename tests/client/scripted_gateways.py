"""Gateways that answer by the book, behind sockets that can be cut, and that fail as a test says.

async with gateways(2) as (book, first, second):
    first.holds_after = 2          # its next stream sends two pieces, then waits
    ...
    first.cut()                    # every connection to it is reset
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from services.rpc.errors import Aborted, AlreadyExists, InvalidArgument, NotFound
from services.rpc.errors import FieldViolation as Violation
from services.rpc.server import RpcServer, ServerConfig
from tessera.v1 import inference_pb2 as pb
from tessera.v1 import inference_pb2_grpc

SERVICE = "tessera.v1.InferenceService"
WORDS = ("The ", "café ", "", "語", "😀 ", "ends", ". ")


@dataclass
class Known:
    """A request that the book has admitted."""

    generation: bytes
    number: int
    taken_over: asyncio.Event
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class Book:
    """What one scheduler knows, for all gateways of a test: whose request is whose, and the answer to each.

    The answer is drawn from the seed; its text comes one token late, as where it could still become a stop string.
    """

    def __init__(self) -> None:
        self.known: dict[str, Known] = {}
        self.admitted = 0

    def open(self, request: pb.StreamGenerateRequest) -> Known:
        """The request, whose earlier stream ends. Raises what a gateway refuses with."""
        generation, number = request.generation, request.resume.number
        body = generation.SerializeToString(deterministic=True)
        if request.HasField("resume"):
            _check(request.resume, generation)
        known = self.known.get(generation.request_id)
        if known is None:
            self.admitted += 1
        elif known.generation != body:
            raise AlreadyExists("another request has this id", reason="REQUEST_ID_IN_USE")
        elif number < known.number:
            raise Aborted("another stream has taken this request over", reason="TAKEN_OVER")
        else:
            known.taken_over.set()
        now = Known(body, number, asyncio.Event(), known.aborted if known else asyncio.Event())
        self.known[generation.request_id] = now
        return now


def answer_to(generation: pb.Generation) -> list[tuple[int, str]]:
    """Token ids, and the text of each."""
    seed = generation.sampling.seed
    return [((seed + index) % 1000, WORDS[(seed + index) % len(WORDS)]) for index in range(generation.sampling.max_tokens)]


def whole_pieces(generation: pb.Generation, token_offset: int = 0, text_offset: int = 0) -> list[pb.StreamGenerateResponse]:
    """What a gateway sends of the answer from these offsets on, a token a piece."""
    answer = answer_to(generation)
    text, pieces = b"".join(word.encode() for _, word in answer), []
    for count in range(token_offset + 1, len(answer) + 1):
        end = len("".join(word for _, word in answer[: count - 1]).encode())
        pieces.append(
            pb.StreamGenerateResponse(
                text=text[text_offset:end].decode(),
                text_offset=text_offset,
                token_ids=[answer[count - 1][0]],
                token_offset=count - 1,
            )
        )
        text_offset = max(text_offset, end)
    usage = pb.Usage(prompt_tokens=3, completion_tokens=len(answer), cached_tokens=1)
    finish = pb.Finish(
        reason=pb.FINISH_REASON_LENGTH, usage=usage, timings=pb.Timings(queue_us=1, ttft_us=2, tpot_us=3, total_us=4)
    )
    last = text[text_offset:].decode()
    pieces.append(
        pb.StreamGenerateResponse(text=last, text_offset=text_offset, token_offset=len(answer), finish=finish),
    )
    for piece in pieces:
        piece.request_id = generation.request_id
    return pieces


def _check(resume: pb.Resume, generation: pb.Generation) -> None:
    """Refuse what a gateway refuses, and what no honest client has received."""
    answer = answer_to(generation)
    ids = [token_id for token_id, _ in answer[: resume.token_offset]]
    problems = {
        "generation.request_id": not generation.request_id,
        "resume.number": resume.number < 1,
        "resume.token_ids": len(resume.token_ids) > 0 and list(resume.token_ids) != ids,
    }
    found = tuple(Violation(name, "is wrong") for name, is_wrong in problems.items() if is_wrong)
    if found:
        raise InvalidArgument(found)


class ScriptedGateway(inference_pb2_grpc.InferenceServiceServicer):
    """One gateway. Each of `holds_after`, `change` and `error` is used up by the next stream.

    `holds_after`: so many pieces are sent, then it waits for `go_on`. `change` makes others of the pieces. `error` is raised after
    these. `refusal` is raised by every call, until it is taken away.
    """

    def __init__(self, book: Book) -> None:
        self.book = book
        self.address = ""
        self.asked: list[pb.StreamGenerateRequest] = []
        self.calls: list[str] = []
        self.holds_after: int | None = None
        self.change: Callable[[list[pb.StreamGenerateResponse]], list[pb.StreamGenerateResponse]] | None = None
        self.error: Exception | None = None
        self.refusal: Exception | None = None
        self.go_on = asyncio.Event()
        self.left = asyncio.Event()
        self._arrived = asyncio.Event()
        self._server: RpcServer | None = None
        self._front: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    # -- the network in front of it

    async def start(self) -> None:
        """Listen, at the same address as before."""
        self._server = RpcServer(ServerConfig("127.0.0.1:0"))
        self._server.add(inference_pb2_grpc.add_InferenceServiceServicer_to_server, self, SERVICE)
        inner = int((await self._server.start()).rpartition(":")[2])
        port = int(self.address.rpartition(":")[2] or 0)

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", inner)
                self._writers |= {writer, inner_writer}
                await asyncio.wait([_pump(reader, inner_writer), _pump(inner_reader, writer)])

        self._front = await asyncio.start_server(carry, "127.0.0.1", port)
        self.address = f"127.0.0.1:{self._front.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Reset every connection; new ones are taken."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def kill(self) -> None:
        """Reset every connection, and take no new ones."""
        assert self._front is not None and self._server is not None
        self._front.close()
        self.cut()
        await self._server.stop(0)
        self._front = None

    async def end(self) -> None:
        """Cancel every call at once, as a server does that ends without a grace, and take no new ones."""
        assert self._front is not None and self._server is not None
        self._front.close()
        await self._server.stop(0)
        self.cut()
        self._front = None

    async def close(self) -> None:
        """Kill it, where that was not done."""
        if self._front is not None:
            await self.kill()

    # -- what it serves

    async def until_asked(self, count: int = 1) -> None:
        """Wait for so many streams."""
        while len(self.asked) < count:
            self._arrived.clear()
            await self._arrived.wait()

    async def StreamGenerate(self, request, context):
        self.asked.append(request)
        self._arrived.set()
        if self.refusal is not None:
            raise self.refusal
        known = self.book.open(request)
        holds_after, change, error = self.holds_after, self.change, self.error
        self.holds_after = self.change = self.error = None
        pieces = whole_pieces(request.generation, request.resume.token_offset, request.resume.text_offset)
        try:
            for index, piece in enumerate(change(pieces) if change is not None else pieces):
                if index == holds_after:
                    await _first_of(self.go_on.wait, known.taken_over.wait, known.aborted.wait)
                    if error is not None:
                        raise error
                if known.taken_over.is_set():
                    raise Aborted("another stream has taken this request over", reason="TAKEN_OVER")
                if known.aborted.is_set():
                    finish = pb.Finish(reason=pb.FINISH_REASON_ABORTED)
                    at = {"token_offset": piece.token_offset, "text_offset": piece.text_offset}
                    await context.write(pb.StreamGenerateResponse(request_id=piece.request_id, finish=finish, **at))
                    return
                await context.write(piece)
        finally:
            self.left.set()

    async def Abort(self, request, context):
        self._called("Abort")
        known = self.book.known.get(request.request_id)
        asked_here = any(asked.generation.request_id == request.request_id for asked in self.asked)
        if known is None or not asked_here:
            raise NotFound("no such request is running here", reason="REQUEST_NOT_FOUND")
        known.aborted.set()
        return pb.AbortResponse()

    async def Tokenize(self, request, context):
        self._called("Tokenize")
        return pb.TokenizeResponse(token_ids=[4, 5])

    async def Detokenize(self, request, context):
        self._called("Detokenize")
        return pb.DetokenizeResponse(text="text")

    async def GetModel(self, request, context):
        self._called("GetModel")
        return pb.GetModelResponse(model=pb.Model(name="m"))

    async def ListModels(self, request, context):
        self._called("ListModels")
        return pb.ListModelsResponse(models=[pb.Model(name="m")])

    def _called(self, method: str) -> None:
        self.calls.append(method)
        if self.refusal is not None:
            raise self.refusal


@asynccontextmanager
async def gateways(count: int) -> AsyncIterator[list[ScriptedGateway]]:
    """So many gateways that share a book."""
    book = Book()
    started = [ScriptedGateway(book) for _ in range(count)]
    try:
        for gateway in started:
            await gateway.start()
        yield started
    finally:
        for gateway in started:
            await gateway.close()


async def _first_of(*waits: Callable[[], Awaitable[object]]) -> None:
    tasks = [asyncio.ensure_future(wait()) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> "asyncio.Task[None]":
    async def run() -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    return asyncio.create_task(run())
