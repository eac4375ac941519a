"""What a GGUF file's metadata says of the model: its shape and its description."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from model_worker.models.model_config import ModelConfig
from model_worker.models.registry import UnknownArchitecture
from model_worker.weights.errors import ModelFileDamaged, ModelUnsupported
from tessera.values.gguf_header import GGUFTensor
from tessera.values.model import ModelInfo
from tessera.values.tokenizer_digest import gguf_tokenizer_digest

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""`general.architecture` -> the name in config.json."""

INTERLEAVED = frozenset(("LlamaForCausalLM",))
"""Architectures whose query and key rows llama.cpp's converter puts into another order; it rotates the others as we do."""

_QK_NORM = frozenset(("Qwen3ForCausalLM",))

T = TypeVar("T")


class GGUFMetadata:
    """Typed access to the metadata of the file at `path`."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self._path = path
        self._values = values

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of `key`. Raises ModelFileDamaged if it is absent without a default, ModelUnsupported if of another type."""
        value = self._values.get(key, default)
        if value is None:
            raise ModelFileDamaged(f"{self._path} lacks the metadata key {key}")
        if not isinstance(value, kind):
            raise ModelUnsupported(
                f"{self._path}: metadata key {key} is a {type(value).__name__}; this worker expects {kind.__name__}"
            )
        return value

    def optional_id(self, name: str) -> int | None:
        """The token id under `tokenizer.ggml.{name}_token_id`, None where the file has none."""
        key = f"tokenizer.ggml.{name}_token_id"
        return self.get(key, int) if key in self._values else None

    def refuse(self, problem: str) -> ModelUnsupported:
        """The error that says why this file cannot be served."""
        return ModelUnsupported(f"{self._path}: {problem}")

    def architecture(self) -> str:
        """The architecture as config.json would name it. Raises UnknownArchitecture."""
        name = self.get("general.architecture", str)
        if name not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            raise UnknownArchitecture(f"{self._path}: GGUF architecture {name!r} cannot be run; known ones: {known}")
        return ARCHITECTURES[name]

    def tokenizer_digest(self) -> str:
        """See `tessera.values.tokenizer_digest`."""
        return gguf_tokenizer_digest(
            self.get("tokenizer.ggml.tokens", list),
            self.get("tokenizer.ggml.merges", list, []),
            self.get("tokenizer.ggml.token_type", list, []),
            self.get("tokenizer.ggml.pre", str, ""),
        )


def gguf_config(metadata: GGUFMetadata, tensors: Mapping[str, GGUFTensor]) -> ModelConfig:
    """The model's shape; `tensors` by Hugging Face name tells what metadata leaves open (vocabulary, biases, a head of its own)."""
    architecture = metadata.architecture()
    prefix = metadata.get("general.architecture", str)
    hidden_size = metadata.get(f"{prefix}.embedding_length", int)
    num_heads = metadata.get(f"{prefix}.attention.head_count", int)
    head_dim = metadata.get(f"{prefix}.attention.key_length", int, hidden_size // num_heads)
    if metadata.get(f"{prefix}.rope.dimension_count", int, head_dim) != head_dim:
        raise metadata.refuse("rotary embedding over part of a head is not supported")
    if metadata.get(f"{prefix}.rope.scaling.type", str, "none") != "none" or "rope_freqs.weight" in tensors:
        raise metadata.refuse("scaled rotary embedding is not supported")
    if metadata.get("split.count", int, 1) > 1:
        raise metadata.refuse("a GGUF model in several files is not supported; merge them with llama-gguf-split")
    if "model.embed_tokens.weight" not in tensors:
        raise ModelFileDamaged("the GGUF file has no tensor token_embd.weight")
    return ModelConfig(
        architecture=architecture,
        vocab_size=tensors["model.embed_tokens.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=metadata.get(f"{prefix}.feed_forward_length", int),
        num_layers=metadata.get(f"{prefix}.block_count", int),
        num_heads=num_heads,
        num_kv_heads=metadata.get(f"{prefix}.attention.head_count_kv", int, num_heads),
        head_dim=head_dim,
        max_model_len=metadata.get(f"{prefix}.context_length", int),
        rms_norm_eps=metadata.get(f"{prefix}.attention.layer_norm_rms_epsilon", float),
        rope_theta=metadata.get(f"{prefix}.rope.freq_base", float, 10000.0),
        tie_word_embeddings="lm_head.weight" not in tensors,
        attention_bias="model.layers.0.self_attn.q_proj.bias" in tensors,
        qk_norm=architecture in _QK_NORM,
        mlp_bias="model.layers.0.mlp.gate_proj.bias" in tensors,
    )


def gguf_info(metadata: GGUFMetadata, config: ModelConfig, name: str, weights_digest: str) -> ModelInfo:
    """The description of the model served as `name`. EOS ids: end of sequence, then end of turn where the file has one."""
    eos_ids = [token_id for token_id in (metadata.optional_id("eos"), metadata.optional_id("eot")) if token_id is not None]
    return ModelInfo(
        name=name,
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        max_model_len=config.max_model_len,
        eos_token_ids=tuple(dict.fromkeys(eos_ids)),
        bos_token_id=metadata.optional_id("bos"),
        tokenizer_digest=metadata.tokenizer_digest(),
        weights_digest=weights_digest,
    )
