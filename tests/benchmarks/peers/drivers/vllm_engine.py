"""vLLM's engine, without its server: `python vllm_engine.py MODEL_FOLDER DTYPE THREADS`, in its environment."""

import os
import sys
import time

MODEL, DTYPE, THREADS = sys.argv[1:]
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{int(THREADS) - 1}",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}

import vllm  # noqa: E402
from questions import Run, Timeline, answer_questions  # noqa: E402


def load() -> tuple[str, Run]:
    """With the sizes of steps that suit the workloads."""
    sizes = {"max_model_len": 2048, "max_num_seqs": 64, "max_num_batched_tokens": 2048}
    engine = vllm.LLM(MODEL, dtype=DTYPE, enable_prefix_caching=True, seed=0, **sizes).llm_engine
    numbers = iter(range(1 << 62))

    def run(prompts: list[list[int]], output_tokens: int) -> list[Timeline]:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
        times: dict[str, Timeline] = {}
        for prompt in prompts:
            name = str(next(numbers))
            times[name] = (time.perf_counter(), [])
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                came = times[output.request_id][1]
                came.extend([now] * (len(output.outputs[0].token_ids) - len(came)))
        return list(times.values())

    return vllm.__version__, run


if __name__ == "__main__":
    answer_questions(load)
