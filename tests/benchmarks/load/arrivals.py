"""Requests that come at a rate, whatever becomes of those before them (an open loop), from processes of their own."""

import asyncio
import gc
import multiprocessing
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import grpc

from services.rpc.status import reason_of
from tessera.v1 import inference_pb2 as pb
from tessera.v1 import inference_pb2_grpc
from tests.benchmarks.load.readers import OWN_CONNECTION, PROMPT

CONNECTIONS = 4
"""Of each process."""

END_TIMEOUT_S = 120.0
LAG_SLEEP_S = 0.01

PUSHBACK_TRAILER = "grpc-retry-pushback-ms"
RETRY_INFO = b"google.rpc.RetryInfo"


@dataclass(frozen=True, slots=True)
class Offer:
    """`rate` requests a second, at random moments, for `seconds`; each for a stream of `tokens` tokens."""

    address: str
    rate: float
    seconds: float
    tokens: int


@dataclass
class Outcomes:
    """What became of an offer. Times are milliseconds, of refusals until their status was there: `from_send_ms` since they were handed to gRPC,
    `from_due_ms` since they were to be. The difference is the client's own lag, which is no server's doing."""

    offered: int = 0
    served: int = 0
    refused: int = 0
    without_retry: int = 0  # of the refused, those without RetryInfo or without the trailer that gRPC heeds
    failed: Counter[str] = field(default_factory=Counter)  # anything else, by what it was
    from_send_ms: list[float] = field(default_factory=list)
    from_due_ms: list[float] = field(default_factory=list)
    client_lag_ms: list[float] = field(default_factory=list)  # by how much sleeps of LAG_SLEEP_S took longer

    def add(self, other: "Outcomes") -> None:
        """Count those of another process too."""
        self.offered += other.offered
        self.served += other.served
        self.refused += other.refused
        self.without_retry += other.without_retry
        self.failed.update(other.failed)
        self.from_send_ms += other.from_send_ms
        self.from_due_ms += other.from_due_ms
        self.client_lag_ms += other.client_lag_ms


class Arrivals:
    """An offer, spread over `processes`; it begins at once."""

    def __init__(self, offer: Offer, processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        share = Offer(offer.address, offer.rate / processes, offer.seconds, offer.tokens)
        self._pipes = []
        for number in range(processes):
            pipe, theirs = context.Pipe()
            context.Process(target=_run, args=(theirs, share, number), daemon=True).start()
            theirs.close()
            self._pipes.append(pipe)
        for pipe in self._pipes:
            pipe.recv()
        for pipe in self._pipes:
            pipe.send(None)

    @property
    def have_ended(self) -> bool:
        """Whether every answer is there."""
        return all(pipe.poll() for pipe in self._pipes)

    def outcomes(self) -> Outcomes:
        """Wait for all answers."""
        total = Outcomes()
        for pipe in self._pipes:
            assert pipe.poll(END_TIMEOUT_S), "answers are missing"
            total.add(pipe.recv())
        return total


def _run(pipe: Connection, offer: Offer, number: int) -> None:
    gc.freeze()  # collections are lag: let them look at little
    pipe.send(None)
    pipe.recv()
    pipe.send(asyncio.run(_offer(offer, random.Random(number))))


async def _offer(offer: Offer, rng: random.Random) -> Outcomes:
    options = [OWN_CONNECTION, ("grpc.enable_retries", 0)]
    channels = [grpc.aio.insecure_channel(offer.address, options=options) for _ in range(CONNECTIONS)]
    stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
    await asyncio.gather(*(channel.channel_ready() for channel in channels))
    sampling = pb.Sampling(temperature=0.0, max_tokens=offer.tokens, ignore_eos=True)
    outcomes, due_s = Outcomes(), time.monotonic()
    end_s = due_s + offer.seconds
    lag = asyncio.create_task(_note_lag(outcomes))
    async with asyncio.TaskGroup() as group:
        while (due_s := due_s + rng.expovariate(offer.rate)) < end_s:
            await asyncio.sleep(due_s - time.monotonic())  # a turn of the loop where it is late
            generation = pb.Generation(text=f"{outcomes.offered}. {PROMPT}", sampling=sampling)
            stub = stubs[outcomes.offered % CONNECTIONS]
            outcomes.offered += 1
            group.create_task(_ask(stub, pb.StreamGenerateRequest(generation=generation), offer.tokens, due_s, outcomes))
    lag.cancel()
    return outcomes


async def _note_lag(outcomes: Outcomes) -> None:
    while True:
        began_s = time.monotonic()
        await asyncio.sleep(LAG_SLEEP_S)
        outcomes.client_lag_ms.append(1000 * (time.monotonic() - began_s - LAG_SLEEP_S))


async def _ask(stub: Any, request: pb.StreamGenerateRequest, tokens: int, due_s: float, outcomes: Outcomes) -> None:
    sent_s, received = time.monotonic(), 0
    try:
        async for piece in stub.StreamGenerate(request):
            received += len(piece.token_ids)
        if received == tokens:
            outcomes.served += 1
        else:
            outcomes.failed[f"{received} tokens"] += 1
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED or received:
            outcomes.failed[f"{error.code().name} {reason_of(error)} after {received} tokens"] += 1
            return
        ended_s = time.monotonic()
        outcomes.refused += 1
        outcomes.from_send_ms.append(1000 * (ended_s - sent_s))
        outcomes.from_due_ms.append(1000 * (ended_s - due_s))
        outcomes.without_retry += not _says_when(error)


def _says_when(error: grpc.aio.AioRpcError) -> bool:
    trailers = dict(error.trailing_metadata() or ())
    details = trailers.get("grpc-status-details-bin", b"")
    return int(trailers.get(PUSHBACK_TRAILER, 0)) > 0 and RETRY_INFO in details
