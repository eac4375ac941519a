"""Traces of real services: when requests came, and how long prompts and answers were. Two published formats are read.

Azure's LLM inference traces: CSV with TIMESTAMP,ContextTokens,GeneratedTokens. Mooncake's: JSON lines with timestamp (ms), input_length,
output_length and hash_ids, one for each 512 prompt tokens: prompts with the same ids at their beginning begin with the same tokens.
"""

import csv
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

TRACE_BLOCK_TOKENS = 512
"""Prompt tokens that one of Mooncake's hash_ids stands for."""

LINE_CHARACTERS_MAX = 1 << 20
"""Far more than the hash_ids of the longest prompt; a file without a line's end is not read for ever."""

LINES_MAX = 1_000_000
"""Read where no limit is given, blank ones too: a file or a pipe may have no end."""

TOKENS_MAX = (1 << 31) - 1
TIME_MS_MAX = 1e15
"""Either side of 0; 30,000 years."""

_DIGITS_MAX = 18
_SHOWN_MAX = 40
_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_EXPECTED = (
    f"expected is CSV with {','.join(_COLUMNS)} (Azure's traces) or JSON lines with timestamp, input_length, output_length, hash_ids "
    "(Mooncake's)"
)


class TraceError(ValueError):
    """A file that is no trace; says the line, the field, and what is expected there."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """`arrival_s` after the first one. Tokens are the trace's own, 0 too. `block_ids`: one for each TRACE_BLOCK_TOKENS of the prompt; empty
    where the trace does not say."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether its prompt or its answer has no token: nobody can ask for that."""
        return self.input_tokens == 0 or self.output_tokens == 0


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of the file, by their arrival; no line after them is read. The format is told by the first line.

    Raises TraceError, for a file that cannot be read too.
    """
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            found = list(islice(_requests(_lines(file, LINES_MAX + (limit or 0))), limit))
    except _BadLine as error:
        raise TraceError(f"{path}, line {error.line}: {error}; {_EXPECTED}") from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    if not found:
        raise TraceError(f"{path}: has no requests; {_EXPECTED}")
    found.sort(key=lambda request: request.arrival_s)
    first_s = found[0].arrival_s
    return [replace(item, arrival_s=item.arrival_s - first_s) for item in found]


class _BadLine(Exception):
    """Says what is wrong with a line. Lines count from 1."""

    def __init__(self, line: int, why: str) -> None:
        super().__init__(why)
        self.line = line


def _lines(file: TextIO, count_max: int) -> Iterator[str]:
    for line in range(1, count_max + 2):
        text = file.readline(LINE_CHARACTERS_MAX + 1)
        if not text:
            return
        if len(text) > LINE_CHARACTERS_MAX:
            raise _BadLine(line, f"has more than {LINE_CHARACTERS_MAX} characters")
        if line > count_max:
            raise _BadLine(line, f"more than {count_max} lines are not read: give --trace-limit")
        yield text


def _requests(lines: Iterator[str]) -> Iterator[TraceRequest]:
    first = next(lines, "")
    if not first:
        return
    is_json = first.lstrip().startswith("{")
    read: Callable[[Any], TraceRequest] = _mooncake if is_json else _azure
    for line, row in _json_rows(first, lines) if is_json else _csv_rows(first, lines):
        try:
            yield read(row)
        except ValueError as error:
            raise _BadLine(line, str(error)) from error


def _csv_rows(first: str, lines: Iterator[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    names = first.strip().split(",")
    missing = [name for name in _COLUMNS if name not in names]
    if missing:
        raise _BadLine(1, f"{_shown(first.strip())} is no JSON object, and has no column {', '.join(missing)}")
    reader = csv.DictReader(lines, names)
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise _BadLine(1 + reader.reader.line_num, f"cannot be read as CSV: {error}") from error
        if row is None:
            return
        yield 1 + reader.line_num, row


def _json_rows(first: str, lines: Iterator[str]) -> Iterator[tuple[int, str]]:
    yield 1, first
    for line, text in enumerate(lines, 2):
        if text.strip():
            yield line, text


def _azure(row: dict[str, Any]) -> TraceRequest:
    stamp, context, generated = (_field(row, name) for name in _COLUMNS)
    try:
        time = datetime.fromisoformat(stamp.strip())
    except ValueError:
        raise ValueError(f"TIMESTAMP {_shown(stamp)} is no time, such as 2023-11-16 18:15:46.680590") from None
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)  # not this machine's zone, whose clocks may be put back in the middle of the trace
    input_tokens, output_tokens = _tokens("ContextTokens", _whole(context)), _tokens("GeneratedTokens", _whole(generated))
    return TraceRequest(time.timestamp(), input_tokens, output_tokens)


def _mooncake(text: str) -> TraceRequest:
    try:
        row = json.loads(text, parse_int=_whole)
    except json.JSONDecodeError as error:
        raise ValueError(f"column {error.colno}: is no JSON") from error
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError(f"{_shown(row)} is no JSON object")
    time_ms = _field(row, "timestamp")
    if not _is_number(time_ms) or not abs(time_ms) <= TIME_MS_MAX:
        raise ValueError(f"timestamp {_shown(time_ms)} is no number of milliseconds, {TIME_MS_MAX:g} at most")
    input_tokens, output_tokens = (_tokens(name, _field(row, name)) for name in ("input_length", "output_length"))
    return TraceRequest(time_ms / 1000, input_tokens, output_tokens, _block_ids(row.get("hash_ids", []), input_tokens))


def _block_ids(given: Any, input_tokens: int) -> tuple[int, ...]:
    if not isinstance(given, list):
        raise ValueError(f"hash_ids {_shown(given)} is no list")
    for item in given:
        if type(item) is not int or item < 0:
            raise ValueError(f"hash_ids: {_shown(item)} is no whole number from 0")
    blocks = math.ceil(input_tokens / TRACE_BLOCK_TOKENS)
    if len(given) > blocks:
        raise ValueError(
            f"hash_ids has {len(given)} where an input_length of {input_tokens} has {blocks} blocks of {TRACE_BLOCK_TOKENS} tokens"
        )
    return tuple(given)


def _field(row: dict[str, Any], name: str) -> Any:
    value = row.get(name)
    if value is None:
        raise ValueError(f"{name} is missing")
    return value


def _tokens(name: str, given: Any) -> int:
    """A whole number written as 4.0 is one too."""
    if not _is_number(given) or not 0 <= given <= TOKENS_MAX or given != int(given):
        raise ValueError(f"{name} {_shown(given)} is no whole number from 0 to {TOKENS_MAX}")
    return int(given)


def _whole(text: str) -> int | str:
    """Its number, or the text itself where that has none of at most _DIGITS_MAX digits."""
    digits = text.strip()
    return int(digits) if re.fullmatch(rf"-?[0-9]{{1,{_DIGITS_MAX}}}", digits) else text


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."
