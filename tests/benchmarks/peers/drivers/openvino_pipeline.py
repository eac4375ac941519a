"""OpenVINO GenAI's continuous batching: `python openvino_pipeline.py MODEL_FOLDER PRECISION THREADS`, in its environment."""

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import openvino
import openvino_genai
from questions import Run, answer_questions, stepwise

MODEL, PRECISION, THREADS = sys.argv[1:]


class Pipeline:
    """See `Stepwise`. With the sizes of steps that suit the workloads, and KV in `PRECISION`, which is faster here than its own choice."""

    def __init__(self) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2
        scheduler.max_num_seqs = 64
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        properties = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": int(THREADS)}
        properties |= {"KV_CACHE_PRECISION": PRECISION, "INFERENCE_PRECISION_HINT": PRECISION}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(MODEL, scheduler, "CPU", properties, {})
        self._handles: dict[int, Any] = {}

    def add(self, number: int, prompt: list[int], output_tokens: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.min_new_tokens = config.max_new_tokens = output_tokens
        config.ignore_eos, config.do_sample = True, False
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        self._handles[number] = self._pipeline.add_request(number, ids, config)

    def step(self) -> Iterator[tuple[int, int]]:
        self._pipeline.step()
        for number, handle in self._handles.items():
            if handle.can_read():
                yield number, sum(len(output.generated_ids) for output in handle.read().values())
        if not self.is_busy():
            self._handles.clear()

    def is_busy(self) -> bool:
        return bool(self._pipeline.has_non_finished_requests())

    def give_up(self, numbers: list[int]) -> None:
        for number in numbers:
            self._handles[number].stop()
        while self.is_busy():
            self._pipeline.step()
        self._handles.clear()


def load() -> tuple[str, Run]:
    """From a GGUF file or a folder of its own format."""
    return openvino_genai.__version__, stepwise(Pipeline())


if __name__ == "__main__":
    answer_questions(load)
