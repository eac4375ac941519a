"""Models in Hugging Face directories: config.json, tokenizer.json and one or more safetensors files."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from model_worker.layers.weight_slot import WeightSlot
from model_worker.models.model_config import ModelConfig
from model_worker.weights.digest import weights_digest
from model_worker.weights.errors import ModelFileDamaged, ModelUnsupported, WeightShapeMismatch, WeightUnexpected
from model_worker.weights.fused_weights import Index, narrowed, part_shape, stored_parts
from model_worker.weights.hugging_face_config import HuggingFaceConfig
from tessera.values.known_models import ModelFileMissing
from tessera.values.model import ModelInfo
from tessera.values.tokenizer_digest import tokenizer_json_digest

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

REOPEN_BYTES = 1 << 26
"""A file is opened again after so many bytes of weights; the memory it may take."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """The part `index` of what the file `path` has under `name`, and the shape of that part."""

    path: Path
    name: str
    index: Index
    num_dims: int  # of all that the file has under the name
    shape: tuple[int, ...]


class SafetensorsSource:
    """A model directory. See `ModelSource`."""

    def __init__(self, directory: Path, name: str) -> None:
        config = HuggingFaceConfig(directory)
        tokenizer = directory / "tokenizer.json"
        if not tokenizer.is_file():
            raise ModelFileMissing(f"{directory} has no tokenizer.json; save one with transformers' `save_pretrained`")
        self.config = config.model_config()
        files = _weight_files(directory)
        self._file: tuple[Path, Any] | None = None
        self._read_bytes = 0  # from it
        self._weights: dict[str, _Stored] = {}
        for path in files:
            self._add(_stored_weights(path, self.config))
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
        return self._weights.keys()

    def read(self, name: str, slot: WeightSlot) -> None:
        stored = self._weights[name]
        if stored.shape != slot.shape:
            raise WeightShapeMismatch(f"{stored.path}: {name} is {stored.shape}, the model needs {slot.shape}")
        index = stored.index
        if not slot.is_whole:
            index = narrowed(index, stored.num_dims, slot.dim, slice(slot.start, slot.stop))
        file = self._opened(stored.path)
        weight = file.get_slice(stored.name)[index] if index else file.get_tensor(stored.name)
        self._read_bytes += weight.nbytes
        if weight.dtype not in _DTYPES:
            raise ModelUnsupported(f"{stored.path}: {name} is {weight.dtype}; float32, float16 and bfloat16 can be read")
        slot.view.copy_(weight)

    def _opened(self, path: Path) -> Any:
        """The file at `path`, for one weight. Opening reads the names of all weights in it, so it stays open for some; kept open for
        all, its mapped pages would count as a second copy of the model."""
        if self._file is None or self._file[0] != path or self._read_bytes >= REOPEN_BYTES:
            self._file = path, safe_open(path, framework="pt")
            self._read_bytes = 0
        return self._file[1]

    def _add(self, weights: list[tuple[str, _Stored]]) -> None:
        for name, stored in weights:
            if _is_unused(name, self.config):
                continue
            if name in self._weights:
                path, other = stored.path, self._weights[name]
                raise WeightUnexpected(
                    f"{name} is there twice: as {other.name} in {other.path.name}, as {stored.name} in {path.name}; {path.parent}"
                )
            self._weights[name] = stored


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


def _stored_weights(path: Path, config: ModelConfig) -> list[tuple[str, _Stored]]:
    """The weights in a file by their usual names, and where in the file each lies."""
    weights = []
    try:
        with safe_open(path, framework="pt") as file:
            for stored_name in file.keys():  # noqa: SIM118 - not a dict
                shape = file.get_slice(stored_name).get_shape()
                parts = stored_parts(stored_name, shape, config)
                for name, index in parts.items():
                    weights.append((name, _Stored(path, stored_name, index, len(shape), part_shape(index, shape))))
    except (SafetensorError, OSError) as error:
        raise ModelFileDamaged(f"{path} cannot be read: {error}") from error
    return weights


def _is_unused(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint may hold this although the model has no use for it: rotary tables, the head where it is the embedding, layers
    behind the last that predict further tokens."""
    if name.endswith(".rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight"):
        return True
    match name.split("."):
        case ["model", "layers", number, *_] if number.isdecimal():
            return config.num_layers <= int(number) < config.num_layers + config.num_mtp_layers
        case _:
            return False
