"""A worker in its own process, commanded over gRPC by a blocking client, so that tests need no event loop of their own."""

import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from services.worker import convert
from tessera.values.batch import ScheduledBatch, ScheduledBatchOutput, SlotDrop, SlotEntry, SlotSwap
from tessera.values.identity import Epoch
from tessera.values.protocol import PROTOCOL_VERSION
from tessera.values.report import WorkerReport
from tessera.values.sampling import SamplingParams
from tessera.worker.v1 import worker_pb2, worker_pb2_grpc

BLOCK = 16
VOCAB = 512
GREEDY = SamplingParams(seed=0, temperature=0.0)
TIMEOUT_S = 30.0


def leader(number: int, instance: str = "one") -> Epoch:
    return Epoch(number, instance.encode().ljust(16, b"."))


def int32(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def entry(slot: int, token_ids: Sequence[int], table: Sequence[int], name: str, **changes: Any) -> SlotEntry:
    fields = {"attempt": 1, "prompt_len": len(token_ids), "num_cached_tokens": 0, "sampling": GREEDY} | changes
    return SlotEntry(slot, name.encode().ljust(16, b"."), token_ids=int32(token_ids), block_table=int32(table), **fields)


def swap(slot: int, table: Sequence[int], moves: Sequence[tuple[int, int]], name: str) -> SlotSwap:
    pairs = np.array(moves, dtype=np.int32).reshape(-1, 2)
    return SlotSwap(slot, name.encode().ljust(16, b"."), 1, int32(table), pairs)


def batch_of(
    under: tuple[Epoch, int],
    step_id: int,
    rows: Sequence[tuple[int, int, int]] = (),
    entries: Sequence[SlotEntry] = (),
    drops: Sequence[SlotDrop] = (),
    **moves: Any,
) -> ScheduledBatch:
    """A batch of rows (slot, positions, context_len) without new blocks; `moves`: what it swaps, copies and zeroes."""
    return ScheduledBatch(
        epoch=under[0],
        nonce=under[1],
        step_id=step_id,
        durable_step=0,
        entries=tuple(entries),
        drops=tuple(drops),
        slots=int32([row[0] for row in rows]),
        num_scheduled_tokens=int32([row[1] for row in rows]),
        context_lens=int32([row[2] for row in rows]),
        new_block_counts=int32([0] * len(rows)),
        new_block_ids=int32([]),
        num_decodes=next((i for i, row in enumerate(rows) if row[1] > 1), len(rows)),
        **moves,
    )


def report_of(call: Any) -> WorkerReport:
    """The report that an Attach answers, heartbeats before it passed over."""
    return convert.report_from_proto(part for part in call if part.WhichOneof("part") != "heartbeat")


class Execution:
    """One Execute stream from the scheduler's end."""

    def __init__(self, stub: Any, under: tuple[Epoch, int]) -> None:
        self.under = under
        self._requests: queue.Queue[worker_pb2.ExecuteRequest | None] = queue.Queue()
        self.heartbeat()
        self.call = stub.Execute(iter(self._requests.get, None))

    def heartbeat(self, under: tuple[Epoch, int] | None = None) -> None:
        epoch, nonce = under or self.under
        beat = worker_pb2.Heartbeat(epoch=convert.epoch_to_proto(epoch), nonce=nonce)
        self._requests.put(worker_pb2.ExecuteRequest(heartbeat=beat))

    def send(self, *args: Any, under: tuple[Epoch, int] | None = None, **kwargs: Any) -> None:
        """`batch_of` this stream's term, or of `under`."""
        self.send_message(convert.batch_to_proto(batch_of(under or self.under, *args, **kwargs)))

    def send_message(self, message: worker_pb2.ScheduledBatch) -> None:
        self._requests.put(worker_pb2.ExecuteRequest(batch=message))

    def next(self, kind: str) -> Any:
        """The next response of this kind; heartbeats in between are passed over, anything else is a failure."""
        for response in self.call:
            found = response.WhichOneof("message")
            if found == kind:
                return getattr(response, kind)
            assert found == "heartbeat", response
        raise AssertionError(f"the stream ended without {kind}")

    def output(self) -> ScheduledBatchOutput:
        return convert.output_from_proto(self.next("output"))

    def run(self, *args: Any, **kwargs: Any) -> ScheduledBatchOutput:
        self.send(*args, **kwargs)
        return self.output()

    def end(self) -> grpc.RpcError | None:
        """Read to the end; the status if it is not OK."""
        try:
            for response in self.call:
                assert response.WhichOneof("message") in ("heartbeat", "output")
        except grpc.RpcError as error:
            return error
        return None

    def close(self) -> None:
        """The client's half ends."""
        self._requests.put(None)


class WorkerProcess:
    """A running worker and a stub for it. `gate` holds up forward passes: see `gated_worker.py`."""

    def __init__(self, process: subprocess.Popen[bytes], address: str, gate: "Gate") -> None:
        self.process = process
        self.address = address
        self.gate = gate
        self.channel = grpc.insecure_channel(address)
        self.stub = worker_pb2_grpc.WorkerServiceStub(self.channel)

    def attach_call(self, epoch: Epoch, nonce: int) -> Any:
        request = worker_pb2.AttachRequest(epoch=convert.epoch_to_proto(epoch), nonce=nonce, protocol=PROTOCOL_VERSION)
        return self.stub.Attach(request, timeout=TIMEOUT_S)

    def attach(self, epoch: Epoch, nonce: int) -> WorkerReport:
        return report_of(self.attach_call(epoch, nonce))

    def execute(self, epoch: Epoch, nonce: int) -> Execution:
        return Execution(self.stub, (epoch, nonce))

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(TIMEOUT_S)


class Gate:
    """A pair of FIFOs: while armed, a forward pass says that it has started and waits to be let go."""

    def __init__(self, folder: Path) -> None:
        self._armed, started, go = folder / "armed", folder / "started", folder / "go"
        os.mkfifo(started)
        os.mkfifo(go)
        # Read and write: opening does not wait for the other side.
        self._started, self._go = os.open(started, os.O_RDWR), os.open(go, os.O_RDWR)

    def arm(self) -> None:
        self._armed.touch()

    def wait_started(self) -> None:
        assert os.read(self._started, 1) == b"s"

    def let_go(self, passes: int = 1) -> None:
        os.write(self._go, b"g" * passes)

    def disarm(self) -> None:
        self._armed.unlink()

    def close(self) -> None:
        os.close(self._started)
        os.close(self._go)


@contextmanager
def worker_process(folder: Path, **options: Any) -> Iterator[WorkerProcess]:
    """A worker with the deterministic model, ended (killed if need be) with the block."""
    ready, gate = folder / "ready.json", Gate(folder)
    command = [sys.executable, str(Path(__file__).with_name("gated_worker.py")), str(folder), json.dumps(options)]
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not ready.exists():
            assert process.poll() is None, f"the worker ended with {process.returncode}"
            assert time.monotonic() < deadline, "the worker does not serve"
            time.sleep(0.01)
        worker = WorkerProcess(process, json.loads(ready.read_text())["address"], gate)
        yield worker
        worker.channel.close()
    finally:
        process.kill()
        process.wait()
        gate.close()
