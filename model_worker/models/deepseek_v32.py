"""DeepSeek-V3.2 (arXiv:2512.02556): DeepSeek-V3 that attends only to the positions an index chooses."""

from model_worker.batch import Batch
from model_worker.kernels.interface import PagedAttention
from model_worker.kv_pool import KVPool
from model_worker.models.deepseek_v3 import DeepseekV3ForCausalLM


class DeepseekV32ForCausalLM(DeepseekV3ForCausalLM):
    """See `CausalLM` for the contract. `config.latent.indexer` is set too."""

    def paged_attention(self, batch: Batch, kv: KVPool) -> PagedAttention:
        return self._kernels.sparse_attention(batch, kv)
