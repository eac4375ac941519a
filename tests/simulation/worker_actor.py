"""A model worker as a process: the contract of Describe, Attach and Execute around the deterministic worker in memory.

That worker really reads and writes KV (a digest of all ids up to a position), and asserts that what it reads is what its slot's own ids
say: a block that was handed on, kept or adopted wrongly fails the run at the next step.
"""

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np

from tessera.values.batch import ScheduledBatch, ScheduledBatchOutput
from tessera.values.identity import NO_EPOCH, Epoch
from tessera.values.model import WorkerLimits
from tests.services.scheduler.core.fake_worker import MODEL, FakeWorker
from tests.simulation.oracle import Oracle
from tests.simulation.world import Actor, End, World

HEARTBEAT = 250_000
LIMITS = WorkerLimits(max_num_seqs=6, max_num_batched_tokens=24)


class Machine(FakeWorker):
    """The worker in memory, with somebody who watches what it computes."""

    def __init__(self, name: str, num_blocks: int, oracle: Oracle, num_host_blocks: int) -> None:
        self.name = name
        super().__init__(num_blocks, 4, LIMITS, MODEL, num_host_blocks)
        self.num_swap_outs = 0
        self._oracle = oracle
        oracle.watches(name, self)

    def _swap_out(self, swap: Any) -> None:
        self.num_swap_outs += 1
        super()._swap_out(swap)

    def _write(self, slot: Any, start: int, digests: list[int], step_id: int) -> None:
        memory = np.concatenate((self.kv, self.host_kv))
        for position, digest in enumerate(digests, start):
            self._oracle.computes(self.name, slot.request_id, position, digest, memory)
        super()._write(slot, start, digests, step_id)

    def _enter(self, entry: Any) -> None:
        known = [*self.slots.values(), *self.dropped]
        latest = max((slot.attempt for slot in known if slot.request_id == entry.request_id), default=0)
        assert entry.attempt > latest, f"attempt {entry.attempt} of {entry.request_id.hex()[:4]} enters after {latest}"
        super()._enter(entry)

    def _drop(self, drop: Any, step_id: int) -> None:
        held = self.slots.get(drop.slot)
        if held is not None and (held.request_id, held.attempt) == (drop.request_id, drop.attempt):
            self._oracle.drops(self.name, held.request_id)
        super()._drop(drop, step_id)


class SimWorker(Actor):
    """`is_fencing` false is a planted defect: earlier leaders are obeyed as well."""

    is_fencing = True

    def __init__(self, world: World, name: str, num_blocks: int, oracle: Oracle, num_host_blocks: int = 0) -> None:
        super().__init__(world, name)
        self.machine = Machine(name, num_blocks, oracle, num_host_blocks)
        self.oracle = oracle
        self._is_first = True
        self.hang = 0  # the next step takes so much longer
        self.start()

    def start(self) -> None:
        if not self._is_first:
            self.machine.restart()
        boot_id = bytes([len(self.name), self.machine.boots]) + self.name.encode().ljust(14, b".")
        self.machine.description = replace(self.machine.description, boot_id=boot_id)
        self._is_first = False
        self.epoch, self.nonce = NO_EPOCH, 0
        self.stream: End | None = None
        self._attaching: End | None = None
        self._has_reported = False
        self._queue: deque[tuple[ScheduledBatch, End]] = deque()
        self._running: tuple[ScheduledBatch, End] | None = None
        self._leaves_for: int | None = None

    def drain(self, down: int) -> None:
        """SIGTERM: finish what has started, say so, go; back after `down` with nothing."""
        self.log("LEAVES for", down)
        self._leaves_for = down
        self._queue.clear()
        if self._running is None:
            self._leave()

    def _leave(self) -> None:
        assert self._leaves_for is not None
        if self.stream is not None:
            self.stream.send(("left", None))
            self.stream.close()
        self.crash(self._leaves_for)

    def accepted(self, end: End) -> None:
        if end.kind == "describe":
            end.on_message = lambda _: end.send(self.epoch)
        elif end.kind == "attach":
            end.on_message = lambda message: self._attach(end, *message)
        else:
            end.on_message = lambda message: self._bind(end, *message)

    # -- attach

    def _attach(self, end: End, epoch: Epoch, nonce: int) -> None:
        if not epoch.supersedes(self.epoch) or (epoch == self.epoch and nonce <= self.nonce):
            end.send(("older", self.epoch))
            return
        is_new = epoch != self.epoch
        self.log("attached by", epoch.number, "nonce", nonce)
        self.epoch, self.nonce = epoch, nonce
        self._has_reported = False
        if self.is_fencing:
            self._end_stream()
            self._queue.clear()
        if is_new:
            self.oracle.is_fenced_anew(self.name)
        self._attaching = end
        if self._running is None:
            self._report()

    def _report(self) -> None:
        end, self._attaching = self._attaching, None
        assert end is not None
        report = self.machine.attach(self.epoch, self.nonce)
        self._has_reported = True
        self.oracle.reported(self.name, report, self.machine)
        slots = [(slot.slot, slot.request_id.hex()[:4], slot.attempt, slot.computed_len) for slot in report.slots]
        self.log("reports slots (slot, id, attempt, computed)", slots, "dropped", len(report.dropped), "step", report.last_step)
        end.send(("report", report))

    # -- execute

    def _bind(self, end: End, kind: str, epoch: Epoch, nonce: int) -> None:
        if (epoch, nonce) != (self.epoch, self.nonce):
            end.send(("older", self.epoch) if not epoch.supersedes(self.epoch) else ("superseded", self.epoch))
            end.close()
            return
        if not self._has_reported or (self.is_fencing and self.stream is not None):
            end.close()
            return
        self.stream = end
        end.on_message = lambda message: self._hear(end, *message)
        end.on_close = lambda: self._stream_ended(end)
        self._beat(end)

    def _hear(self, end: End, kind: str, value: Any) -> None:
        if kind != "batch" or self._leaves_for is not None or (self.is_fencing and end is not self.stream):
            return
        batch: ScheduledBatch = value
        if (batch.epoch, batch.nonce) != (self.epoch, self.nonce):
            if self.is_fencing:
                return
            self.log("executes a batch of epoch", batch.epoch.number, "under", self.epoch.number)
        self._queue.append((batch, end))
        self._begin()

    def _begin(self) -> None:
        if self._running is not None or not self._queue:
            return
        self._running = self._queue.popleft()
        slow = self.world.rng.random() < 0.05
        self.later(self.world.rng.randrange(60_000, 300_000) if slow else self.world.rng.randrange(3_000, 50_000), self._finish)

    def _finish(self) -> None:
        assert self._running is not None
        batch, end = self._running
        self._running = None
        keep = (self.machine.epoch, self.machine.nonce)
        self.machine.epoch, self.machine.nonce = batch.epoch, batch.nonce
        self.machine.enqueue(batch)
        self.machine.epoch, self.machine.nonce = keep
        output: ScheduledBatchOutput = replace(self.machine.step(), compute_us=20_000)
        self.log("executed step", batch.step_id, "rows", batch.slots.tolist(), "tokens", output.token_ids.tolist())
        end.send(("output", output))
        if self._leaves_for is not None:
            self._leave()
            return
        if self._attaching is not None:
            self._report()
        self._begin()

    def _beat(self, end: End) -> None:
        if end is self.stream or not self.is_fencing:
            end.send(("heartbeat", None))
            self.later(HEARTBEAT, lambda: self._beat(end))

    def _stream_ended(self, end: End) -> None:
        if end is self.stream and self.is_fencing:
            self.stream = None
            self._queue.clear()

    def _end_stream(self) -> None:
        if self.stream is not None:
            held = self.stream
            self.stream = None
            held.send(("superseded", self.epoch))
            held.close()
