"""What config.json and generation_config.json say of a model."""

import json
from pathlib import Path
from typing import Any, TypeVar

from model_worker.models.model_config import ModelConfig
from model_worker.models.registry import require_known
from model_worker.weights.errors import ModelFileDamaged, ModelUnsupported
from tessera.values.known_models import ModelFileMissing

T = TypeVar("T", int, float)


class HuggingFaceConfig:
    """The two files of a directory; config.json must be there, generation_config.json may be. A missing key takes LlamaConfig's default."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "config.json"
        if not self.path.is_file():
            raise ModelFileMissing(f"{directory} has no config.json: it is not a model directory as transformers saves it")
        self._values = _read_json(self.path)
        generation = directory / "generation_config.json"
        self._generation = _read_json(generation) if generation.is_file() else {}

    def model_config(self) -> ModelConfig:
        """The model's shape. Raises UnknownArchitecture, ModelUnsupported or ModelFileDamaged."""
        architecture = self._architecture()
        self._refuse_unsupported()
        hidden_size, num_heads = self._number("hidden_size", int), self._number("num_attention_heads", int)
        return ModelConfig(
            architecture=architecture,
            vocab_size=self._number("vocab_size", int),
            hidden_size=hidden_size,
            intermediate_size=self._number("intermediate_size", int),
            num_layers=self._number("num_hidden_layers", int),
            num_heads=num_heads,
            num_kv_heads=self._number("num_key_value_heads", int, num_heads),
            head_dim=self._number("head_dim", int, hidden_size // num_heads),
            max_model_len=self._number("max_position_embeddings", int, 2048),
            rms_norm_eps=self._number("rms_norm_eps", float, 1e-6),
            rope_theta=self._rope_theta(),
            tie_word_embeddings=bool(self._values.get("tie_word_embeddings", False)),
            attention_bias=bool(self._values.get("attention_bias", False)),
            mlp_bias=bool(self._values.get("mlp_bias", False)),
        )

    def eos_token_ids(self) -> tuple[int, ...]:
        """From generation_config.json, else config.json: one id or a list."""
        return self._token_ids("eos_token_id")

    def bos_token_id(self) -> int | None:
        """From generation_config.json, else config.json."""
        ids = self._token_ids("bos_token_id")
        return ids[0] if ids else None

    def _token_ids(self, key: str) -> tuple[int, ...]:
        ids = self._generation.get(key)
        ids = self._values.get(key) if ids is None else ids
        return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)

    def _architecture(self) -> str:
        names = self._values.get("architectures")
        if not names:
            raise ModelFileDamaged(f"{self.path} lacks `architectures`")
        return require_known(names[0])

    def _number(self, key: str, kind: type[T], default: T | None = None) -> T:
        value = self._values.get(key)
        value = default if value is None else value
        if not isinstance(value, (int, float)):
            raise ModelFileDamaged(f"{self.path}: {key} is {'missing' if value is None else f'{value!r}, not a number'}")
        return kind(value)

    def _rope_theta(self) -> float:
        """transformers 5 keeps it in `rope_parameters`, earlier ones at the top level."""
        theta = self._rope().get("rope_theta")
        return self._number("rope_theta", float, 10000.0) if theta is None else float(theta)

    def _rope(self) -> dict[str, Any]:
        return self._values.get("rope_parameters") or self._values.get("rope_scaling") or {}

    def _refuse_unsupported(self) -> None:
        rope = self._rope()
        demands = {
            "hidden_act": (self._values.get("hidden_act", "silu"), "silu"),
            "rope_type": (rope.get("rope_type", rope.get("type", "default")), "default"),
            "partial_rotary_factor": (rope.get("partial_rotary_factor", self._values.get("partial_rotary_factor", 1.0)), 1.0),
            "quantization_config": (self._values.get("quantization_config"), None),
        }
        for key, (value, supported) in demands.items():
            if value != supported:
                raise ModelUnsupported(f"{self.path}: {key} {value!r} is not supported, only {supported!r}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelFileDamaged(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelFileDamaged(f"{path} holds a {type(values).__name__}, not an object")
    return values
