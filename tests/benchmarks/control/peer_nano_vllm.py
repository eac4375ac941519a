"""nano-vllm's scheduler and block manager: run `python peer_nano_vllm.py SOURCE`, SOURCE its repository.

Its package is entered by hand: importing it whole would import torch and its kernels, which the scheduler does not use.
"""

import sys
from time import process_time
from types import ModuleType, SimpleNamespace

import peer_workload

SOURCE = sys.argv[1]
for name in ("nanovllm", "nanovllm.engine"):
    package = ModuleType(name)
    package.__path__ = [f"{SOURCE}/{name.replace('.', '/')}"]
    sys.modules[name] = package
config = ModuleType("nanovllm.config")
config.Config = object
sys.modules["nanovllm.config"] = config

from nanovllm.engine.scheduler import Scheduler  # noqa: E402
from nanovllm.engine.sequence import Sequence  # noqa: E402
from nanovllm.sampling_params import SamplingParams  # noqa: E402


class NanoVLLM:
    """See `peer_workload.Peer`."""

    def __init__(self, num_blocks: int, seqs_max: int) -> None:
        Sequence.block_size = peer_workload.BLOCK_SIZE
        self._scheduler = Scheduler(
            SimpleNamespace(
                max_num_seqs=seqs_max,
                max_num_batched_tokens=peer_workload.TOKENS_MAX,
                eos=-1,
                kvcache_block_size=peer_workload.BLOCK_SIZE,
                num_kvcache_blocks=num_blocks,
            )
        )

    def add(self, prompt: list[int], max_tokens: int) -> float:
        begun = process_time()
        self._scheduler.add(Sequence(prompt, SamplingParams(temperature=1.0, max_tokens=max_tokens, ignore_eos=True)))
        return process_time() - begun

    def step(self) -> tuple[float, int]:
        begun = process_time()
        sequences, is_prefill = self._scheduler.schedule()
        scheduled = process_time()
        token_ids = [7] * len(sequences)
        answered = process_time()
        self._scheduler.postprocess(sequences, token_ids, is_prefill)
        return scheduled - begun + process_time() - answered, len(sequences)

    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)


peer_workload.measure(NanoVLLM)
