"""Qwen3 (arXiv:2505.09388): Llama with a norm over each query and key head."""

from model_worker.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    """See `CausalLM` for the contract. `config.qk_norm` is set."""
