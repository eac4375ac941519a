"""Tensors in safetensors files: which there are, and any part of one."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from model_worker.weights.errors import ModelFileDamaged
from model_worker.weights.fused_weights import Index
from tessera.values.known_models import ModelFileMissing

REOPEN_BYTES = 1 << 26
"""A file is opened again after so many bytes of weights; the memory it may take."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What the file at `path` has under `name`; `dtype` in the format's words, F32 or F8_E4M3 for example."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


class TensorFiles:
    """Reads tensors, one after the other."""

    def __init__(self) -> None:
        self._file: tuple[Path, Any] | None = None
        self.read_bytes = 0  # from it

    def read(self, tensor: StoredTensor, index: Index = ()) -> Tensor:
        """A part of a tensor, in its own dtype."""
        file = self._opened(tensor.path)
        part: Tensor = file.get_slice(tensor.name)[index] if index else file.get_tensor(tensor.name)
        self.read_bytes += part.nbytes
        return part

    def _opened(self, path: Path) -> Any:
        """The file at `path`, for one tensor. Opening reads the names of all tensors in it, so it stays open for some; kept open for
        all, its mapped pages would count as a second copy of the model."""
        if self._file is None or self._file[0] != path or self.read_bytes >= REOPEN_BYTES:
            self._file = path, safe_open(path, framework="pt")
            self.read_bytes = 0
        return self._file[1]


def weight_files(directory: Path) -> list[Path]:
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


def stored_tensors(files: Sequence[Path]) -> list[StoredTensor]:
    """All that is in the files. Raises ModelFileDamaged."""
    tensors = []
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    part = file.get_slice(name)
                    tensors.append(StoredTensor(path, name, tuple(part.get_shape()), part.get_dtype()))
        except (SafetensorError, OSError) as error:
            raise ModelFileDamaged(f"{path} cannot be read: {error}") from error
    return tensors
