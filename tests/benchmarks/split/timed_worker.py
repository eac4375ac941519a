"""`tessera worker` that says after each step where its time went, see `phases`. Timing takes some microseconds of a step."""

import threading
import time
from typing import Any

from model_worker import engine as engine_module
from model_worker.engine import Engine
from model_worker.layers.decoder import Decoder
from services.cli.main import main
from services.worker import convert
from services.worker.engine_thread import EngineThread
from tests.benchmarks.split.phases import Phases

IN_ENGINE, ON_LOOP = Phases(), Phases()
"""The thread that computes, and the event loop beside it."""


def time_engine() -> None:
    """All of a step, and the wait for the next."""
    for name, phase in (("check_batch", "apply"), ("select_rows", "rows"), ("build_batch", "rows"), ("prompt_targets", "rows")):
        IN_ENGINE.time(engine_module, name, phase)
    IN_ENGINE.time(Engine, "_apply", "apply")
    IN_ENGINE.time(Decoder, "forward", "forward")
    IN_ENGINE.time(Engine, "_sample", "sample")
    IN_ENGINE.time(Engine, "execute", "other")
    execute, ended_ns = EngineThread._execute, 0

    def told(self: EngineThread, batch: Any) -> Any:
        nonlocal ended_ns
        began_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        if ended_ns:
            IN_ENGINE.add("wait", began_ns - ended_ns)
        outcome = execute(self, batch)
        ended_ns = time.perf_counter_ns()
        IN_ENGINE.add("cpu of the thread", time.thread_time_ns() - cpu_ns)
        IN_ENGINE.tell(rows=batch.num_rows, decodes=batch.num_decodes, tokens=batch.total_tokens)
        return outcome

    EngineThread._execute = told  # type: ignore[method-assign]


def time_loop() -> None:
    """What the loop does for each batch."""
    from services.worker.execute_stream import ExecuteStream

    ON_LOOP.time(convert, "batch_from_proto", "convert in")
    ON_LOOP.time(convert, "output_to_proto", "convert out")
    tell = ExecuteStream.tell

    def told(self: ExecuteStream, outcome: Any) -> None:
        assert threading.current_thread() is threading.main_thread()
        tell(self, outcome)
        ON_LOOP.tell(loop=1)

    ExecuteStream.tell = told  # type: ignore[method-assign]


if __name__ == "__main__":
    time_engine()
    time_loop()
    main()
