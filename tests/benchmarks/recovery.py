"""What a takeover costs before the first batch can leave: run `python tests/benchmarks/recovery.py`.

1,000 live requests of 4,096 tokens with prefix caching on, all on one worker; block 16. They are run by a real scheduler into a real
Redis; then that scheduler is gone, and the next one reads the journal, joins it with the worker's report and the gateway's claims, restores
itself from that, and makes its first batch. The worker samples what it likes and reports what a deterministic one would. Also
printed: what the state takes in Redis per live token, prefix-cache entries included.
"""

import argparse
import asyncio
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from services.scheduler.collector_pause import collector_paused
from services.scheduler.core.journal import Journal
from services.scheduler.core.journal_call import Applied
from services.scheduler.core.recovery import GatewayClaim, join
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.stop_rules import StopRules
from services.scheduler.store.embedded_redis import EmbeddedRedis
from services.scheduler.store.port import EpochTaken, StoredJournal
from services.scheduler.store.redis_store import RedisStore
from services.scheduler.store.resp_connection import RespConnection, read_url
from tessera.values.batch import ScheduledBatch, ScheduledBatchOutput
from tessera.values.config import Config
from tessera.values.finish import Finish
from tessera.values.identity import NO_EPOCH, Epoch
from tessera.values.model import KVGeometry, ModelInfo, WorkerDescription, WorkerLimits
from tessera.values.report import SlotReport, WorkerReport
from tessera.values.request import Submission
from tessera.values.sampling import SamplingParams

RECOVERY_BUDGET_S = 1.0
BYTES_PER_TOKEN_BUDGET = 16
BLOCK_SIZE = 16
STEP_TOKENS = 1 << 17
VOCABULARY = 49_152
LEASE_MS = 600_000
WORKER = "127.0.0.1:50053"
MODEL = ModelInfo("bench", "LlamaForCausalLM", VOCABULARY, 8192, (2,), 1, "t", "w")
PHASES = ("read", "join", "restore", "schedule")


@dataclass
class Worker:
    """Answers batches with random tokens, and remembers when each block was written."""

    description: WorkerDescription
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))
    last_step: int = 0

    def __post_init__(self) -> None:
        self.tables: dict[int, list[int]] = {}
        self.last_write_step = np.zeros(self.description.geometry.num_blocks, np.int64)

    def execute(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        """One batch; a row samples a token when it reaches the end of its tokens, which a decode always does."""
        ends = {}
        for entry in batch.entries:
            self.tables[entry.slot] = entry.block_table.tolist()
            ends[entry.slot] = len(entry.token_ids)
        first = 0
        columns = (batch.slots, batch.num_scheduled_tokens, batch.context_lens, batch.new_block_counts)
        samples = []
        for slot, count, end, grown in zip(*(column.tolist() for column in columns), strict=True):
            self.tables[slot] += batch.new_block_ids[first : first + grown].tolist()
            first += grown
            self.last_write_step[self.tables[slot][(end - count) // BLOCK_SIZE : -(-end // BLOCK_SIZE)]] = batch.step_id
            samples.append(end >= ends.get(slot, 0))
        self.last_step = batch.step_id
        counts = np.array(samples, np.int32)
        tokens = self.random.integers(100, VOCABULARY, int(counts.sum())).astype(np.int32)
        return ScheduledBatchOutput(batch.epoch, batch.nonce, batch.step_id, counts, tokens)

    def report(self, scheduler: Scheduler, nonce: int) -> WorkerReport:
        """What the slots of `scheduler`'s requests hold."""
        slots = []
        for sequence in scheduler.requests():
            assert sequence.slot is not None
            ledger = sequence.ledger
            ids, table = ledger.token_ids[:], np.array(self.tables[sequence.slot], np.int32)
            slots.append(
                SlotReport(
                    sequence.slot, sequence.request_id, sequence.attempt, ledger.prompt_len, ids, table, ledger.computed_len
                )
            )
        return WorkerReport(nonce, self.description, self.last_step, tuple(slots), (), self.last_write_step)


async def live_through(store: RedisStore, requests: int, context: int, output: int) -> tuple[Scheduler, Worker]:
    """Run `requests` until each has `context` tokens, `output` of them its own, every step journalled."""
    blocks = requests * (context // BLOCK_SIZE + 4)
    geometry = KVGeometry(blocks, BLOCK_SIZE, 1, "bench")
    limits = WorkerLimits(requests, max(STEP_TOKENS, context))
    worker = Worker(WorkerDescription(b"b" * 16, MODEL, geometry, limits))
    epoch = Epoch(1, b"1" * 16)
    scheduler, journal = Scheduler(config_for(requests), epoch), Journal(Config(), 1, 0)
    assert await store.take_epoch(NO_EPOCH, epoch, LEASE_MS) == EpochTaken()
    empty = WorkerReport(1, worker.description, 0, (), (), worker.last_write_step)
    scheduler.attach_worker(WORKER, empty, 0)
    for number in range(requests):
        prompt = worker.random.integers(100, VOCABULARY, context - output).astype(np.int32)
        sampling = SamplingParams(seed=number, max_tokens=output + 1024, ignore_eos=True, stop_token_ids=(50, 51))
        scheduler.submit(Submission(number.to_bytes(16, "big"), prompt, sampling), 0, (), 0)
    while any(sequence.output_len < output for sequence in scheduler.requests()):
        batch = scheduler.schedule(WORKER, 0)
        assert batch is not None
        scheduler.postprocess(WORKER, worker.execute(batch), 0)
        changes = scheduler.take_changes()
        assert changes is not None
        journal.add(changes, 0)
        while (call := journal.next_call(0)) is not None:
            reply = await store.call(epoch, call)
            assert isinstance(reply, Applied), reply
            journal.on_reply(reply, 0)
    return scheduler, worker


def config_for(requests: int) -> Config:
    """Limits that let all run at once."""
    return Config(
        max_num_seqs=requests,
        max_num_batched_tokens=STEP_TOKENS,
        max_queued_requests=requests,
        max_queued_tokens=1 << 30,
    )


@dataclass
class Clock:
    """Wall and CPU seconds of each phase of one recovery."""

    wall_s: dict[str, float] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block under `name`."""
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        yield
        self.wall_s[name], self.cpu_s[name] = time.perf_counter() - wall_s, time.process_time() - cpu_s


async def recover(
    store: RedisStore, term: int, report: WorkerReport, claims: list[GatewayClaim]
) -> tuple[Clock, Scheduler, int]:
    """Take over as the leader of `term`, and count the requests that go on in their slots."""
    epoch = Epoch(term, bytes([term]) * 16)
    view = await store.look()
    assert await store.take_epoch(view.epoch, epoch, LEASE_MS) == EpochTaken()  # type: ignore[union-attr]
    clock = Clock()
    with clock.phase("read"):
        stored = await store.read(epoch)
    assert isinstance(stored, StoredJournal)

    def stop_rule(submission: Submission, output: tuple[int, ...]) -> Finish | None:
        return StopRules.of(submission, MODEL, report.description.geometry.num_tokens + 1).first_stop(output)

    scheduler = Scheduler(config_for(len(claims)), epoch)
    with collector_paused():  # as the service does
        with clock.phase("join"):
            recovered = join(stored.state, {WORKER: report}, claims, stop_rule)
        with clock.phase("restore"):
            scheduler.restore(recovered, {WORKER: report}, 0)
    with clock.phase("schedule"):
        batch = scheduler.schedule(WORKER, 0)
    assert batch is not None and batch.num_rows == len(claims) and not batch.entries, "something is computed again"
    return clock, scheduler, sum(request.adoption is not None for request in recovered.requests)


async def data_bytes(url: str) -> int:
    """What all keys take, as the server counts; its buffers, which come and go, are left out."""
    connection = await RespConnection.open(read_url(url), 30.0)
    keys = await connection.command("KEYS", "*")
    sizes = [await connection.command("MEMORY", "USAGE", key, "SAMPLES", 0) for key in keys]
    connection.close()
    return sum(sizes)


async def run(options: argparse.Namespace, say: Callable[[str], None]) -> tuple[list[Clock], float]:
    """The clocks of all rounds, and the bytes per live token in Redis."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(Path(folder)) as server:
        store = RedisStore(server.url, "recovery", timeout_s=30.0)
        scheduler, worker = await live_through(store, options.requests, options.context, options.output)
        bytes_per_token = await data_bytes(server.url) / (options.requests * options.context)
        claims = [GatewayClaim(sequence.request_id, 0, sequence.output_token_ids()[:-1]) for sequence in scheduler.requests()]
        clocks = []
        for number in range(1, options.rounds + 1):
            report = worker.report(scheduler, number + 1)
            gc.collect()
            gc.freeze()  # a standby that takes over does not have what made this state in its memory
            clock, restored, adopted = await recover(store, number + 1, report, claims)
            gc.unfreeze()
            assert adopted == options.requests
            restored.check_integrity()
            clocks.append(clock)
            say(f"round {number} of {options.rounds}: {sum(clock.wall_s.values()):.2f} s, load {os.getloadavg()[0]:.1f}")
        await store.close()
    return clocks, bytes_per_token


def main() -> None:
    """Print a table and, last, one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--context", type=int, default=4096, help="tokens of each, output included")
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    clocks, bytes_per_token = asyncio.run(run(options, print))
    print(f"\n{'median (lowest - highest) ms':30} {'CPU':>20} {'wall':>20}")
    result: dict[str, object] = {"requests": options.requests, "context": options.context, "load": os.getloadavg()[0]}
    for phase in (*PHASES, "total"):
        cells = []
        for kind in ("cpu_s", "wall_s"):
            rounds = [getattr(clock, kind) for clock in clocks]
            values = [1e3 * (sum(item.values()) if phase == "total" else item[phase]) for item in rounds]
            cells.append(f"{statistics.median(values):.0f} ({min(values):.0f} - {max(values):.0f})")
            result[f"{phase}_{kind}"] = round(statistics.median(values) / 1e3, 3)
        print(f"{phase:30} {cells[0]:>20} {cells[1]:>20}")
    print(f"{'budget':30} {RECOVERY_BUDGET_S * 1e3:>20.0f} {RECOVERY_BUDGET_S * 1e3:>20.0f}")
    print(f"Redis memory per live token: {bytes_per_token:.1f} bytes (budget {BYTES_PER_TOKEN_BUDGET})")
    print(json.dumps(result | {"redis_bytes_per_token": round(bytes_per_token, 2)}))


if __name__ == "__main__":
    main()
