"""OpenVINO GenAI's continuous batching: `python openvino_pipeline.py MODEL_FOLDER PRECISION THREADS`, in its environment."""

import sys
import time

import numpy as np
import openvino
import openvino_genai
from questions import Run, Timeline, answer_questions

MODEL, PRECISION, THREADS = sys.argv[1:]


def load() -> tuple[str, Run]:
    """With the sizes of steps that suit the workloads, and KV in `PRECISION`, which is faster here than its own choice."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_seqs = 64
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = True
    scheduler.dynamic_split_fuse = True
    properties = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": int(THREADS)}
    properties |= {"KV_CACHE_PRECISION": PRECISION, "INFERENCE_PRECISION_HINT": PRECISION}
    pipeline = openvino_genai.ContinuousBatchingPipeline(MODEL, scheduler, "CPU", properties, {})
    numbers = iter(range(1 << 62))

    def run(prompts: list[list[int]], output_tokens: int) -> list[Timeline]:
        config = openvino_genai.GenerationConfig()
        config.min_new_tokens = config.max_new_tokens = output_tokens
        config.ignore_eos, config.do_sample = True, False
        times: list[Timeline] = []
        handles = []
        for prompt in prompts:
            times.append((time.perf_counter(), []))
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            handles.append(pipeline.add_request(next(numbers), ids, config))
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = time.perf_counter()
            for handle, (_, came) in zip(handles, times, strict=True):
                if handle.can_read():
                    came.extend(now for output in handle.read().values() for _ in output.generated_ids)
        return times

    return openvino_genai.__version__, run


if __name__ == "__main__":
    answer_questions(load)
