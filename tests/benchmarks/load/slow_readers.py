"""What clients that do not read cost those who do: run `make bench-slow-readers`; a table, then one JSON line.

A whole system serves a model that takes 20 ms for each step, whatever is in it. One reader takes its tokens as they come, and the times between
them (ITL) are noted: alone, and beside streams whose clients read one message, then none, with small windows, so that the gateway cannot
send ahead. The two take turns. At the end the stalled streams are left until the gateway has ended them, then read to their ends, each of which must
be RESOURCE_EXHAUSTED with the reason SLOW_READER.
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import statistics
import time
from collections import Counter
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

import grpc

from services.rpc.status import reason_of
from tessera.client import Client
from tessera.v1 import inference_pb2 as pb
from tessera.v1 import inference_pb2_grpc
from tests.benchmarks.load.readers import OWN_CONNECTION, PROMPT, SMALL_WINDOW
from tests.benchmarks.load.stage import machine, pid_of, rss_mib, stage

RATIO_MAX = 1.5
SLOW_READER_S = 10.0
MAX_TOKENS = 4000
FILL_S = 1.5
"""Until the windows of stalled streams are full: some twenty messages of a token each."""

CONNECTIONS = 5
ENDS_TIMEOUT_S = 60.0


class Stalled:
    """Clients in a process of their own that read one message and no more, until `ends`."""

    def __init__(self, address: str, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_stall, args=(theirs, address, count), daemon=True)
        self._process.start()
        theirs.close()
        assert self._pipe.poll(ENDS_TIMEOUT_S), "the streams have not begun"
        self._pipe.recv()

    def ends(self) -> Counter[str]:
        """Read all of them to their ends, and count these."""
        self._pipe.send(None)
        assert self._pipe.poll(ENDS_TIMEOUT_S), "the streams have not ended"
        return Counter(self._pipe.recv())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.join()


def _stall(pipe: Connection, address: str, count: int) -> None:
    asyncio.run(_stall_all(pipe, address, count))


async def _stall_all(pipe: Connection, address: str, count: int) -> None:
    channels = [grpc.aio.insecure_channel(address, options=[OWN_CONNECTION, *SMALL_WINDOW]) for _ in range(CONNECTIONS)]
    stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
    sampling = pb.Sampling(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    calls = []
    for number in range(count):
        generation = pb.Generation(text=f"{number}. {PROMPT}", sampling=sampling)
        calls.append(stubs[number % CONNECTIONS].StreamGenerate(pb.StreamGenerateRequest(generation=generation)))
    await asyncio.gather(*(call.read() for call in calls))
    pipe.send(None)
    await asyncio.to_thread(pipe.recv)
    pipe.send(await asyncio.gather(*map(_end_of, calls)))


async def _end_of(call: grpc.aio.UnaryStreamCall) -> str:
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name} {reason_of(error)}"
    return "OK"


def gaps_ms(client: Client, tokens: int) -> list[float]:
    """Times between the messages of one stream that is read at once."""
    times = []
    for _ in client.stream(PROMPT, temperature=0.0, max_tokens=tokens, ignore_eos=True):
        times.append(time.monotonic())
    return [1000 * (later - earlier) for earlier, later in itertools.pairwise(times)]


def p99(values: list[float]) -> float:
    """The value that one in a hundred exceeds."""
    return statistics.quantiles(values, n=100)[98]


def main() -> int:
    """Print a table, and the figures as one JSON line. The exit status is 1 where the budget is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stalled", type=int, default=50, help="streams that are not read")
    parser.add_argument("--tokens", type=int, default=200, help="of the reader that is measured, in one round")
    arguments = parser.parse_args()
    gaps: dict[str, list[list[float]]] = {"alone": [], "beside": []}
    with (
        stage(gateway=["--slow-reader-ms", str(int(1000 * SLOW_READER_S))], paced=True) as stack,
        Client(stack.address) as client,
    ):
        gateway = pid_of(stack.gateway)
        gaps_ms(client, 20)
        rss_before = rss_mib(gateway)
        for number in range(arguments.rounds):
            gaps["alone"].append(gaps_ms(client, arguments.tokens))
            with Stalled(stack.address, arguments.stalled) as stalled:
                time.sleep(FILL_S)
                gaps["beside"].append(gaps_ms(client, arguments.tokens))
                if number == arguments.rounds - 1:
                    rss_beside = rss_mib(gateway)
                    time.sleep(1.5 * SLOW_READER_S)
                    rss_after = rss_mib(gateway)
                    ends = stalled.ends()
    figures = {}
    print(f"{'ITL of one reader, ms':32} {'p50':>8} {'p99':>8} {'longest':>8}   (medians of {arguments.rounds} rounds)")
    for name, rounds in gaps.items():
        columns = [statistics.median(map(of, rounds)) for of in (statistics.median, p99, max)]
        label = name if name == "alone" else f"beside {arguments.stalled} that stall"
        print(f"{label:32} " + " ".join(f"{column:>8.1f}" for column in columns))
        figures[name] = dict(zip(("p50_ms", "p99_ms", "max_ms"), (round(column, 2) for column in columns), strict=True))
    ratio = round(figures["beside"]["p99_ms"] / figures["alone"]["p99_ms"], 2)
    print(f"p99 beside / alone: {ratio} (budget {RATIO_MAX})")
    print(f"ends of the stalled streams: {dict(ends)}")
    print(f"gateway's memory: {rss_before:.1f} MiB before, {rss_beside:.1f} beside, {rss_after:.1f} after their end")
    all_refused = ends == {"RESOURCE_EXHAUSTED SLOW_READER": arguments.stalled}
    memory = {
        "rss_mib_before": round(rss_before, 1),
        "rss_mib_beside": round(rss_beside, 1),
        "rss_mib_after": round(rss_after, 1),
    }
    print(json.dumps({"benchmark": "slow-readers", **figures, "p99_ratio": ratio, "ends": dict(ends), **memory, **machine()}))
    return 0 if ratio <= RATIO_MAX and all_refused else 1


if __name__ == "__main__":
    raise SystemExit(main())
