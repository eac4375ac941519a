"""Typed access to what a config.json says."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from model_worker.weights.errors import ModelFileDamaged, ModelUnsupported

T = TypeVar("T", int, float)


class ConfigValues:
    """The object at `path`, or one inside it; `prefix` says which in messages. null counts as missing."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self._values = values
        self._prefix = prefix

    def names(self) -> Collection[str]:
        """What there is, null or not."""
        return self._values.keys()

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is, `default` where it is missing."""
        value = self._values.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        """A number of things of which there must be one. Raises as `number` does, and for less."""
        number = self.number(key, int, default)
        if number < 1:
            raise ModelFileDamaged(f"{self.path}: {self._prefix}{key} is {number}, it must be at least 1")
        return number

    def number(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Raises ModelFileDamaged for what is no number, or missing without a default."""
        value = self.get(key, default)
        if not isinstance(value, (int, float)):
            said = "missing" if value is None else f"{value!r}, not a number"
            raise ModelFileDamaged(f"{self.path}: {self._prefix}{key} is {said}")
        return kind(value)

    def optional(self, key: str, kind: type[T]) -> T | None:
        """The number, None where it is missing. Raises ModelFileDamaged for what is no number."""
        return None if self.get(key) is None else self.number(key, kind)

    def flag(self, key: str, default: bool = False) -> bool:
        """Whether it is true."""
        return bool(self.get(key, default))

    def first_of(self, *keys: str) -> str:
        """The first of `keys` that holds something, else the first: versions of transformers name some things differently."""
        return next((key for key in keys if self.get(key)), keys[0])

    def inside(self, *keys: str) -> "ConfigValues":
        """The object under `first_of(keys)`, an empty one where there is none."""
        key = self.first_of(*keys)
        return ConfigValues(self.path, self.get(key, {}), f"{self._prefix}{key}.")

    def require(self, key: str, value: object, *supported: object) -> None:
        """Raises ModelUnsupported unless `value` is one of the supported ones."""
        if value not in supported:
            known = " and ".join(map(repr, supported))
            raise ModelUnsupported(f"{self.path}: {self._prefix}{key} {value!r} is not supported, only {known}")
