"""Traces of real services: when requests came, and how long prompts and answers were. Two published formats are read.

Azure's LLM inference traces: CSV with TIMESTAMP,ContextTokens,GeneratedTokens. Mooncake's: JSON lines with timestamp (ms), input_length,
output_length and hash_ids, one for each 512 prompt tokens: prompts with the same ids at their beginning begin with the same tokens.
"""

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

TRACE_BLOCK_TOKENS = 512
"""Prompt tokens that one of Mooncake's hash_ids stands for."""


class TraceError(ValueError):
    """A file that is no trace; says the line and what is expected there."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """`arrival_s` after the first one. `block_ids`: one for each TRACE_BLOCK_TOKENS of the prompt; empty where the trace does not say."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of the file, by their arrival. The format is told by the first line. Raises TraceError, OSError."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        is_json = file.readline().lstrip().startswith("{")
        file.seek(0)
        rows = _json_rows(file) if is_json else _csv_rows(file)
        read = _mooncake if is_json else _azure
        try:
            found = [_read_row(read, path, line, row) for line, row in islice(rows, limit)]
        except csv.Error as error:
            raise TraceError(f"{path}: {error}") from error
    if not found:
        raise TraceError(f"{path}: has no requests")
    found.sort(key=lambda request: request.arrival_s)
    first_s = found[0].arrival_s
    return [TraceRequest(item.arrival_s - first_s, item.input_tokens, item.output_tokens, item.block_ids) for item in found]


def _csv_rows(file: Any) -> Iterator[tuple[int, Any]]:
    reader = csv.DictReader(file)
    for row in reader:
        yield reader.line_num, row


def _json_rows(file: Any) -> Iterator[tuple[int, Any]]:
    for line, text in enumerate(file, 1):
        if text.strip():
            yield line, text


def _read_row(read: Callable[[Any], TraceRequest], path: Path, line: int, row: Any) -> TraceRequest:
    try:
        return read(row)
    except (KeyError, TypeError, ValueError) as error:
        why = f"has no {error}" if isinstance(error, KeyError) else str(error)
        raise TraceError(
            f"{path}, line {line}: {why}; expected is CSV with TIMESTAMP,ContextTokens,GeneratedTokens (Azure's traces) or JSON lines "
            "with timestamp, input_length, output_length, hash_ids (Mooncake's)"
        ) from error


def _azure(row: dict[str, str]) -> TraceRequest:
    arrival_s = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
    return TraceRequest(arrival_s, _tokens(row["ContextTokens"]), _tokens(row["GeneratedTokens"]))


def _mooncake(text: str) -> TraceRequest:
    row = json.loads(text)
    block_ids = tuple(int(item) for item in row.get("hash_ids", ()))
    if any(item < 0 for item in block_ids):
        raise ValueError("a hash id is negative")
    return TraceRequest(float(row["timestamp"]) / 1000, _tokens(row["input_length"]), _tokens(row["output_length"]), block_ids)


def _tokens(given: str | int) -> int:
    """At least 1: some traces have answers of none."""
    tokens = int(given)
    if tokens < 0:
        raise ValueError(f"{tokens} tokens")
    return max(1, tokens)
