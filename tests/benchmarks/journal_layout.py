"""What one step's journal costs in two layouts: run `python tests/benchmarks/journal_layout.py`; the result decided docs/adr/0001.

256 sequences decode at a context of 1,024 tokens and more with staggered lengths, so that each step 16 of them fill a block, which is published, and
begin another. `folded` is what the service does. `materialized` is the other way: a script unpacks the step and writes into every
request's own keys. Records are made beforehand: building them is the scheduler's cost, not the journal's.
"""

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kv_manager.published_block import PublishedBlock
from kv_manager.published_blocks import PublishedBlocks, entry_dtype
from services.scheduler.core.changes import Changes
from services.scheduler.core.folded_log import RUN_LEN_MAX
from services.scheduler.core.journal import Journal
from services.scheduler.core.journal_call import Applied
from services.scheduler.core.record import Arrival, BlockDelta, DecodeColumns, RequestDelta
from services.scheduler.core.sequence_status import SequenceStatus
from services.scheduler.store.embedded_redis import EmbeddedRedis
from services.scheduler.store.journal_codec import submission_from_bytes, submission_to_bytes
from services.scheduler.store.port import StoredJournal
from services.scheduler.store.redis_store import RedisStore
from services.scheduler.store.resp_connection import RespConnection, read_url
from tessera.values.config import Config
from tessera.values.identity import NO_EPOCH, Epoch
from tessera.values.request import Submission
from tessera.values.sampling import SamplingParams

BUDGET_US = 250
BYTES_PER_TOKEN_BUDGET = 16
WINDOW_STEPS = RUN_LEN_MAX
WARM_WINDOWS = 10
BLOCK_SIZE = 16
PROMPT_LEN = 768
OUTPUT_LEN = 256
WORKER, BOOT = "127.0.0.1:50051", b"b" * 16
EPOCH = Epoch(1, b"e" * 16)
VOCABULARY = 49_152


class Workload:
    """Endless steady decoding of `count` sequences."""

    def __init__(self, count: int) -> None:
        self._rng = random.Random(1)
        self._ids = tuple(self._rng.randbytes(16) for _ in range(count))
        self._lens = np.array([OUTPUT_LEN + row % BLOCK_SIZE for row in range(count)], np.int32)
        self._step = 0

    @property
    def num_tokens(self) -> int:
        """Live tokens, prompts included."""
        return int(self._lens.sum()) + PROMPT_LEN * len(self._ids)

    def first(self) -> Changes:
        """All requests as they are when the measurement begins."""
        return Changes(tuple(self._request(request_id, row) for row, request_id in enumerate(self._ids)))

    def step(self) -> Changes:
        """One token for each."""
        self._step += 1
        offsets = self._lens.copy()
        grown = np.flatnonzero((PROMPT_LEN + offsets) % BLOCK_SIZE == 0).astype(np.int32)
        tables = ((PROMPT_LEN + offsets[grown]) // BLOCK_SIZE).astype(np.int32)
        blocks = PublishedBlocks.of(self._block() for _ in grown)  # as the block manager tells them
        evicted = tuple(self._rng.randrange(30_000) for _ in grown)
        tokens = np.array([self._rng.randrange(VOCABULARY) for _ in self._ids], np.int32)
        self._lens += 1
        columns = DecodeColumns(self._ids, offsets, tokens, grown, tables, tables)
        return Changes(blocks=(BlockDelta(WORKER, BOOT, blocks, evicted),), decoded=columns)

    def _request(self, request_id: bytes, row: int) -> RequestDelta:
        length = int(self._lens[row])
        prompt = np.array([self._rng.randrange(VOCABULARY) for _ in range(PROMPT_LEN)], np.int32)
        output = tuple(self._rng.randrange(VOCABULARY) for _ in range(length))
        table = tuple(range(-(-(PROMPT_LEN + length) // BLOCK_SIZE)))
        return RequestDelta(
            request_id=request_id,
            status=SequenceStatus.RUNNING,
            subscriber=0,
            attempt=1,
            worker=WORKER,
            token_offset=0,
            token_ids=output,
            table_offset=0,
            block_ids=table,
            submission=Submission(request_id, prompt, SamplingParams(seed=1)),
            arrival=Arrival(1, row),
        )

    def _block(self) -> PublishedBlock:
        rng = self._rng
        token_ids = tuple(rng.randrange(VOCABULARY) for _ in range(BLOCK_SIZE))
        return PublishedBlock(rng.randrange(30_000), rng.randrange(2**64), rng.randrange(2**64), token_ids, self._step)


class Layout(Protocol):
    """One way of keeping the journal."""

    async def open(self, url: str, first: Changes) -> None: ...
    async def write(self, changes: Changes) -> None: ...
    async def read(self) -> int: ...
    async def close(self) -> None: ...


class Folded:
    """The service's own journal and store."""

    async def open(self, url: str, first: Changes) -> None:
        self._store = RedisStore(url, "folded")
        self._journal = Journal(Config(), EPOCH.number, 0)
        await self._store.take_epoch(NO_EPOCH, EPOCH, lease_ms=60_000)
        await self.write(first)

    async def write(self, changes: Changes) -> None:
        self._journal.add(changes, 0)
        while (call := self._journal.next_call(0)) is not None:
            reply = await self._store.call(EPOCH, call)
            assert isinstance(reply, Applied), reply
            self._journal.on_reply(reply, 0)

    async def read(self) -> int:
        stored = await self._store.read(EPOCH)
        assert isinstance(stored, StoredJournal)
        return sum(len(request.output_token_ids) for request in stored.state.requests.values())

    async def close(self) -> None:
        await self._store.close()


UNPACK = """
local ids, offsets, tokens = ARGV[3], ARGV[4], ARGV[5]
local last = tonumber(redis.call('HGET', KEYS[1], 'last') or '0')
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] or tonumber(ARGV[2]) ~= last + 1 then return {'gap', last} end
for row = 0, #ids / 16 - 1 do
  local offset = struct.unpack('<i4', offsets, row * 4 + 1)
  redis.call('SETRANGE', KEYS[3] .. string.sub(ids, row * 16 + 1, row * 16 + 16), offset * 4, string.sub(tokens, row * 4 + 1, row * 4 + 4))
end
local rows, tables, blocks = ARGV[6], ARGV[7], ARGV[8]
for i = 0, #rows / 4 - 1 do
  local row, offset = struct.unpack('<i4', rows, i * 4 + 1), struct.unpack('<i4', tables, i * 4 + 1)
  redis.call('SETRANGE', KEYS[4] .. string.sub(ids, row * 16 + 1, row * 16 + 16), offset * 4, string.sub(blocks, i * 4 + 1, i * 4 + 4))
end
local gone = tonumber(ARGV[9])
if gone > 0 then redis.call('HDEL', KEYS[2], unpack(ARGV, 10, 9 + gone)) end
if #ARGV > 9 + gone then redis.call('HSET', KEYS[2], unpack(ARGV, 10 + gone)) end
redis.call('HSET', KEYS[1], 'last', ARGV[2])
return {'ok', ARGV[2]}
"""


class Materialized:
    """Every step into every request's keys: `o` output and `t` table as int32 strings, `s` the submission. Enough for the measurement,
    not a store: no generations, no recovery from a gap."""

    async def open(self, url: str, first: Changes) -> None:
        self._connection = await RespConnection.open(read_url(url), 5.0)
        self._keys = [b"{m}:meta", b"{m}:blocks", b"{m}:o:", b"{m}:t:"]
        self._last = 0
        self._sha = await self._connection.command("SCRIPT", "LOAD", UNPACK)
        await self._connection.command("HSET", "{m}:meta", "epoch", EPOCH.number)
        for delta in first.requests:
            assert delta.submission is not None
            await self._connection.command("HSET", "{m}:s", delta.request_id, submission_to_bytes(delta.submission))
            await self._connection.command("SET", b"{m}:o:" + delta.request_id, array("i", delta.token_ids).tobytes())
            await self._connection.command("SET", b"{m}:t:" + delta.request_id, array("i", delta.block_ids).tobytes())

    async def write(self, changes: Changes) -> None:
        columns = changes.decoded
        assert columns is not None
        arrays = (columns.token_offsets, columns.token_ids, columns.grown_rows, columns.table_offsets, columns.block_ids)
        offsets, tokens, rows, tables, block_ids = (values.tobytes() for values in arrays)
        (delta,) = changes.blocks
        gone = [block_id.to_bytes(4, "little") + delta.boot_id for block_id in delta.unpublished]
        blocks = PublishedBlocks.of(delta.published).rows
        fields = [part for block in blocks for part in (block["block_id"].tobytes() + delta.boot_id, block.tobytes())]
        self._last += 1
        head = (EPOCH.number, self._last, b"".join(columns.request_ids), offsets, tokens, rows, tables, block_ids, len(gone))
        reply = await self._connection.command("EVALSHA", self._sha, len(self._keys), *self._keys, *head, *gone, *fields)
        assert reply[0] == b"ok", reply

    async def read(self) -> int:
        fields = await self._connection.command("HGETALL", "{m}:s")
        ids = fields[::2]
        submissions = [submission_from_bytes(data) for data in fields[1::2]]
        outputs = await self._connection.command("MGET", *(b"{m}:o:" + request_id for request_id in ids))
        tables = await self._connection.command("MGET", *(b"{m}:t:" + request_id for request_id in ids))
        entries = await self._connection.command("HGETALL", "{m}:blocks")
        blocks = np.frombuffer(b"".join(entries[1::2]), entry_dtype(BLOCK_SIZE))
        assert len(blocks)
        requests = [(np.frombuffer(o, "<i4"), np.frombuffer(t, "<i4")) for o, t in zip(outputs, tables, strict=True)]
        assert len(requests) == len(submissions)
        return sum(len(output) for output, _ in requests)

    async def close(self) -> None:
        self._connection.close()


@dataclass
class Figures:
    """One value per round."""

    scheduler_us: list[float] = field(default_factory=list)
    undisturbed_us: list[float] = field(default_factory=list)  # lowest of the windows: what it is on a quieter machine
    redis_us: list[float] = field(default_factory=list)
    redis_undisturbed_us: list[float] = field(default_factory=list)
    bytes_per_token: list[float] = field(default_factory=list)
    wall_us: list[float] = field(default_factory=list)
    read_ms: list[float] = field(default_factory=list)
    tokens_read: int = 0


async def redis_cpu_s(connection: RespConnection) -> float:
    """CPU seconds that the server has used, by getrusage."""
    info = (await connection.command("INFO", "cpu")).decode()
    fields = dict(line.split(":") for line in info.split() if ":" in line)
    return float(fields["used_cpu_user"]) + float(fields["used_cpu_sys"])


async def data_bytes(connection: RespConnection) -> int:
    """What all keys take, as the server counts; its buffers, which come and go, are left out."""
    keys = await connection.command("KEYS", "*")
    return sum([await connection.command("MEMORY", "USAGE", key, "SAMPLES", 0) for key in keys])


async def measure(layout: Layout, workload: Workload, probe: RespConnection, windows: int, figures: Figures) -> None:
    """One round of so many windows of steps, and one reading back."""
    gc.collect()
    gc.freeze()  # what the collector does with the workload's garbage is not the journal's cost
    scheduler_us, redis_us, wall_us = [], [], []
    for _ in range(windows):
        cpu_s = wall_s = 0.0
        redis_s = await redis_cpu_s(probe)
        for _ in range(WINDOW_STEPS):
            changes = workload.step()  # made just before it is written, as in the service, so that it is in the caches
            started_cpu_s, started_s = time.process_time(), time.perf_counter()
            await layout.write(changes)
            cpu_s += time.process_time() - started_cpu_s
            wall_s += time.perf_counter() - started_s
        redis_us.append((await redis_cpu_s(probe) - redis_s) / WINDOW_STEPS * 1e6)
        scheduler_us.append(cpu_s / WINDOW_STEPS * 1e6)
        wall_us.append(wall_s / WINDOW_STEPS * 1e6)
    figures.scheduler_us.append(statistics.mean(scheduler_us))
    figures.undisturbed_us.append(min(scheduler_us))
    figures.redis_us.append(statistics.mean(redis_us))
    figures.redis_undisturbed_us.append(min(redis_us))
    figures.wall_us.append(statistics.mean(wall_us))
    figures.bytes_per_token.append(await data_bytes(probe) / workload.num_tokens)
    started_s = time.perf_counter()
    figures.tokens_read = await layout.read()
    figures.read_ms.append((time.perf_counter() - started_s) * 1e3)


async def run(sequences: int, windows: int, rounds: int, say: Callable[[str], None]) -> dict[str, Figures]:
    """Alternate the layouts, each on a server of its own."""
    layouts: dict[str, Layout] = {"folded": Folded(), "materialized": Materialized()}
    figures = {name: Figures() for name in layouts}
    with tempfile.TemporaryDirectory() as folder:
        servers = {name: EmbeddedRedis(Path(folder) / name) for name in layouts}
        workloads = {name: Workload(sequences) for name in layouts}
        probes = {}
        try:
            for name, layout in layouts.items():
                servers[name].start()
                probes[name] = await RespConnection.open(read_url(servers[name].url), 5.0)
                await layout.open(servers[name].url, workloads[name].first())
                await measure(layout, workloads[name], probes[name], WARM_WINDOWS, Figures())  # fills the log
            for number in range(1, rounds + 1):
                for name, layout in layouts.items():
                    await measure(layout, workloads[name], probes[name], windows, figures[name])
                say(f"round {number} of {rounds}, load {os.getloadavg()[0]:.1f}")
            for name, layout in layouts.items():
                probes[name].close()
                await layout.close()
        finally:
            for server in servers.values():
                server.stop()
    return figures


def main() -> None:
    """Print a table and, last, one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--windows", type=int, default=6, help=f"of {WINDOW_STEPS} steps, per round")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    figures = asyncio.run(run(options.sequences, options.windows, options.rounds, print))
    result: dict[str, Any] = {"sequences": options.sequences, "rounds": options.rounds, "load": os.getloadavg()[0]}
    columns = {
        "scheduler_us": "scheduler CPU us",
        "undisturbed_us": "least disturbed us",
        "redis_us": "Redis CPU us",
        "redis_undisturbed_us": "least disturbed us",
        "wall_us": "wall us",
        "read_ms": "read back ms",
        "bytes_per_token": "bytes per live token",
    }
    print(f"\n{'median (lowest - highest)':26}", *(f"{title:>20}" for title in columns.values()))
    for name, item in figures.items():
        values: dict[str, list[float]] = {key: getattr(item, key) for key in columns}
        cells = (f"{statistics.median(v):.0f} ({min(v):.0f} - {max(v):.0f})" for v in values.values())
        print(f"{name:26}", *(f"{cell:>20}" for cell in cells))
        result[name] = {key: round(statistics.median(v), 1) for key, v in values.items()}
    print(
        f"{'budget':26} {'both together: ' + str(BUDGET_US):>20} {'':20} {'':20} {'':20} {'':20} {'':20} {BYTES_PER_TOKEN_BUDGET:20}"
    )
    assert len({item.tokens_read for item in figures.values()}) == 1, "the layouts read back different states"
    print(json.dumps(result))


if __name__ == "__main__":
    main()
