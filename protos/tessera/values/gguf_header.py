"""The header of a GGUF file: metadata and where each tensor lies. Format: the GGUF specification, versions 2 and 3, little-endian.

Read by hand because `gguf.GGUFReader` builds two memory maps per string: 4 s for a 49,152 token vocabulary, here 0.1 s.
Tensor data is not read; the worker dequantizes it with the `gguf` package.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_ALIGNMENT = 32  # bytes, unless general.alignment says otherwise


class GGUFFormatError(ValueError):
    """The file is no GGUF file that can be read; the message names the file and the problem."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor. `shape` is outermost dimension first (numpy order); `ggml_type` is the number in the file; `offset` counts from the file's start."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Metadata values are str, bool, int, float, or lists of these; `data_offset` is where tensor data begins (bytes)."""

    metadata: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]
    data_offset: int


def read_gguf_header(path: Path) -> GGUFHeader:
    """Read the header of the file at `path`. Raises GGUFFormatError for a malformed or unsupported file, OSError for an unreadable one."""
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8 or start[:4] != b"GGUF":
            raise GGUFFormatError(f"{path} is not a GGUF file (it begins with {start[:4]!r})")
        version = int.from_bytes(start[4:], "little")
        if version not in (2, 3):
            raise GGUFFormatError(f"{path} is GGUF version {version} or big-endian; little-endian versions 2 and 3 can be read")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _read(_Cursor(data, 8))
            except (
                struct.error,
                ArithmeticError,
                KeyError,
                TypeError,
                UnicodeDecodeError,
                MemoryError,
                RecursionError,
            ) as error:
                raise GGUFFormatError(f"{path} is damaged or cut short: its header cannot be read ({error!r})") from error


class _Cursor:
    """A position moving over the mapped file; every method reads one value and steps over it."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self._data = data
        self.position = position

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        values = struct.unpack_from(layout, self._data, self.position)
        self.position += struct.calcsize(layout)
        return values

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def string(self) -> str:
        (raw,) = self.numbers("s", self.number("Q"))
        return str(raw, "utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.number("I"), self.number("Q")
            return (
                [self.value(inner) for _ in range(count)]
                if inner in (_STRING, _ARRAY)
                else list(self.numbers(_SCALARS[inner], count))
            )
        return self.number(_SCALARS[kind])


def _read(cursor: _Cursor) -> GGUFHeader:
    tensor_count, value_count = cursor.numbers("Q", 2)
    metadata = {}
    for _ in range(value_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("I"))
    found = []
    for _ in range(tensor_count):
        name = cursor.string()
        dimensions = cursor.numbers("Q", cursor.number("I"))
        ggml_type, offset = cursor.number("I"), cursor.number("Q")
        found.append(GGUFTensor(name, tuple(reversed(dimensions)), ggml_type, offset))
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    data_offset = -(-cursor.position // alignment) * alignment
    tensors = tuple(GGUFTensor(t.name, t.shape, t.ggml_type, data_offset + t.offset) for t in found)
    return GGUFHeader(metadata, tensors, data_offset)
