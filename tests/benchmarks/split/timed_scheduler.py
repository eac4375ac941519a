"""`tessera scheduler` that says after each worker's output where its time went, see `phases`. Timing takes some microseconds of a step."""

import time
from typing import Any

from services.cli.main import main
from services.scheduler import convert as session_convert
from services.scheduler.core.journal import Journal
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.streams import Streams
from services.scheduler.leader import Leader
from services.scheduler.store import redis_store
from services.worker import convert
from tests.benchmarks.split.phases import Phases

ON_LOOP = Phases()


def time_loop() -> None:
    """All that one output of a worker causes; `wait` is the rest of the time between two of them, other events and idleness."""
    ON_LOOP.time(convert, "output_from_proto", "convert")
    ON_LOOP.time(convert, "batch_to_proto", "convert")
    ON_LOOP.time(Scheduler, "postprocess", "postprocess")
    ON_LOOP.time(Scheduler, "schedule", "schedule")
    ON_LOOP.time(Scheduler, "take_changes", "postprocess")
    ON_LOOP.time(Journal, "add", "journal")
    ON_LOOP.time(Journal, "next_call", "journal")
    ON_LOOP.time(Journal, "on_reply", "journal")
    ON_LOOP.time(Streams, "add", "frames")
    ON_LOOP.time(Streams, "take_frame", "frames")
    ON_LOOP.time(session_convert, "response_to_proto", "frames")
    ON_LOOP.time(redis_store, "_encode", "journal")
    output, told_ns, cpu_ns = Leader.worker_output, 0, 0

    def told(self: Leader, address: str, outcome: Any) -> None:
        nonlocal told_ns, cpu_ns
        output(self, address, outcome)
        now_ns, used_ns = time.perf_counter_ns(), time.process_time_ns()
        if told_ns:
            ON_LOOP.add("whole step", now_ns - told_ns)
            ON_LOOP.add("cpu of the process", used_ns - cpu_ns)
        told_ns, cpu_ns = now_ns, used_ns
        ON_LOOP.tell(rows=len(outcome.token_counts))

    Leader.worker_output = told  # type: ignore[method-assign]


if __name__ == "__main__":
    time_loop()
    main()
