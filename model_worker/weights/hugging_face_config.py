"""What config.json and generation_config.json say of a model."""

import json
from pathlib import Path
from typing import Any

import torch

from model_worker.models.model_config import ModelConfig
from model_worker.models.registry import require_known
from model_worker.weights.architecture_config import ADDITIONS, PARTIAL_ROTARY, ROPE_DEFAULTS
from model_worker.weights.config_values import ConfigValues
from model_worker.weights.errors import ModelFileDamaged
from model_worker.weights.quantization import quantization
from model_worker.weights.rope_config import LLAMA_DEFAULTS, rope_config
from tessera.values.known_models import ModelFileMissing

_DTYPES = {"float32": torch.float32, "float16": torch.float16}


class HuggingFaceConfig:
    """The two files of a directory; config.json must be there, generation_config.json may be. A missing key takes LlamaConfig's
    default. `quantization` says how weights are stored. Raises ModelUnsupported where they cannot be decoded."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "config.json"
        if not self.path.is_file():
            raise ModelFileMissing(f"{directory} has no config.json: it is not a model directory as transformers saves it")
        self._config = ConfigValues(self.path, _read_json(self.path))
        self.quantization = quantization(self._config)
        generation = directory / "generation_config.json"
        self._generation = ConfigValues(generation, _read_json(generation) if generation.is_file() else {})

    @property
    def values(self) -> ConfigValues:
        """All that config.json says."""
        return self._config

    def model_config(self, architecture: str = "") -> ModelConfig:
        """The model's shape, as of `architecture`, or of the one that it names. Raises UnknownArchitecture, ModelUnsupported or ModelFileDamaged."""
        config, architecture = self._config, architecture or self._architecture()
        config.require("hidden_act", config.get("hidden_act", "silu"), "silu")
        config.require("use_sliding_window", config.flag("use_sliding_window"), False)
        rope = rope_config(config, ROPE_DEFAULTS.get(architecture, LLAMA_DEFAULTS))
        if architecture not in PARTIAL_ROTARY:
            config.require("partial_rotary_factor", rope.partial_factor, 1.0)
        hidden_size, num_heads = config.count("hidden_size"), config.count("num_attention_heads")
        head_dim = config.count("head_dim", hidden_size // num_heads)
        num_kv_heads = config.count("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ModelFileDamaged(
                f"{self.path}: num_key_value_heads is {num_kv_heads}, which does not divide num_attention_heads, {num_heads}"
            )
        shape = ModelConfig(
            architecture=architecture,
            vocab_size=config.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=config.count("intermediate_size"),
            num_layers=config.count("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_model_len=config.count("max_position_embeddings", 2048),
            rms_norm_eps=config.number("rms_norm_eps", float, 1e-6),
            rope_theta=rope.theta,
            tie_word_embeddings=config.flag("tie_word_embeddings"),
            attention_bias=config.flag("attention_bias"),
            mlp_bias=config.flag("mlp_bias"),
            rope_scaling=rope.scaling,
            rotary_dim=int(head_dim * rope.partial_factor),
        )
        return ADDITIONS[architecture](shape, config) if architecture in ADDITIONS else shape

    def dtype(self) -> torch.dtype:
        """What the model was saved in: float32, as transformers has it, where nothing is said, and bfloat16 for numbers of fewer bits."""
        said = self._config.get("dtype") or self._config.get("torch_dtype") or "float32"
        return _DTYPES.get(said, torch.bfloat16)

    def eos_token_ids(self) -> tuple[int, ...]:
        """From generation_config.json, else config.json: one id or a list."""
        return self._token_ids("eos_token_id")

    def bos_token_id(self) -> int | None:
        """From generation_config.json, else config.json."""
        ids = self._token_ids("bos_token_id")
        return ids[0] if ids else None

    def _token_ids(self, key: str) -> tuple[int, ...]:
        source = self._config if self._generation.get(key) is None else self._generation
        said = source.get(key)
        ids = said if isinstance(said, list) else [] if said is None else [said]
        if not all(isinstance(token, int) and token >= 0 for token in ids):
            raise ModelFileDamaged(f"{source.path}: {key} is {said!r}, neither a token id nor a list of some")
        return tuple(ids)

    def _architecture(self) -> str:
        names = self._config.get("architectures")
        if not names:
            raise ModelFileDamaged(f"{self.path} lacks `architectures`")
        return require_known(names[0])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelFileDamaged(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelFileDamaged(f"{path} holds a {type(values).__name__}, not an object")
    return values
