"""What a model takes of a GPU beside its KV pool, measured by running it."""

from collections.abc import Callable

import numpy as np

from model_worker.batch import Batch
from model_worker.device_memory import DeviceMemory
from model_worker.gpu_memory import GPUMemory
from model_worker.input_batch import build_dummy_batch
from model_worker.kv_pool import KVPool


class MemoryProfile:
    """Of one rank. Make it before anything is loaded: what is taken by then is other processes', and the driver's.

    All ranks of a model must `measure` at the same time, since their passes meet in collectives.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._others = memory.total - memory.free()

    def measure(
        self, warm_up: Callable[[], object], run_largest: Callable[[], object], record: Callable[[], object]
    ) -> GPUMemory:
        """With the model loaded. `warm_up` runs a small pass, in which weights take their last form and libraries the memory they keep;
        `run_largest` the passes that take the most; `record` returns what holds graphs, over a pool of the least size, which it may not outlive:
        their memory does not depend on the pool's."""
        memory = self._memory
        warm_up()
        memory.settle()
        weights = memory.held()
        run_largest()
        activations = memory.peak_held() - weights
        memory.settle()
        communication = memory.total - memory.free() - memory.held() - self._others
        before = memory.free()
        recorded = record()
        memory.settle()
        graphs = before - memory.free()
        del recorded
        memory.settle()
        return GPUMemory(
            memory.total, weights, activations, communication=max(0, communication), graphs=max(0, graphs), others=self._others
        )


def largest_batches(max_num_seqs: int, max_tokens: int, max_len: int, kv: KVPool, tokens_at_once: int) -> list[Batch]:
    """Batches of nobody's rows, in the null block of `kv`, that take the most memory to compute: a prompt's last chunk as long as a batch may be, beside
    decodes, with contexts of full length; decodes alone; and as many of these as have `tokens_at_once` tokens between them, up to which kernels
    may compute in another way."""
    long_rows = -(-max_tokens // max_len)
    singles = max(0, min(max_num_seqs - long_rows, max_tokens - long_rows))
    chunks = np.full(long_rows, (max_tokens - singles) // long_rows)
    batches = [_rows(np.concatenate((np.ones(singles, np.int64), chunks)), singles, max_len, kv)]
    for count in {max_num_seqs, min(max_num_seqs, max(1, tokens_at_once // max_len))}:
        batches.append(_rows(np.ones(count, np.int64), count, max_len, kv))
    return batches


def _rows(counts: np.ndarray, num_decodes: int, max_len: int, kv: KVPool) -> Batch:
    return build_dummy_batch(counts, np.full(len(counts), max_len), num_decodes, kv)
