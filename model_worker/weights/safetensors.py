"""Models in Hugging Face directories: config.json, tokenizer.json and one or more safetensors files."""

import json
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model_worker.models.model_config import ModelConfig
from model_worker.weights.digest import weights_digest
from model_worker.weights.errors import ModelFileDamaged, ModelUnsupported, WeightShapeMismatch
from model_worker.weights.hugging_face_config import HuggingFaceConfig
from tessera.values.known_models import ModelFileMissing
from tessera.values.model import ModelInfo
from tessera.values.tokenizer_digest import tokenizer_json_digest

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class SafetensorsSource:
    """A model directory. See `ModelSource`."""

    def __init__(self, directory: Path, name: str) -> None:
        config = HuggingFaceConfig(directory)
        tokenizer = directory / "tokenizer.json"
        if not tokenizer.is_file():
            raise ModelFileMissing(f"{directory} has no tokenizer.json; save one with transformers' `save_pretrained`")
        self.config = config.model_config()
        files = _weight_files(directory)
        self._files = {weight: path for path in files for weight in _names(path) if not _is_derived(weight, self.config)}
        self.info = ModelInfo(
            name=name,
            architecture=self.config.architecture,
            vocab_size=self.config.vocab_size,
            max_model_len=self.config.max_model_len,
            eos_token_ids=config.eos_token_ids(),
            bos_token_id=config.bos_token_id(),
            tokenizer_digest=tokenizer_json_digest(tokenizer.read_bytes()),
            weights_digest=weights_digest([config.path, *files]),
        )

    def names(self) -> Collection[str]:
        return self._files.keys()

    def read(self, name: str, slot: Tensor) -> None:
        path = self._files[name]
        # The file is mapped for one weight at a time: kept open, its pages would count as a second copy of the model.
        with safe_open(path, framework="pt") as file:
            weight = file.get_tensor(name)
        if weight.shape != slot.shape:
            raise WeightShapeMismatch(f"{path}: {name} is {tuple(weight.shape)}, the model needs {tuple(slot.shape)}")
        if weight.dtype not in _DTYPES:
            raise ModelUnsupported(f"{path}: {name} is {weight.dtype}; float32, float16 and bfloat16 can be read")
        slot.copy_(weight)


def _weight_files(directory: Path) -> list[Path]:
    """The files named by the index, else every safetensors file."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise ModelFileMissing(
                f"{directory} has no *.safetensors file; convert other weights with transformers' `save_pretrained`"
            )
        return files
    try:
        files = [directory / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileDamaged(f"{index} has no usable weight_map: {error!r}") from error
    for file in files:
        if not file.is_file():
            raise ModelFileMissing(f"{index.name} names {file.name}, which is not in {directory}")
    return files


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise ModelFileDamaged(f"{path} cannot be read: {error}") from error


def _is_derived(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint may hold this although it is no weight of its own: rotary tables, and the head where it is the embedding."""
    return name.endswith(".rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")
