"""vLLM's engine, without its server: `python vllm_engine.py MODEL_FOLDER DTYPE THREADS`, in its environment."""

import os
import sys
from collections.abc import Iterator

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
from questions import Run, answer_questions, stepwise  # noqa: E402


class Engine:
    """See `Stepwise`. With the sizes of steps that suit the workloads."""

    def __init__(self) -> None:
        sizes = {"max_model_len": 2048, "max_num_seqs": 64, "max_num_batched_tokens": 2048}
        self._engine = vllm.LLM(MODEL, dtype=DTYPE, enable_prefix_caching=True, seed=0, **sizes).llm_engine
        self._counts: dict[int, int] = {}

    def add(self, number: int, prompt: list[int], output_tokens: int) -> None:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
        self._engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
        self._counts[number] = 0

    def step(self) -> Iterator[tuple[int, int]]:
        for output in self._engine.step():
            number, count = int(output.request_id), len(output.outputs[0].token_ids)
            yield number, count - self._counts[number]
            self._counts[number] = count

    def is_busy(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def give_up(self, numbers: list[int]) -> None:
        self._engine.abort_request([str(number) for number in numbers])


def load() -> tuple[str, Run]:
    """It takes a while: its kernels are compiled."""
    return vllm.__version__, stepwise(Engine())


if __name__ == "__main__":
    answer_questions(load)
