"""What a worker serves and how its KV cache is laid out."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A served model. `tokenizer_digest` is the sha256 (hex) of the canonical tokenizer JSON; both ends must agree on it."""

    name: str
    architecture: str  # as in config.json, e.g. LlamaForCausalLM
    vocab_size: int
    max_model_len: int  # prompt + output, tokens
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    tokenizer_digest: str
    weights_digest: str  # names weights and format; part of the KV namespace


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The KV pool of one worker. `num_blocks` blocks of `block_size` tokens; ids run from 0 to num_blocks - 1. The host pool, for
    what is swapped out, has `num_host_blocks` more, with ids of their own from 0; 0: there is none."""

    num_blocks: int
    block_size: int
    bytes_per_token: int
    kv_format: str  # layout and dtype, e.g. "torch/f32"; part of the KV namespace
    num_host_blocks: int = 0

    @property
    def num_tokens(self) -> int:
        """Capacity of the pool in tokens."""
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """The most one batch may hold; a batch beyond it is refused. `num_speculative_tokens`: drafts in one decode row; 0: the worker makes none. Of
    `max_batches_in_flight` one is for prompts that come late, see `model_worker.joined_batch`."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_batches_in_flight: int = 3
    num_speculative_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """Everything about a worker that holds for one boot. `boot_id` is 16 random bytes per process start."""

    boot_id: bytes
    model: ModelInfo
    geometry: KVGeometry
    limits: WorkerLimits
