"""ATOM's scheduler and block manager: run `python peer_atom.py SOURCE`, SOURCE its repository; needs what they import (torch)."""

import logging
import sys
from time import process_time
from types import SimpleNamespace

sys.path.append(sys.argv[1])

import peer_workload
from atom.model_engine.scheduler import ScheduledBatchOutput, Scheduler
from atom.model_engine.sequence import Sequence
from atom.sampling_params import SamplingParams

logging.getLogger("atom").setLevel(logging.ERROR)


class Atom:
    """See `peer_workload.Peer`."""

    def __init__(self, num_blocks: int, seqs_max: int) -> None:
        self._scheduler = Scheduler(
            SimpleNamespace(
                kv_cache_block_size=peer_workload.BLOCK_SIZE,
                num_kvcache_blocks=num_blocks,
                enable_prefix_caching=True,
                enable_chunked_prefill=True,
                max_num_seqs=seqs_max,
                max_num_batched_tokens=peer_workload.TOKENS_MAX,
                long_prefill_token_threshold=0,
                decode_context_parallel_size=1,
                max_model_len=4096,
                bos_token_id=1,
                eos_token_id=2,
                stop_token_ids=[],
                scheduler_delay_factor=0.0,
                speculative_config=None,
                hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"], sliding_window=None),
            )
        )

    def add(self, prompt: list[int], max_tokens: int) -> float:
        sampling = SamplingParams(temperature=1.0, max_tokens=max_tokens, ignore_eos=True)
        begun = process_time()
        self._scheduler.add(Sequence(prompt, peer_workload.BLOCK_SIZE, sampling_params=sampling))
        return process_time() - begun

    def step(self) -> tuple[float, int]:
        begun = process_time()
        batch, sequences = self._scheduler.schedule()
        scheduled = process_time()
        request_ids = list(batch.req_ids)
        output = ScheduledBatchOutput(request_ids, [(7,)] * len(request_ids), None, None, None)
        answered = process_time()
        self._scheduler.postprocess(list(sequences.values()), output, batch=batch)
        return scheduled - begun + process_time() - answered, len(request_ids)

    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)


peer_workload.measure(Atom)
