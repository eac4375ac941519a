"""Columns as the bytes of messages: little-endian, int32 unless said otherwise."""

import numpy as np

from services.worker.convert_types import MalformedMessage


def column_from_bytes(data: bytes, field: str) -> np.ndarray:
    """An int32 column `[len(data) / 4]`, read-only, sharing the message's memory."""
    return _from_bytes(data, field, "<i4")


def column_to_bytes(column: np.ndarray) -> bytes:
    """The bytes of a one-dimensional int32 array."""
    assert column.dtype == np.int32 and column.ndim == 1, f"not an int32 column: {column.dtype} {column.shape}"
    return column.astype("<i4", copy=False).tobytes()


def floats_from_bytes(data: bytes, field: str) -> np.ndarray:
    """The same for float32."""
    return _from_bytes(data, field, "<f4")


def floats_to_bytes(column: np.ndarray) -> bytes:
    """The same for float32."""
    assert column.dtype == np.float32 and column.ndim == 1, f"not a float32 column: {column.dtype} {column.shape}"
    return column.astype("<f4", copy=False).tobytes()


def check_counts(counts: np.ndarray, values: np.ndarray, counts_field: str, values_field: str) -> None:
    """Raise MalformedMessage unless there are as many values as the counts, none of them negative, add up to."""
    if len(counts) and counts.min() < 0:
        raise MalformedMessage(f"{counts_field}: negative count {counts.min()}")
    if counts.sum(dtype=np.int64) != len(values):
        raise MalformedMessage(f"{values_field}: {len(values)} values, {counts_field} add up to {counts.sum(dtype=np.int64)}")


def _from_bytes(data: bytes, field: str, dtype: str) -> np.ndarray:
    if len(data) % 4:
        raise MalformedMessage(f"{field}: {len(data)} bytes are not a whole number of values of 4 bytes")
    return np.frombuffer(data, dtype=dtype)
