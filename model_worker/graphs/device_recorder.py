"""Graphs of a GPU. torch for ROCm has HIP's under the same names."""

from collections.abc import Callable

import torch

from model_worker.graphs.recorder import Replay

WARM_UPS = 2
"""Runs before one is recorded: kernels are compiled and chosen, and libraries take the memory they keep, outside of the graph."""


class DeviceRecorder:
    """See `Recorder`. All graphs share one pool of memory, so the largest should be recorded first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], None]) -> Replay:
        with torch.cuda.device(self._device):
            now, beside = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
            beside.wait_stream(now)
            with torch.cuda.stream(beside):
                for _ in range(WARM_UPS):
                    run()
            now.wait_stream(beside)
            graph = torch.cuda.CUDAGraph()
            # Only this thread: others, such as the one that watches collectives, may go on asking the device how far it is.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                run()
        replay: Replay = graph.replay
        return replay
